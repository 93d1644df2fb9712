/* options.c - options of `adze check` that name what is not there are refused. */
#include "options.h"

#include "kernel.h"

#include <stdio.h>
#include <string.h>

/* Whether some op has a kernel, or a variant of a kernel, of this name. */
static int kernel_known(const char *name)
{
    const size_t row = name ? strcspn(name, "/") : 0;
    int known = !name;
    for (const adze_op *const *op = adze_ops; *op; op++)
        for (const adze_kernel *k = (*op)->kernels; k->run && !known; k++)
            known = strlen(k->name) == row && memcmp(name, k->name, row) == 0 &&
                    (!name[row] || adze_variant_find(k, name + row + 1) >= 0);
    return known;
}

int adze_check_options_hold(const adze_check_options *options)
{
    if (!kernel_known(options->kernel))
        fprintf(stderr, "adze check: no kernel is called '%s'\n", options->kernel);
    else if (options->op && !adze_find_op(options->op, strlen(options->op)))
        fprintf(stderr, "adze check: no op is called '%s'\n", options->op);
    else if (options->require && options->device == ADZE_CPU)
        fprintf(stderr, "adze check: --device cpu leaves out what --require=cuda asks for\n");
    else
        return 1;
    return 0;
}
