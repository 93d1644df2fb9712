/* layer_norm: what is checked and what is timed. */
#include "norm.h"

static const char *const good[] = {NORM_GOOD, NORM_BYTES, NULL};
static const char *const gpu[] = {NORM_GPU, NULL};
static const adze_bad_case bad[] = {NORM_BAD, {NULL, ADZE_OK, NULL}};
static const char *const bench[] = {
    "x=$[4992,2048] eps=1e-6",
    "x=$[1,1600] weight=$[1600] bias=$[1600] eps=1e-5",
    "x=$[128,768] weight=$[768] bias=$[768] eps=1e-5",
    "x=$[8192,4544] weight=$[4544] bias=$[4544] eps=1e-5",
    "x=$[8192,6144] weight=$[6144] bias=$[6144] eps=1e-5",
    "x=$[4096,1152] eps=1e-6",
    "x=$[2048,1600] residual=$[2048,1600] weight=$[1600] bias=$[1600] eps=1e-5",
    "x=$[1,4992,2048] scale=$[1,1,2048] shift=$[1,1,2048] eps=1e-6",
    "x=$[1,4608,3072] scale=$[1,1,3072] shift=$[1,1,3072] eps=1e-6",
    "x=$[1,32768,5120] scale=$[1,1,5120] shift=$[1,1,5120] eps=1e-6",
    "x=$[16,256,1152] scale=$[16,1,1152] shift=$[16,1,1152] eps=1e-6 rounding=2",
    "x=$[1,4608,3072] scale=$[1,1,3072] shift=$[1,1,3072] eps=1e-6 rounding=2",
    "x=$[1,4608,3072] residual=$[1,4608,3072] gate=$[1,1,3072] scale=$[1,1,3072] shift=$[1,1,3072] eps=1e-6 "
    "rounding=2",
    "x=$[1,32768,5120] scale=f32[1,1,5120] shift=f32[1,1,5120] eps=1e-6",
    "x=$[1,8192,5120] residual=$[1,8192,5120] gate=f32[1,1,5120] weight=f32[5120] bias=f32[5120] eps=1e-6",
    NULL,
};
static const char *const huge[] = {"x=$[600000,4096] eps=1e-6", NULL};

const adze_suite adze_suite_layer_norm = {
    .op = &adze_op_layer_norm, .good = good, .bad = bad, .bench = bench, .gpu = gpu, .huge = huge};
