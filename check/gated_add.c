/* gated_add: what is checked and what is timed. */
#include "suite.h"

/* One gate: in float, and rounded at each step. */
#define EACH(rest) "x=$" rest, "x=$" rest " rounding=2"

static const char *const good[] = {
    EACH("[2,5,256] residual=$[2,5,256] gate=$[2,1,256]"),
    EACH("[2,5,256] residual=$[2,5,256] gate=$[2,5,256]"),
    EACH("[2,5,256] residual=$[2,5,256] gate=$[256]"),
    EACH("[2,5,256] residual=$[2,5,256] gate=$[1,5,256]"),
    EACH("[2,5,256] residual=$[2,5,256] gate=f32[2,1,256]"),
    EACH("[2,5,123] residual=$[2,5,123] gate=f32[2,5,123]"),
    /* tables */
    EACH("[2,5,256] residual=$[2,5,256] gate=$[2,1,256] gate_table=$[256]"),
    EACH("[2,5,256] residual=$[2,5,256] gate=$[2,5,256] gate_table=$[1,1,256]"),
    EACH("[2,5,256] residual=$[2,5,256] gate=$[2,1,256] gate_table=f32[256]"),
    EACH("[2,5,256] residual=$[2,5,256] gate=f32[2,1,256] gate_table=$[256]"),
    EACH("[2,5,256] residual=$[2,5,256] gate=f32[2,5,256] gate_table=f32[2,1,256]"),
    EACH("[2,5,250] residual=$[2,5,250] gate=$[2,1,250] gate_table=$[250]"),
    EACH("[2,5,251] residual=$[2,5,251] gate=f32[2,1,251] gate_table=f32[251]"),
    /* sizes */
    "x=$[0,64] residual=$[0,64] gate=$[64]",
    "x=$[2,0,64] residual=$[2,0,64] gate=$[2,1,64] gate_table=$[64]",
    "x=$[3,0] residual=$[3,0] gate=$[0]",
    "x=$[1] residual=$[1] gate=$[1]",
    "x=$[1,1] residual=$[1,1] gate=f32[1] rounding=2",
    "x=$[257,1] residual=$[257,1] gate=$[257,1]",
    "x=$[5,7] residual=$[5,7] gate=$[7]",
    "x=$[5,8] residual=$[5,8] gate=$[8]",
    "x=$[5,15] residual=$[5,15] gate=$[15] rounding=2",
    "x=$[5,16] residual=$[5,16] gate=$[16]",
    "x=$[67,17] residual=$[67,17] gate=$[17]",
    "x=$[3,1032] residual=$[3,1032] gate=$[1032]",
    "x=$[3,2,2048] residual=$[3,2,2048] gate=$[3,1,2048] rounding=2",
    "x=$[2,4095] residual=$[2,4095] gate=$[4095]",
    "x=$[2,4097] residual=$[2,4097] gate=$[2,4097] rounding=2",
    "x=$[1,8200] residual=$[1,8200] gate=$[1,8200] gate_table=$[8200] rounding=2",
    "x=$[1,100003] residual=$[1,100003] gate=$[100003]",
    "x=$[300,520] residual=$[300,520] gate=$[520]",
    "out=$[67,66]@+1 x=$[67:67,66:1]@+3 residual=$[67:96,66:1]@+6 gate=$[66]@+2 gate_table=f32[66]@+1",
    "x=$[67,21]@+1 residual=$[67,21]@+2 gate=f32[67,21]@+3 rounding=2",
    "x=$[67,22] residual=$[67,22] gate=$[22]",
    "x=$[67:68,56:1]@+1 residual=$[67:80,56:1] gate=f32[56]@+1",
    "out=$[2:1500,67:21,21:1]@+3 x=$[2,67,21] residual=$[2,67,21]@+1 gate=$[2,1,21] rounding=2",
    /* other distributions */
    EACH("[5,520] residual=$[5,520] gate=$[520] values:wide"),
    EACH("[5,520] residual=$[5,520] gate=$[520] values:special"),
    EACH("[5,123] residual=$[5,123] gate=$[5,123] gate_table=$[123] values:special"),
    "x=$[5,256] residual=$[5,256] gate=$[256] values:tiny",
    "x=$[5,256] residual=$[5,256] gate=$[256] values:equal rounding=2",
    "x=$[5,256] residual=$[5,256] gate=$[256] values:zero",
    "x=$[40,1001] residual=$[40,1001] gate=$[1001] values:outlier",
    /* views */
    "out=$[7:130,123:1] x=$[7:128,123:1] residual=$[7:125,123:1] gate=$[123]",
    "out=$[7:136,128:1] x=$[7:256,128:1] residual=$[7:144,128:1] gate=$[7:192,128:1]",
    "x=$[7,128]@+1 residual=$[7,128] gate=$[128]",
    "x=$[7,128] residual=$[7,128]@+3 gate=$[128] rounding=2",
    "x=$[7,128] residual=$[7,128] gate=$[128]@+1 gate_table=$[128]",
    "x=$[7,128] residual=$[7,128] gate=f32[128] gate_table=f32[128]@+1",
    "out=$[7,128]@+5 x=$[7,128] residual=$[7,128] gate=$[128]",
    "gate=$[2:1536,1:1536,256:1] gate_table=$[256] x=$[2,5,256] residual=$[2,5,256] rounding=2",
    "gate=$[2:1530,1:1530,255:1] x=$[2,5,255] residual=$[2,5,255]",
    "out=$[2,3,4,64] x=$[2:768,3:64,4:192,64:1] residual=$[2,3,4,64] gate=$[2,1,1,64]",
    "out=$[2:2000,3:600,2:300,3:96,20:1] x=$[2,3,2,3,20] residual=$[2,3,2,3,20] gate=$[2,1,2,1,20] rounding=2",
    "x=$[2,3,2,3,40] residual=$[2,3,2,3,40] gate=$[3,1,3,40] gate_table=$[2,1,40]",
    "out=$[3,64] x=$[3:0,64:1] residual=$[3,64] gate=$[64]",
    "x=$[2:-256,128:1] residual=$[2,128] gate=$[128]",
    /* in place */
    "out=$[5,256] x=$[5,256] residual=$[5,256]@out gate=$[256]",
    "out=$[5,256] x=$[5,256]@out residual=$[5,256] gate=$[256] rounding=2",
    "out=$[5,256] x=$[5,256]@out residual=$[5,256]@out gate=$[5,256]",
    "out=$[5,255] x=$[5,255] residual=$[5,255]@out gate=$[5,255] gate_table=$[255] rounding=2",
    "out=$[5,2056] x=$[5,2056] residual=$[5,2056] gate=$[5,2056]@out",
    "out=$[5:4100,2051:1] x=$[5,2051] residual=$[5:4100,2051:1]@out gate=$[2051]",
    /* strides that no index is multiplied by may be any numbers */
    "out=$[1:-9223372036854775808,3:8,8:1] x=$[1:9223372036854775807,3:9,8:1] residual=$[1,3,8] "
    "gate=$[1:9223372036854775807,3:9,8:1]",
    "x=$[0:7,6:9223372036854775807,8:1] residual=$[0,6,8] gate=$[8]",
    NULL,
};

static const adze_bad_case bad[] = {
    {"x=i32[3,8] residual=i32[3,8] gate=i32[8] out=i32[3,8]", ADZE_BAD_DTYPE, "x is i32"},
    {"x=bf16[] residual=bf16[] gate=bf16[] out=bf16[]", ADZE_BAD_ARG, "rank 0"},
    {"x=bf16[3,8] gate=bf16[8] out=bf16[3,8]", ADZE_BAD_ARG, "residual is absent"},
    {"x=bf16[3,8] residual=bf16[3,8] out=bf16[3,8]", ADZE_BAD_ARG, "gate is absent"},
    {"x=bf16[3,8] residual=bf16[3,8] gate=bf16[8] out=none", ADZE_BAD_ARG, "out is absent"},
    {"x=bf16[3,8] residual=bf16[3,7] gate=bf16[8] out=bf16[3,8]", ADZE_BAD_ARG, "residual has 7 in dimension 1"},
    {"x=bf16[3,8] residual=bf16[8] gate=bf16[8] out=bf16[3,8]", ADZE_BAD_ARG, "residual has rank 1"},
    {"x=bf16[3,8] residual=f32[3,8] gate=bf16[8] out=bf16[3,8]", ADZE_BAD_DTYPE, "residual is f32"},
    {"x=bf16[3,8] residual=bf16[3,8] gate=bf16[2,8] out=bf16[3,8]", ADZE_BAD_ARG, "gate has 2 in dimension 0"},
    {"x=bf16[3,8] residual=bf16[3,8] gate=bf16[3,1] out=bf16[3,8]", ADZE_BAD_ARG, "gate has 1 in dimension 1"},
    {"x=bf16[3,8] residual=bf16[3,8] gate=bf16[1,3,8] out=bf16[3,8]", ADZE_BAD_ARG, "gate has rank 3"},
    {"x=bf16[3,8] residual=bf16[3,8] gate=f16[8] out=bf16[3,8]", ADZE_BAD_DTYPE, "gate is f16"},
    {"x=bf16[3,8] residual=bf16[3,8] gate=bf16[8] gate_table=bf16[7] out=bf16[3,8]", ADZE_BAD_ARG,
     "gate_table has 7 in dimension 0"},
    {"x=bf16[3,8] residual=bf16[3,8] gate=bf16[8] gate_table=f16[8] out=bf16[3,8]", ADZE_BAD_DTYPE,
     "gate_table is f16"},
    {"x=bf16[3:16,8:2] residual=bf16[3,8] gate=bf16[8] out=bf16[3,8]", ADZE_BAD_ARG, "x has stride 2"},
    {"x=bf16[3,8] residual=bf16[3,8] gate=bf16[8] rounding=1 out=bf16[3,8]", ADZE_BAD_ARG, "rounding is 1"},
    {"x=bf16[3,8] residual=bf16[3,8] gate=bf16[8] out=bf16[3,7]", ADZE_BAD_ARG, "out has 7 in dimension 1"},
    {"x=bf16[3,8] residual=bf16[3,8] gate=bf16[8] out=f32[3,8]", ADZE_BAD_DTYPE, "out is f32"},
    {"out=bf16[3,8] x=bf16[3,8] residual=bf16[3,8]@out+4 gate=bf16[8]", ADZE_BAD_ARG, "out overlaps residual"},
    {NULL, ADZE_OK, NULL},
};

static const char *const bench[] = {
    "x=$[1,2688,2048] residual=$[1,2688,2048] gate=$[1,1,2048]",
    "x=$[1,2688,2048] residual=$[1,2688,2048] gate=$[1,1,2048] rounding=2",
    "x=$[1,2688,2048] residual=$[1,2688,2048] gate=$[1,1,2048] gate_table=$[2048] rounding=2",
    "x=$[1,4608,3072] residual=$[1,4608,3072] gate=$[1,1,3072] rounding=2",
    "x=$[1,4992,2048] residual=$[1,4992,2048] gate=$[1,1,2048] rounding=2",
    "x=$[1,4096] residual=$[1,4096] gate=$[1,4096] rounding=2",
    NULL,
};

/* Unaligned rows that are large: a thread has several narrow units. */
static const char *const gpu[] = {
    "out=$[601,1001] x=$[601:1003,1001:1]@+1 residual=$[601,1001]@+2 gate=$[1,1001]",
    "x=$[601,1002]@+2 residual=$[601,1002] gate=f32[601,1002] gate_table=$[1002] rounding=2",
    "x=$[601,1001] residual=$[601,1001] gate=f32[1001] gate_table=f32[1001]@+1",
    "out=$[20011:22,21:1] x=$[20011,21] residual=$[20011,21] gate=$[20011,21] rounding=2",
    "x=$[80007:68,56:1] residual=$[80007:80,56:1] gate=$[1,56]",
    "out=$[3,20011,57] x=$[3:1320726,20011:66,57:1]@+3 residual=$[3,20011,57] gate=f32[3,1,57]@+1 rounding=2",
    /* rows without gaps: vectors go across them */
    "x=$[2,601,1128]@+1 residual=$[2,601,1128]@+1 gate=$[2,1,1128]",
    "x=$[2,601,743] residual=$[2,601,743] gate=f32[2,1,743]@+1 gate_table=$[743]@+3 rounding=2",
    "x=$[601,1001]@+3 residual=$[601,1001] gate=$[601,1001]@+1",
    "out=$[3:13000,601:21,21:1]@+1 x=$[3:13001,601:21,21:1] residual=$[3:12999,601:21,21:1] gate=$[3,1,21]",
    /* the same of rows that would leave threads of a block idle, and of less than a vector */
    "x=$[1701,1144] residual=$[1701,1144] gate=$[1,1144]",
    "x=$[500003,4] residual=$[500003,4] gate=$[4]",
    NULL,
};

static const char *const huge[] = {"x=$[600000,4096] residual=$[600000,4096] gate=$[4096]", NULL};

const adze_suite adze_suite_gated_add = {
    .op = &adze_op_gated_add, .good = good, .bad = bad, .bench = bench, .gpu = gpu, .huge = huge};
