/* rope_table: what is checked and what is timed. */
#include "suite.h"

static const char *const good[] = {
    "pos=i64[5,3] freq=f32[32] axis=i32[32] columns=halves",
    "pos=i64[2,5,1] freq=f32[64] columns=halves out_dtype=3",
    "pos=i32[2,5,1] freq=f32[64] columns=halves out_dtype=2 scale=1.1386",
    "pos=f32[2,5,1] freq=f32[64] columns=pairs scale=0.5",
    "pos=i64[37,1] freq=f32[64]",
    "pos=i64[37,1] freq=f64[64] double_angle=1",
    "pos=i32[37,3] freq=f64[64] axis=i32[64] double_angle=1 columns=pairs", /* FLUX, Wan */
    "pos=f32[37,3] freq=f64[22] axis=i32[22] double_angle=1 columns=pairs",
    "pos=f32[37,3] freq=f64[64] axis=i32[64]",
    "pos=f32[2,37,3] freq=f32[1024] axis=i32[1024] columns=pairs", /* LTX-Video */
    "pos=i32[3,4] freq=f32[50] axis=i32[50] columns=halves out_dtype=3",
    "pos=f32[3,2] freq=f32[1] axis=i32[1] columns=pairs",
    "pos=i64[1] freq=f32[1]",
    "pos=i64[1] freq=f32[15] columns=halves out_dtype=2",
    "pos=i64[3,1] freq=f32[17] columns=pairs out_dtype=3",
    "pos=i64[3,1] freq=f32[40] columns=pairs out_dtype=2",
    "pos=i64[3,1] freq=f32[4] columns=halves",
    "pos=i64[3,1] freq=f32[8] columns=halves out_dtype=3",
    "pos=i64[0,1] freq=f32[8]",
    "pos=i64[3,1] freq=f32[0]",
    "cos=f32[5:70,32:1] sin=f32[5:68,32:1] pos=i64[5:2,1:1] freq=f32[32]", /* views */
    "cos=f32[5:64,32:1] sin=f32[5:64,32:1]@cos+32 pos=i64[5,1] freq=f32[32]",
    "cos=f32[5,32]@+1 sin=f32[5,32] pos=i64[5,1] freq=f32[32]@+1",
    "cos=bf16[2:640,5:64,64:1] sin=bf16[2:320,5:64,64:1] pos=i64[2:1,5:2,1:1] freq=f32[32] columns=halves "
    "out_dtype=3",
    "pos=f32[50,2] freq=f32[32] axis=i32[32] values:special",
    "pos=f32[50,2] freq=f64[32] axis=i32[32] double_angle=1 values:special columns=halves",
    "pos=f32[50,1] freq=f32[32] values:tiny",
    "pos=f32[50,1] freq=f32[32] values:zero columns=pairs",
    "pos=i64[4096,1] freq=f32[64] columns=halves",
    NULL};

static const adze_bad_case bad[] = {
    {"pos=f16[5,1] freq=f32[8]", ADZE_BAD_DTYPE, "pos is f16"},
    {"pos=i64[5,5] freq=f32[8]", ADZE_BAD_ARG, "pos has 5 axes"},
    {"pos=i64[5,0] freq=f32[8]", ADZE_BAD_ARG, "pos has 0 axes"},
    {"pos=i64[] freq=f32[8]", ADZE_BAD_ARG, "rank 0"},
    {"pos=i64[5,1] freq=bf16[8]", ADZE_BAD_DTYPE, "freq is bf16"},
    {"pos=i4[4096,4] freq=f32[8]", ADZE_BAD_DTYPE, "pos has dtype 6, which no op takes"},
    {"pos=i64[5,1] freq=f32[1,8]", ADZE_BAD_ARG, "freq has rank 2"},
    {"pos=i64[5,2] freq=f32[8] axis=i64[8]", ADZE_BAD_DTYPE, "axis is i64"},
    {"pos=i64[5,2] freq=f32[8] axis=i32[7]", ADZE_BAD_ARG, "axis has rank 1 and 7 elements, freq has 8"},
    {"pos=i64[5,1] freq=f32[8] columns=3", ADZE_BAD_ARG, "columns is 3"},
    {"pos=i64[5,1] freq=f32[8] double_angle=2", ADZE_BAD_ARG, "double_angle is 2"},
    {"pos=i64[5,1] freq=f32[8] out_dtype=7", ADZE_BAD_DTYPE, "out_dtype is i32"},
    {"pos=i64[5,1] freq=f32[8] columns=halves cos=f32[5,8] sin=f32[5,16]", ADZE_BAD_ARG,
     "cos has 8 in dimension 1, it must have 16"},
    {"pos=i64[5,1] freq=f32[8] cos=f32[5,8] sin=none", ADZE_BAD_ARG, "sin is absent"},
    {NULL, ADZE_OK, NULL}};

static const char *const bench[] = {"pos=i64[4096,1] freq=f32[64]",
                                    "pos=i64[4096,1] freq=f32[64] columns=halves "
                                    "out_dtype=3",
                                    "pos=f32[4608,3] freq=f64[64] axis=i32[64] double_angle=1 columns=pairs",
                                    "pos=f32[4992,3] freq=f32[1024] axis=i32[1024] columns=pairs", NULL};

/* Axes that exist, and now and then a position so far away that its angles are too large, or nearly so. */
static void fill(void *args)
{
    adze_rope_table_args *a = args;
    const int64_t axes = a->pos.rank > 0 ? a->pos.shape[a->pos.rank - 1] : 0, n = adze_count(&a->pos);
    for (int64_t i = 0; a->axis.dtype && i < a->axis.shape[0]; i++)
        ((int32_t *)a->axis.data)[i] = (int32_t)((i * 7 + i / 3) % (axes > 0 ? axes : 1));
    for (int64_t i = 10; a->pos.rank == 2 && a->pos.stride[0] == axes && i < n; i += 17)
        adze_put(&a->pos, i, adze_get(&a->pos, i) * 0x1p18 + 3);
}

const adze_suite adze_suite_rope_table = {
    .op = &adze_op_rope_table, .good = good, .bad = bad, .bench = bench, .fill = fill};
