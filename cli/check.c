/* check.c - `adze check`. */
#include "check.h"
#include "cli.h"

#include <string.h>

static const char help[] = "adze check [OP] [--device cpu|cuda|N] [--kernel K] [--require=cuda] [--self] [--huge]\n"
                           "           [-v]\n\n"
                           "Runs every kernel that this machine can run on every case, against the definition in\n"
                           "double: limits in units of the last place, guard zones, a bitwise equal second run,\n"
                           "and calls that must be refused.\n\n"
                           "  OP              one op only\n"
                           "  --device D      one device only (default: the CPU and every GPU)\n"
                           "  --kernel K      one kernel of each op only, such as cpu_avx2\n"
                           "  --require=cuda  fail where there is no CUDA device\n"
                           "  --self          run kernels that are broken on purpose; each must be caught\n"
                           "  --huge          also calls above 2^31 elements, on GPUs with the memory for them\n"
                           "  -v              a line per case\n";

int adze_cli_check(int argc, char **argv)
{
    adze_check_options options = {.device = ADZE_ALL_DEVICES};
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            fputs(help, stdout);
            return 0;
        }
        if (strcmp(argv[i], "--self") == 0)
            options.self = 1;
        else if (strcmp(argv[i], "--huge") == 0)
            options.huge = 1;
        else if (strcmp(argv[i], "-v") == 0)
            options.verbose = 1;
        else if (strcmp(argv[i], "--require=cuda") == 0)
            options.require = "cuda";
        else if (strcmp(argv[i], "--kernel") == 0 && i + 1 < argc)
            options.kernel = argv[++i];
        else if (strcmp(argv[i], "--device") == 0 && i + 1 < argc) {
            if (!adze_cli_device(argv[++i], &options.device)) {
                fprintf(stderr, "adze check: no device is called '%s'\n", argv[i]);
                return 2;
            }
        } else if (argv[i][0] != '-' && !options.op)
            options.op = argv[i];
        else {
            fprintf(stderr, "adze check: '%s' is not understood\n\n%s", argv[i], help);
            return 2;
        }
    }
    return adze_check(&options);
}
