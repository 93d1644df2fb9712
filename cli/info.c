/* info.c - `adze info`. */
#include "check.h"
#include "cli.h"

int adze_cli_info(int argc, char **argv)
{
    (void)argc, (void)argv;
    for (const adze_op *const *op = adze_ops; *op; op++) {
        printf("%-14s", (*op)->name);
        for (const adze_kernel *k = (*op)->kernels; k->run; k++)
            printf(" %s", k->name);
        printf("\n");
    }
    return 0;
}
