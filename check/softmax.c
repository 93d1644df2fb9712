/* softmax: what is checked and what is timed. */
#include "suite.h"

#include <math.h>

static const char *const good[] = {
    "x=$[7,123]",
    "x=$[0,64]",
    "x=$[3,0]",
    "x=$[1,1]",
    "x=$[1]",
    "x=$[257,1]",
    "x=$[37,7]",
    "x=$[5,8]",
    "x=$[5,15]",
    "x=$[5,16]",
    "x=$[5,17]",
    "x=$[3,64]",
    "x=$[9,72]",
    "x=$[3,255]",
    "x=$[3,256]",
    "x=$[3,264]",
    "x=$[70,1024]",
    "x=$[3,2048]",
    "x=$[2,4096]",
    "x=$[2,8192]",
    "x=$[2,8200]",
    "x=$[2,16384]",
    "x=$[2,32768]",
    "x=$[1,32776]",
    "x=$[1,40003]",
    "x=$[2,65536]",
    "x=$[1,65537]",
    "x=$[1,128256]",
    "x=$[1,200001]",
    "out=$[67,73]@+1 x=$[67,73]@+3 mask=$[73]@+2 scale=0.125",
    "out=$[2,300]@+5 x=$[2,300]@+1",
    "x=$[2,20001]@+1 mask=$[2,20001]@+2",
    /* rows at any address: units of one and two elements, in lanes, blocks and clusters; masks of both dtypes */
    "x=$[70,33]",
    "x=$[70,50]",
    "x=$[7,128]@+2",
    "x=$[7,128]@+4",
    "x=$[9,74]",
    "x=$[9,201]",
    "x=$[9,202]",
    "x=$[67,74] mask=$[74]",
    "x=$[67,73] mask=f32[73]@+3 scale=0.125",
    "x=$[300,301]",
    "x=$[3,1001]",
    "x=$[3,1002]@+2 scale=-0.5",
    "x=$[3,4095] mask=$[3,4095]",
    "x=$[3,4094] mask=$[4094]",
    "x=$[3,1000] mask=f32[1000]",
    "x=$[3,20001] scale=-0.5",
    "x=$[3,20002]@+2",
    "x=$[3,20000] mask=f32[3,20000]@+1",
    "out=$[5,9001]@+1 x=$[5,9001]@out",
    "x=$[5,521] values:wide scale=3",
    "x=$[5,9001] values:wide",
    "x=$[5,1502] values:special",
    "x=$[5,50] values:special",
    "x=$[5,501] values:tiny",
    /* other distributions */
    "x=$[5,520] values:wide",
    "x=$[5,520] values:wide scale=3",
    "x=$[5,40000] values:wide",
    "x=$[5,1000] values:equal",
    "x=$[5,1000] values:zero",
    "x=$[5,1000] values:mean",
    "x=$[5,1000] values:outlier",
    "x=$[5,200] values:special",
    "x=$[5,1000] values:tiny",
    /* scale and mask */
    "x=$[5,256] scale=0.125",
    "x=$[5,250] scale=-0.3",
    "x=$[5,256] scale=1",
    "x=$[10,256] mask=$[10,256]",
    "x=$[10,250] mask=$[10,250] scale=0.125",
    "x=$[10,256] mask=f32[10,256] scale=0.125",
    "x=$[10,256] mask=f32[256]",
    "x=$[2,3,10,64] mask=$[2,1,10,64] scale=0.125",
    "x=$[2,3,10,65] mask=f32[10,65] scale=0.125",
    "x=$[2,3,10,64] mask=$[2,1,1,64]",
    "x=$[2,3,2,3,40] mask=$[2,1,1,3,40]",
    "x=$[2,3,2,3,40] mask=f32[3,40] scale=0.5",
    "x=$[10,4096] mask=$[10,4096] scale=0.125",
    "x=$[4,33000] mask=f32[4,33000] scale=0.125",
    "x=$[5,9000] mask=$[5,9000]",
    "x=$[5,9001] mask=$[5,9001]",
    /* views */
    "out=$[7:130,123:1] x=$[7:128,123:1]",
    "out=$[7:136,128:1] x=$[7:256,128:1]",
    "x=$[7,128]@+1",
    "out=$[7,128]@+3 x=$[7,128]",
    "x=$[7,128] mask=$[7,128]@+1",
    "x=$[7,128] mask=f32[7:130,128:1]",
    "out=$[2,3,4,64] x=$[2:768,3:64,4:192,64:1]",
    "x=$[2:-256,128:1]",
    "x=$[3:0,128:1]",
    "out=$[5,256] x=$[5,256]@out",
    "out=$[5,2051] x=$[5,2051]@out mask=$[2051]",
    "out=$[2,40000] x=$[2,40000]@out",
    "out=$[5,256] x=$[5,256] mask=$[5,256]@out",
    NULL,
};

/* Rows of clusters. */
static const char *const gpu[] = {
    "x=$[300,4096]",
    "x=$[271,1501]",
    "x=$[271,1502]",
    "x=$[271,1501] mask=$[1501]@+3",
    "x=$[271,1502] mask=$[1502]@+2",
    "x=$[271,1504] mask=f32[1504]@+3",
    "x=$[300,753]@+1",
    "x=$[4,70000] mask=$[70000] scale=0.125",
    "x=$[1,131080]",
    "x=$[2,65544]",
    "x=$[1,131071]",
    "x=$[3,20002] mask=$[20002]",
    "x=$[300,304] mask=f32[304]@+1",
    "x=$[300,302] mask=$[302] scale=-0.5",
    "x=$[300,301] mask=$[301]@+1",
    "x=$[300,302]",
    "x=$[34,8200]",
    "x=$[34,16384]",
    "x=$[34,16392]",
    "x=$[34,32776]",
    "x=$[34,10000] mask=f32[34,10000]",
    "x=$[5,140000] mask=f32[5,140000]",
    "x=$[271,1032]",
    "x=$[271,4104] scale=-0.5",
    "x=$[271,32760]",
    "x=$[271,32776]",
    /* long rows at any address, as floats in shared memory */
    "out=$[3,170001]@+1 x=$[3,170001]@+3",
    "out=$[2,140003]@+1 x=$[2,140003]@out mask=$[140003]@+2 scale=0.125",
    "x=$[2,150002]@+2 mask=f32[2,150002]@+1 scale=-0.5",
    "x=$[2,160001] values:wide scale=3",
    "x=$[271,16387]@+7 mask=$[16387] scale=0.125",
    "x=$[271,16392] scale=-0.5",
    "x=$[271,40000] scale=-0.7",
    "x=$[40,131072]",
    "x=$[34,262144] values:wide",
    "x=$[271,2056] mask=$[271,2056]",
    "x=$[271,9000] mask=$[271,9000] scale=0.125",
    "x=$[34,40000] mask=$[34,40000]",
    /* rows at any address: many, or in clusters of 2 to 8 blocks */
    "x=$[4300,515]@+1",
    "x=$[4300,514]",
    "x=$[4300,515] mask=$[515]",
    "x=$[4300,514] mask=$[514]@+2",
    "x=$[4300,520] mask=f32[520]",
    "x=$[80,9001]",
    "x=$[40,30001]",
    "x=$[271,9001]@+1",
    "x=$[271,9002]@+2",
    "x=$[271,20001]",
    "x=$[271,20002]",
    "x=$[271,9001] mask=$[9001]",
    "x=$[271,9002] mask=$[9002]",
    "x=$[271,9000] mask=f32[9000]",
    "x=$[40,66993] scale=-0.5",
    "x=$[9,131070]",
    "x=$[9,131073]",
    "x=$[5,70001] mask=$[70001]",
    "x=$[5,70002] mask=$[70002]",
    "x=$[5,70000] mask=f32[70000]@+1",
    NULL,
};

static const adze_bad_case bad[] = {
    {"x=bf16[3,8] mask=bf16[3,7] out=bf16[3,8]", ADZE_BAD_ARG, "mask has 7 in dimension 1"},
    {"x=bf16[3,8] mask=bf16[2,8] out=bf16[3,8]", ADZE_BAD_ARG, "mask has 2 in dimension 0"},
    {"x=bf16[3,8] mask=bf16[3,1] out=bf16[3,8]", ADZE_BAD_ARG, "mask has 1 in dimension 1"},
    {"x=bf16[3,8] mask=f16[3,8] out=bf16[3,8]", ADZE_BAD_DTYPE, "mask is f16"},
    {"x=bf16[3,8] mask=bf16[1,3,8] out=bf16[3,8]", ADZE_BAD_ARG, "mask has rank 3"},
    {"x=bf16[3,8] scale=inf out=bf16[3,8]", ADZE_BAD_ARG, "scale is inf"},
    {"x=i32[3,8] out=i32[3,8]", ADZE_BAD_DTYPE, "x is i32"},
    {"x=bf16[] out=bf16[]", ADZE_BAD_ARG, "rank 0"},
    {"x=bf16[3,8] out=none", ADZE_BAD_ARG, "out is absent"},
    {NULL, ADZE_OK, NULL},
};

static const char *const bench[] = {
    "x=$[4096,1024]",
    "x=$[32768,4096]",
    "x=$[1024,32768]",
    "x=$[131072,128]",
    "x=$[65536,512]",
    "x=$[128,4096]",
    "x=$[8192,8192]",
    "x=$[1,128256]",
    "x=$[512,131072]",
    "x=$[1,4,2048,2048] mask=$[1,1,2048,2048] scale=0.125",
    NULL,
};

static const char *const huge[] = {"x=$[600000,4096]", NULL};

/* Masks are causal over a random bias, with now and then a row that hides its first half, or everything. */
static void fill(void *args)
{
    const adze_softmax_args *a = args;
    const adze_tensor *const mask = &a->mask;
    if (mask->dtype == ADZE_NONE)
        return;
    const int64_t dim = mask->shape[mask->rank - 1];
    adze_rows rows;
    adze_rows_init(&rows, mask, 1, &mask);
    for (int64_t r = 0; r < rows.count; r++)
        for (int64_t i = 0; i < dim; i++)
            if (r % 5 == 3 || (r % 5 == 1 && i < dim / 2) || i > dim - rows.count + r)
                adze_put(mask, adze_row_offset(&rows, 0, r) + i, -INFINITY);
}

const adze_suite adze_suite_softmax = {
    .op = &adze_op_softmax, .good = good, .bad = bad, .bench = bench, .gpu = gpu, .huge = huge, .fill = fill};
