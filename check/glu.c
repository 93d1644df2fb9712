/* glu: what is checked and what is timed. */
#include "suite.h"

/* One activation: both forms, the tails, infinities and NaN, a rounded gate. */
#define EACH(act)                                                                                                    \
    "x=$[7,246] act=" act, "x=$[3,1024] value=$[3,1024] act=" act " values:wide",                                    \
        "x=$[5,1040] act=" act " values:special", "x=$[5,520] value=$[5,520] act=" act " rounding=2 values:special", \
        "x=$[9,2002] act=" act " rounding=2", "x=$[5,512] value_first=1 act=" act " rounding=2 values:wide"

/* Quantised rows, of i8 (5) and f8e4m3 (4). */
#define BYTES(kind)                                                                                                  \
    "x=$[7,246] out_dtype=" kind, "x=$[3,1024] value=$[3,1024] act=gelu out_dtype=" kind,                            \
        "x=$[9,2002] rounding=2 out_dtype=" kind, "x=$[5,512] value_first=1 act=relu values:wide out_dtype=" kind,   \
        "x=$[0,64] out_dtype=" kind, "x=$[3,0] out_dtype=" kind, "x=$[2] out_dtype=" kind,                           \
        "x=$[3,64] values:zero out_dtype=" kind, "x=$[2,140002] out_dtype=" kind,                                    \
        "x=$[4,28672] act=gelu_tanh out_dtype=" kind,                                                                \
        "out=i8[7:300,200:1]@+1 out_scale=f32[7]@+1 x=$[7:210,200:1]@+1 value=$[7,200]@+3 out_dtype=5",              \
        "x=$[2:768,3:64,4:192,64:1] value=$[2,3,4,64] out_dtype=" kind

static const char *const good[] = {
    BYTES("5"),
    BYTES("4"),
    "x=$[7,246] value=$[7,246]",
    EACH("silu"),
    EACH("gelu"),
    EACH("gelu_tanh"),
    EACH("gelu_quick"),
    EACH("relu"),
    EACH("relu2"),
    EACH("sigmoid"),
    /* sizes */
    "x=$[0,64]",
    "x=$[3,0]",
    "x=$[3,0] value=$[3,0]",
    "x=$[1,2]",
    "x=$[2]",
    "x=$[1] value=$[1]",
    "x=$[15] value=$[15]",
    "x=$[23] value=$[23] act=gelu",
    "x=$[1,31] value=$[1,31] rounding=2",
    "x=$[1,62]",
    "x=$[257,2] act=gelu",
    "x=$[5,14]",
    "x=$[5,16]",
    "x=$[5,32]",
    "x=$[5,34]",
    "x=$[1,8190]",
    "x=$[1,8194]",
    "x=$[3,10000] value_first=1",
    "x=$[1,28672]",
    "x=$[8,28672]",
    "x=$[1,200006] act=gelu_tanh",
    "x=$[1,100003] value=$[1,100003]",
    "x=$[2,33000] value=$[2,33000] act=gelu",
    "x=$[4,64] values:equal",
    "x=$[4,64] values:zero",
    "x=$[4,640] values:tiny",
    /* views */
    "out=$[7:130,123:1] x=$[7:256,246:1]",
    "out=$[7:136,128:1] x=$[7:512,256:1] act=gelu value_first=1",
    "out=$[7,128] x=$[7:512,256:1]@+1",
    "out=$[7,128]@+3 x=$[7,256]",
    "x=$[7,128]@+8 value=$[7,128]@+1",
    "out=$[67,66]@+1 x=$[67,66]@+2 value=$[67,66]@+7 rounding=2",
    "out=$[67,21]@+1 x=$[67,21] value=$[67,21] act=gelu",
    "x=$[4:256,128:1] value=$[4:256,128:1]@x+128",
    "x=$[4:257,128:1] value=$[4:257,128:1]@x+128 act=gelu_tanh",
    "out=$[2,3,4,32] x=$[2:768,3:64,4:192,64:1]",
    "out=$[2:2000,3:600,2:300,3:96,20:1] x=$[2,3,2,3,40] rounding=2",
    "out=$[3,64] x=$[3:0,64:1] value=$[3,64]",
    "x=$[2:-256,128:1] act=gelu",
    "out=$[5,256] x=$[5,256]@out value=$[5,256]",
    "out=$[5,255] x=$[5,255] value=$[5,255]@out act=gelu",
    "out=$[5,256] x=$[5,256]@out value=$[5,256]@out",
    "out=$[5:4100,2051:1] x=$[5:4100,2051:1]@out value=$[5,2051] rounding=2",
    NULL,
};

static const adze_bad_case bad[] = {
    {"x=bf16[3,8] out_dtype=1 out=f32[3,4]", ADZE_BAD_DTYPE, "out_dtype is f32, it must be x's dtype, i8 or f8e4m3"},
    {"x=bf16[3,8] out_dtype=5 out=i8[3,4] out_scale=none", ADZE_BAD_ARG, "out_scale"},
    {"x=bf16[3,8] out_dtype=5 out=i8[3,4] out_scale=f32[4]", ADZE_BAD_ARG, "out_scale has 4 in dimension 0"},
    {"x=bf16[3,8] out=bf16[3,4] out_scale=f32[3]", ADZE_BAD_ARG, "out_scale must be absent"},
    {"x=bf16[3,9] out=bf16[3,4]", ADZE_BAD_ARG, "x has 9 elements in its last dimension, it must be even"},
    {"x=bf16[3,8] value=bf16[3,7] out=bf16[3,8]", ADZE_BAD_ARG, "value has 7 in dimension 1"},
    {"x=bf16[3,8] value=f32[3,8] out=bf16[3,8]", ADZE_BAD_DTYPE, "value is f32"},
    {"x=bf16[3,8] value=bf16[8] out=bf16[3,8]", ADZE_BAD_ARG, "value has rank 1"},
    {"x=bf16[3,8] value=bf16[3,8] value_first=1 out=bf16[3,8]", ADZE_BAD_ARG,
     "value_first is 1, it must be 0 when value is given"},
    {"x=bf16[3,8] value_first=2 out=bf16[3,4]", ADZE_BAD_ARG, "value_first is 2"},
    {"x=bf16[3,8] act=8 out=bf16[3,4]", ADZE_BAD_ARG, "act is 8"},
    {"x=bf16[3,8] rounding=1 out=bf16[3,4]", ADZE_BAD_ARG, "rounding is 1"},
    {"x=bf16[3,8] out=bf16[3,8]", ADZE_BAD_ARG, "out has 8 in dimension 1, it must have 4"},
    {"out=bf16[3:8,4:1] x=bf16[3,8]@out", ADZE_BAD_ARG, "out overlaps x"},
    {"x=i32[3,8] out=i32[3,4]", ADZE_BAD_DTYPE, "x is i32"},
    {"x=bf16[] out=bf16[]", ADZE_BAD_ARG, "rank 0"},
    {"x=bf16[3,8] out=none", ADZE_BAD_ARG, "out is absent"},
    {NULL, ADZE_OK, NULL},
};

static const char *const bench[] = {
    "x=$[1,28672] out_dtype=5",
    "x=$[4096,28672] out_dtype=5",
    "x=$[1,28672]",
    "x=$[8,28672]",
    "x=$[1024,28672]",
    "x=$[8192,28672]",
    "x=$[1024,14336] value=$[1024,14336]",
    "x=$[4096,10240] act=gelu value_first=1",
    "x=$[1024,20480] act=gelu value_first=1",
    "x=$[8192,14336] act=gelu_tanh",
    "x=$[8192,28672] rounding=2",
    NULL,
};

/* Unaligned rows that are large: a thread has several narrow units. */
static const char *const gpu[] = {
    "out=$[601,1001] x=$[601:1003,1001:1]@+1 value=$[601,1001] rounding=2",
    "out=$[601,1002]@+2 x=$[601,2004] act=gelu",
    "x=$[601,2002]@+1 act=silu value_first=1",
    "x=$[3,233333] value=$[3,233333] act=gelu_tanh rounding=2",
    "x=$[1,1400010]",
    "x=$[4001,244]@+3", /* short rows, whose units are numbered */
    "x=$[1301:673,660:1] act=gelu_tanh rounding=2",
    "out=$[20011,21] x=$[20011,21] value=$[20011:23,21:1] act=gelu",
    "x=$[20011:70,68:1]@+2 value_first=1",
    "x=$[3001:-246,246:1]@+1",
    "x=$[3601:1046,1042:1] act=silu", /* an output without gaps, whose vectors go across rows */
    "out=$[2,300,61]@+5 x=$[2:50000,300:131,61:1]@+3 value=$[2,300,61] rounding=2",
    "x=$[20001:22,18:1]@+1 act=gelu",
    "x=$[1508:177,176:1] value=$[1508,176] act=gelu",
    NULL,
};

static const char *const huge[] = {"x=$[160000,28672]", NULL};

const adze_suite adze_suite_glu = {
    .op = &adze_op_glu, .good = good, .bad = bad, .bench = bench, .gpu = gpu, .huge = huge};
