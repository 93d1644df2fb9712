/* scale_add: what is checked and what is timed. */
#include "suite.h"

static const char *const good[] = {
    "x=$[2,5,256] y=$[2,5,256] a=0.5",
    "x=$[3,61] y=$[3,61] a=-2.75",
    "x=$[3:80,61:1] y=$[3,61] a=1",
    "x=$[0,64] y=$[0,64] a=1",
    "x=$[1] y=$[1]",
    "out=$[5,100] x=$[5,100]@out y=$[5,100] a=3",
    NULL,
};

static const adze_bad_case bad[] = {
    {"x=i32[3,8] y=i32[3,8] out=i32[3,8]", ADZE_BAD_DTYPE, "x is i32"},
    {"x=bf16[3,8] y=bf16[3,7] out=bf16[3,8]", ADZE_BAD_ARG, "y has 7 in dimension 1"},
    {NULL, ADZE_OK, NULL},
};

static const char *const bench[] = {"x=$[4096,4096] y=$[4096,4096] a=0.5", NULL};

static const char *const huge[] = {NULL};

const adze_suite adze_suite_scale_add = {&adze_op_scale_add, good, bad, bench, NULL, huge, NULL, NULL, NULL};
