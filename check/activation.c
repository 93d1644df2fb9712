/* activation: what is checked and what is timed. */
#include "suite.h"

/* One activation: an odd size, the tails, infinities and NaN, values near zero. */
#define EACH(act)                                                                                                    \
    "x=$[7,123] act=" act, "x=$[3,1024] act=" act " values:wide", "x=$[5,520] act=" act " values:special",           \
        "x=$[2,256] act=" act " values:tiny", "x=$[40,1001] act=" act " values:outlier"

static const char *const good[] = {
    EACH("silu"),
    EACH("gelu"),
    EACH("gelu_tanh"),
    EACH("gelu_quick"),
    EACH("relu"),
    EACH("relu2"),
    EACH("sigmoid"),
    /* sizes */
    "x=$[0,64] act=silu",
    "x=$[3,0] act=silu",
    "x=$[1,1] act=gelu",
    "x=$[1] act=gelu",
    "x=$[257,1] act=silu",
    "x=$[5,7] act=silu",
    "x=$[7] act=silu",
    "x=$[15] act=silu",
    "x=$[1,23] act=gelu",
    "x=$[31] act=relu",
    "x=$[63] act=silu",
    "x=$[127] act=silu",
    "x=$[5,8] act=silu",
    "x=$[5,16] act=silu",
    "x=$[5,17] act=silu",
    "x=$[1,4095] act=silu",
    "x=$[1,4097] act=silu",
    "x=$[3,5000] act=gelu_tanh",
    "x=$[1,100003] act=gelu",
    "x=$[9,16384] act=relu2",
    "x=$[4,64] act=silu values:equal",
    "x=$[4,64] act=gelu values:zero",
    /* views */
    "out=$[7:130,123:1] x=$[7:128,123:1] act=silu",
    "out=$[7:136,128:1] x=$[7:256,128:1] act=gelu",
    "out=$[3:8192,5000:1] x=$[3:8192,5000:1] act=silu",
    "x=$[7,128]@+1 act=silu",
    "out=$[7,128]@+3 x=$[7,128] act=gelu_tanh",
    "out=$[2,3,4,64] x=$[2:768,3:64,4:192,64:1] act=silu",
    "out=$[2:2000,3:600,2:300,3:96,40:1] x=$[2,3,2,3,40] act=gelu_quick",
    "x=$[3:0,128:1] act=silu",
    "x=$[2:-256,128:1] act=sigmoid",
    "out=$[5,256] x=$[5,256]@out act=silu",
    "out=$[5,2051] x=$[5,2051]@out act=gelu",
    "out=$[5:300,256:1] x=$[5:300,256:1]@out act=relu",
    NULL,
};

static const adze_bad_case bad[] = {
    {"x=bf16[3,8] out=bf16[3,8]", ADZE_BAD_ARG, "act is 0"},
    {"x=bf16[3,8] act=8 out=bf16[3,8]", ADZE_BAD_ARG, "act is 8"},
    {"x=bf16[3,8] act=-1 out=bf16[3,8]", ADZE_BAD_ARG, "act is -1"},
    {"x=i32[3,8] act=silu out=i32[3,8]", ADZE_BAD_DTYPE, "x is i32"},
    {"x=bf16[3,8] act=silu out=f32[3,8]", ADZE_BAD_DTYPE, "out is f32, it must be bf16"},
    {"x=bf16[3,8] act=silu out=bf16[8,3]", ADZE_BAD_ARG, "out has 8 in dimension 0"},
    {"x=bf16[] act=silu out=bf16[]", ADZE_BAD_ARG, "rank 0"},
    {"x=bf16[3,8] act=silu out=none", ADZE_BAD_ARG, "out is absent"},
    {NULL, ADZE_OK, NULL},
};

static const char *const bench[] = {
    "x=$[1,12288] act=silu",          "x=$[128,12288] act=silu",
    "x=$[4096,12288] act=gelu_tanh",  "x=$[4096,12288] act=gelu",
    "x=$[4096,12288] act=silu",       "x=$[32768,4096] act=relu2",
    "x=$[32768,4096] act=gelu_quick", NULL,
};

/* Unaligned rows that are large: a thread has several narrow units. */
static const char *const gpu[] = {
    "out=$[601:1003,1001:1] x=$[601:1002,1001:1]@+1 act=silu",
    "out=$[601:1004,1002:1]@+2 x=$[601:1006,1002:1] act=gelu",
    "out=$[60007:21,20:1] x=$[60007:22,20:1] act=relu",
    "x=$[1,700001] act=gelu_tanh",
    "out=$[1,700001]@+1 x=$[1,700001] act=silu",
    "out=$[1,700001]@+2 x=$[1,700001]@+4 act=silu",
    "x=$[9001:79,77:1] act=silu", /* short rows, whose units are numbered */
    "x=$[30011:46,42:1]@+2 act=gelu",
    "out=$[7001:-90,85:1]@+1 x=$[7001,85] act=relu",
    "x=$[3601:523,513:1] act=silu", /* an output without gaps, whose vectors go across rows */
    "x=$[2:50000,300:131,61:1]@+3 act=gelu",
    "out=$[23001,83]@+5 x=$[23001:-90,83:1]@+1 act=silu",
    "x=$[20001:10,9:1] act=relu2",
    NULL,
};

static const char *const huge[] = {"x=$[600000,4096] act=silu", NULL};

const adze_suite adze_suite_activation = {
    .op = &adze_op_activation, .good = good, .bad = bad, .bench = bench, .gpu = gpu, .huge = huge};
