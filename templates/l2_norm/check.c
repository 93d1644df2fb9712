/* l2_norm: what is checked and what is timed. */
#include "suite.h"

static const char *const good[] = {
    "x=$[2,5,256] eps=1e-6",
    "x=$[3,61] eps=1e-6",
    "x=$[3:80,61:1] eps=1e-6",
    "x=$[0,64] eps=1e-6",
    "x=$[3,0] eps=1e-6",
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
    "out=$[2,3,4,64] x=$[2:768,3:64,4:192,64:1] eps=1e-6",
    "out=$[2:2000,3:600,2:300,3:96,40:1] x=$[2,3,2,3,40] eps=1e-6",
    "out=$[5,100] norm=none x=$[5,100]@out eps=1e-6",
    NULL,
};

static const adze_bad_case bad[] = {
    {"x=i32[3,8] out=i32[3,8]", ADZE_BAD_DTYPE, "x is i32"},
    {"x=bf16[3,8] out=bf16[3,8] eps=-1", ADZE_BAD_ARG, "eps is -1"},
    {"x=bf16[3,8] out=bf16[3,8] norm=bf16[3,1]", ADZE_BAD_DTYPE, "norm is bf16, it must be f32"},
    {NULL, ADZE_OK, NULL},
};

static const char *const bench[] = {
    "x=$[1,4096] eps=1e-6", "x=$[128,4096] eps=1e-6", "x=$[8192,4096] eps=1e-6", "x=$[131072,128] eps=1e-6", NULL,
};

static const char *const huge[] = {"x=$[600000,4096] eps=1e-6", NULL};

const adze_suite adze_suite_l2_norm = {
    .op = &adze_op_l2_norm,
    .good = good,
    .bad = bad,
    .bench = bench,
    .huge = huge,
};
