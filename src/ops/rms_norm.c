/* rms_norm: the contract, the definition, and the kernels. */
#include "ops/norm.h"

static adze_status validate(const void *args)
{
    return norm_validate("rms_norm", args);
}

static void reference(const void *args, adze_value *const *out)
{
    norm_reference(args, out, 0);
}

ADZE_KERNELS(rms_norm)

const adze_op adze_op_rms_norm = {"rms_norm",
                                  sizeof(adze_norm_args),
                                  ADZE_FIRST_SIZE(norm, out_dtype),
                                  fields,
                                  validate,
                                  norm_outputs,
                                  reference,
                                  kernels,
                                  NULL,
                                  NULL};

adze_status adze_rms_norm(adze_stream stream, const adze_rms_norm_args *args)
{
    return adze_dispatch(&adze_op_rms_norm, stream, args);
}
