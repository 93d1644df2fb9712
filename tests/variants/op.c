/* op.c - the op `activation` with a kernel of two variants, for programs that are linked with it instead of the
   library's own. `even` takes rows of an even length, which it prefers, `any` takes every call. BROKEN: `any` leaves
   the result unwritten. */
#include "kernel.h"

#include <string.h>

adze_status adze_activation_cpu(adze_stream stream, const void *args);

enum { EVEN, ANY };

static adze_status choose(adze_stream stream, const void *args, adze_choice *choice)
{
    const adze_activation_args *a = args;
    const int64_t dim = a->x.shape[a->x.rank - 1], count = adze_count(&a->x);
    if (count == 0)
        return ADZE_OK;
    choice->form = a->x.dtype;
    choice->size[0] = count / dim, choice->size[1] = dim, choice->size[2] = choice->size[3] = 0;
    int want = choice->want;
    if (want < 0 && !choice->untuned)
        want = adze_tuned(&adze_op_activation, 0, choice);
    if (want == EVEN && dim % 2 != 0)
        return ADZE_NO_KERNEL;
    choice->ran = want >= 0 ? want : dim % 2 == 0 ? EVEN : ANY;
#ifdef BROKEN
    if (choice->ran == ANY)
        return ADZE_OK;
#endif
    return choice->dry ? ADZE_OK : adze_activation_cpu(stream, args);
}

static adze_status run(adze_stream stream, const void *args)
{
    adze_choice choice = {.want = -1};
    return choose(stream, args, &choice);
}

static const adze_variant list[] = {{"even", "rows of an even length"}, {"any", "every call"}, {NULL, NULL}};
static const adze_variants variants = {list, choose};

#undef ADZE_KERNELS
#define ADZE_KERNELS(op)                                                                                             \
    static const adze_kernel kernels[] = {{"plain", 0, 0, 0, NULL, run, &variants, 0}, ADZE_KERNELS_END};
#include "ops/activation.c"
