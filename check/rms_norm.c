/* rms_norm: what is checked and what is timed. */
#include "norm.h"

static const char *const good[] = {NORM_GOOD, NORM_BYTES, NULL};
static const char *const gpu[] = {NORM_GPU, NULL};
static const adze_bad_case bad[] = {NORM_BAD, {NULL, ADZE_OK, NULL}};
static const char *const bench[] = {
    "x=$[1,4096] weight=$[4096] eps=1e-6 out_dtype=5",
    "x=$[64,4096] residual=$[64,4096] weight=$[4096] eps=1e-6 out_dtype=5",
    "x=$[4096,4096] weight=$[4096] eps=1e-6 out_dtype=4",
    "x=$[1,4096] weight=$[4096] eps=1e-6",
    "x=$[16,4096] weight=$[4096] eps=1e-6",
    "x=$[128,4096] weight=$[4096] eps=1e-6",
    "x=$[512,4096] weight=$[4096] eps=1e-6",
    "x=$[1024,2048] weight=$[2048] eps=1e-6",
    "x=$[2048,2048] weight=$[2048] eps=1e-6",
    "x=$[4096,2048] weight=$[2048] eps=1e-6",
    "x=$[8192,3072] weight=$[3072] eps=1e-6",
    "x=$[16384,3072] weight=$[3072] eps=1e-6",
    "x=$[8192,4096] weight=$[4096] eps=1e-6",
    "x=$[32768,4096] weight=$[4096] eps=1e-6",
    "x=$[8192,8192] weight=$[8192] eps=1e-6",
    "x=$[4096,16384] weight=$[16384] eps=1e-6",
    "x=$[131072,128] weight=$[128] eps=1e-6",
    "x=$[131072,64] weight=$[64] eps=1e-6",
    "x=$[65536,1024] weight=$[1024] eps=1e-6",
    "x=$[8192,1152] weight=$[1152] eps=1e-6",
    "x=$[8192,1536] weight=$[1536] eps=1e-6",
    "x=$[8192,2432] weight=$[2432] eps=1e-6",
    "x=$[8192,4544] weight=$[4544] eps=1e-6",
    "x=$[8192,5120] weight=$[5120] eps=1e-6",
    "x=$[8192,6144] weight=$[6144] eps=1e-6",
    "x=$[2048,32768] weight=$[32768] eps=1e-6",
    "x=$[8192,4096] weight=$[4096] eps=1e-6 rounding=1",
    "x=$[1,4096] residual=$[1,4096] weight=$[4096] eps=1e-6",
    "x=$[2048,2048] residual=$[2048,2048] weight=$[2048] eps=1e-6",
    "x=$[8192,4096] residual=$[8192,4096] weight=$[4096] eps=1e-6",
    "x=$[1,2688,2048] scale=$[1,1,2048] shift=$[1,1,2048] eps=1e-6 rounding=2",
    "x=$[1,2688,2048] residual=$[1,2688,2048] gate=$[1,1,2048] scale=$[1,1,2048] shift=$[1,1,2048] eps=1e-6 "
    "rounding=2",
    "x=$[1,2688,2048] scale=$[1,1,2048] scale_table=$[2048] shift=$[1,1,2048] shift_table=$[2048] eps=1e-6 "
    "rounding=2",
    "x=$[1,2688,2048] residual=$[1,2688,2048] scale=$[1,1,2048] scale_table=$[2048] shift=$[1,1,2048] "
    "shift_table=$[2048] eps=1e-6 rounding=2",
    "x=$[8192,3584] weight=$[3584] shift=$[8192,3584] eps=1e-6 weight_offset=1 rounding=2",
    NULL,
};
static const char *const huge[] = {"x=$[600000,4096] weight=$[4096] eps=1e-6", NULL};

const adze_suite adze_suite_rms_norm = {
    .op = &adze_op_rms_norm, .good = good, .bad = bad, .bench = bench, .gpu = gpu, .huge = huge};
