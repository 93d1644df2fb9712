/* scale_add: what is checked and what is timed. */
#include "suite.h"

static const char *const good[] = {
    "x=$[2,5,256] y=$[2,5,256] a=0.5",
    "x=$[3,61] y=$[3,61] a=-2.75",
    "x=$[3:80,61:1] y=$[3,61] a=1",
    "x=$[0,64] y=$[0,64] a=1",
    "x=$[3,0] y=$[3,0] a=1",
    "x=$[1] y=$[1]",
    "x=$[257,1] y=$[257,1] a=2",
    "x=$[3,4097] y=$[3,4097] a=0.25",
    "x=$[7,128]@+1 y=$[7,128] a=0.5",
    "out=$[2,3,4,64] x=$[2:768,3:64,4:192,64:1] y=$[2,3,4,64] a=1.5",
    "out=$[2:2000,3:600,2:300,3:96,40:1] x=$[2,3,2,3,40] y=$[2,3,2,3,40] a=-1",
    "out=$[5,100] x=$[5,100]@out y=$[5,100] a=3",
    NULL,
};

static const adze_bad_case bad[] = {
    {"x=i32[3,8] y=i32[3,8] out=i32[3,8]", ADZE_BAD_DTYPE, "x is i32"},
    {"x=bf16[3,8] y=bf16[3,7] out=bf16[3,8]", ADZE_BAD_ARG, "y has 7 in dimension 1"},
    {NULL, ADZE_OK, NULL},
};

static const char *const bench[] = {
    "x=$[1,4096] y=$[1,4096] a=0.5",
    "x=$[128,4096] y=$[128,4096] a=0.5",
    "x=$[8192,4096] y=$[8192,4096] a=0.5",
    NULL,
};

static const char *const huge[] = {"x=$[600000,4096] y=$[600000,4096] a=0.5", NULL};

const adze_suite adze_suite_scale_add = {
    .op = &adze_op_scale_add,
    .good = good,
    .bad = bad,
    .bench = bench,
    .huge = huge,
};
