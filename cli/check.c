/* check.c - `adze check`. */
#include "check.h"
#include "cli.h"

static const char help[] =
    "adze check [OP] [--device cpu|cuda|N] [--kernel K] [--require=cuda] [--self] [--brief] [--small]\n"
    "           [--huge] [-v]\n\n"
    "Runs every kernel that this machine can run on every case, against the definition in\n"
    "double: limits in units of the last place, guard zones, a bitwise equal second run,\n"
    "and calls that must be refused. A CUDA kernel also runs behind a slow producer of its\n"
    "inputs, in a stream and in a graph: it must wait for them. A kernel with variants runs\n"
    "the one that it chooses; each variant also runs by name, on some of the calls it takes.\n\n"
    "`worst 0.502 ulp, 100% of the limit` is the largest error of a kernel: in units in the last\n"
    "place of the output's dtype, and as a share of what is allowed there. That is half a unit,\n"
    "for the rounding of the stored result, and what float arithmetic may add, which is derived\n"
    "for each value. So 100% is right; more is a failure.\n\n"
    "  OP              one op only\n"
    "  --device D      one device only (default: the CPU and every GPU); a missing device is a\n"
    "                  failure\n"
    "  --kernel K      one kernel of each op only, such as cpu_avx2, or one variant, such as\n"
    "                  cuda/512x2-full-b3; each variant then runs every case that it takes\n"
    "  --require=cuda  fail where there is no CUDA device\n"
    "  --self          run kernels that are broken on purpose; each must be caught\n"
    "  --brief         each case with one of its dtypes, in turn, instead of all\n"
    "  --small         no calls above 8 Mflop: for an emulated processor, or with sanitizers\n"
    "  --huge          also calls above 2^31 elements, on GPUs with the memory for them\n"
    "  -v              a line per case\n";

int adze_cli_check(int argc, char **argv)
{
    adze_check_options options = {.device = ADZE_ALL_DEVICES};
    const adze_option list[] = {
        {.name = "--device", .device = &options.device},
        {.name = "--kernel", .text = &options.kernel},
        {.name = "--require", .text = &options.require, .choices = "cuda"},
        {.name = "--self", .flag = &options.self},
        {.name = "--brief", .flag = &options.brief},
        {.name = "--small", .flag = &options.small},
        {.name = "--huge", .flag = &options.huge},
        {.name = "-v", .flag = &options.verbose},
        {.name = NULL},
    };
    int status;
    if (!adze_cli_options("check", help, list, &options.op, argc, argv, &status))
        return status;
    return options.self ? adze_check_self(&options) : adze_check(&options);
}
