/* rms_norm_i8: what is checked and what is timed. */
#include "suite.h"

static const char *const good[] = {
    "x=$[2,5,256] eps=1e-6",
    "x=$[3,61] eps=1e-6",
    "x=$[3:80,61:1] eps=1e-6",
    "x=$[0,64] eps=1e-6",
    "x=$[1] eps=1e-6",
    "x=$[257,1] eps=1e-6",
    "x=$[3,1023] eps=1e-6",
    "x=$[3,4096] eps=1e-6",
    "x=$[3,4097] eps=1e-6",
    "x=$[2,20000] eps=1e-6",
    "x=$[2,70001] eps=1e-6",
    "x=$[4,512] eps=1e-6 values:tiny",
    "x=$[4,512] eps=1e-6 values:outlier",
    "x=$[4,512] eps=1e-6 values:zero",
    "x=$[7,128]@+1 eps=1e-6",
    "x=$[2:768,3:64,4:192,64:1] eps=1e-6",
    "x=$[5,256] weight=$[256] eps=1e-6",
    "x=$[5,100] weight=f32[100] eps=1e-6",
    "x=$[37,16] weight=$[16] eps=1e-6",
    "x=$[9,96] weight=f32[96] eps=1e-6",
    "x=$[3,640] weight=f32[640] eps=1e-6 values:outlier",
    "x=$[3,2056] weight=$[2056]@+1 eps=1e-6",
    "x=$[2,40000] weight=$[40000] eps=1e-6",
    "x=$[2,40000] weight=f32[40000] eps=1e-6 values:tiny",
    NULL,
};

static const adze_bad_case bad[] = {
    {"x=i32[3,8] out=i8[3,8] scale=f32[3,1] eps=1", ADZE_BAD_DTYPE, "x is i32"},
    {"x=bf16[3,8] out=i8[3,8] scale=f32[3,1] eps=-1", ADZE_BAD_ARG, "eps is -1"},
    {"x=bf16[3,8] out=i8[3,8] scale=bf16[3,1] eps=1", ADZE_BAD_DTYPE, "scale is bf16, it must be f32"},
    {"x=bf16[3,0] out=i8[3,0] scale=f32[3,1] eps=1", ADZE_BAD_ARG, "no elements"},
    {NULL, ADZE_OK, NULL},
};

static const char *const bench[] = {
    "x=$[8192,4096] weight=$[4096] eps=1e-6",
    "x=$[1,4096] eps=1e-6",
    "x=$[128,4096] eps=1e-6",
    "x=$[8192,4096] eps=1e-6",
    "x=$[131072,128] eps=1e-6",
    "x=$[8192,2048] weight=$[2048] eps=1e-6",
    "x=$[16384,3072] weight=$[3072] eps=1e-6",
    "x=$[4096,8192] weight=$[8192] eps=1e-6",
    "x=$[32768,4096] weight=$[4096] eps=1e-6",
    NULL,
};

static const char *const huge[] = {"x=$[600000,4096] eps=1e-6", NULL};

const adze_suite adze_suite_rms_norm_i8 = {
    .op = &adze_op_rms_norm_i8,
    .good = good,
    .bad = bad,
    .bench = bench,
    .huge = huge,
};
