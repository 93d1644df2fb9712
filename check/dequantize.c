/* dequantize: what is checked and what is timed. f16 is out_dtype 2, bf16 is 3. */
#include "suite.h"

#include <math.h>

#define EACH(rest) rest, rest " out_dtype=2", rest " out_dtype=3"
#define SHAPES(n, k, bytes, groups32, groups64, groups128)                                                           \
    EACH("w=i8[" n "," k "] scale=$[" n "]"), EACH("w=i8[" n "," k "] scale=$[1]"),                                  \
        EACH("w=i8[" n "," k "] scale=$[" n "," groups32 "] group=32"),                                              \
        EACH("w=f8e4m3[" n "," k "] scale=$[" n ",1]"),                                                              \
        EACH("w=f8e4m3[" n "," k "] scale=$[" n "," groups64 "] group=64 group_rows=1"),                             \
        EACH("w=u8[" n "," bytes "] scale=$[" n "] format=u4 k=" k),                                                 \
        EACH("w=u8[" n "," bytes "] scale=$[" n "," groups128 "] group=128 format=u4 k=" k),                         \
        EACH("w=u8[" n "," bytes "] scale=$[" n "," groups32 "] zero=u8[" n "," groups32                             \
             "] group=32 format=u4 k=" k),                                                                           \
        EACH("w=u8[" n "," bytes "] scale=$[1] zero=u8[" n "] format=u4 k=" k)

static const char *const good[] = {
    SHAPES("3", "200", "100", "7", "4", "2"),
    SHAPES("5", "135", "68", "5", "3", "2"),
    SHAPES("7", "1", "1", "1", "1", "1"),
    SHAPES("6", "128", "64", "4", "2", "1"),
    SHAPES("9", "1056", "528", "33", "17", "9"),
    SHAPES("2", "8200", "4100", "257", "129", "65"),
    SHAPES("2", "8199", "4100", "257", "129", "65"),
    EACH("w=f8e4m3[200,300] scale=$[2,3] group=128 group_rows=128"),
    EACH("w=f8e4m3[129,256] scale=$[2,2] group=128 group_rows=128"),
    EACH("w=f8e4m3[1,1] scale=$[1,1] group=128 group_rows=128"),
    EACH("w=u8[4,96] scale=$[4,3] zero=u8[4,3] group=64 format=u4"),
    EACH("w=u8[4,16] scale=$[4] zero=u8[1] format=u4"),
    /* strides and addresses */
    EACH("w=i8[7:131,130:1]@+1 scale=$[7:9,5:1]@+3 group=32"),
    EACH("w=i8[7:144,128:1]@+8 scale=$[7]@+1"),
    EACH("w=f8e4m3[140:300,257:1]@+5 scale=$[2:7,3:1] group=128 group_rows=128"),
    EACH("w=u8[7:71,64:1]@+1 scale=$[7:9,4:1]@+1 zero=u8[7:6,4:1]@+1 group=32 format=u4"),
    EACH("w=u8[7:72,64:1]@+4 scale=$[7:9,4:1] zero=u8[7:5,4:1] group=32 format=u4"),
    EACH("w=i8[5:0,96:1] scale=$[5:3,3:1] group=32"),
    "out=f32[3:333,200:1]@+1 w=i8[3,200] scale=f32[3]",
    "out=f16[3:301,201:1]@+1 w=u8[3:102,101:1]@+2 scale=bf16[3,4] group=64 format=u4 k=201 out_dtype=2",
    "out=bf16[3:408,200:1]@+8 w=u8[3:104,100:1]@+4 scale=f32[3,2] group=128 format=u4 out_dtype=3",
    "out=bf16[3:204,200:1]@+4 w=f8e4m3[3,200] scale=f32[3] out_dtype=3",
    /* none of it */
    EACH("w=i8[0,64] scale=$[1]"),
    EACH("w=u8[3,0] scale=$[3] format=u4"),
    EACH("w=f8e4m3[0,129] scale=$[0,2] group=128 group_rows=128"),
    EACH("w=i8[300,520] scale=$[300]"),
    NULL,
};

static const adze_bad_case bad[] = {
    {"w=f32[3,8] scale=f32[3] out=f32[3,8]", ADZE_BAD_DTYPE, "w is f32, it must be i8, f8e4m3 or u8"},
    {"w=i8[8] scale=f32[1] out=f32[8]", ADZE_BAD_ARG, "w has rank 1, it must be 2"},
    {"w=i8[2,3,8] scale=f32[3] out=f32[2,3,8]", ADZE_BAD_ARG, "w has rank 3, it must be 2"},
    {"w=i8[3:1,8:3] scale=f32[3] out=f32[3,8]", ADZE_BAD_ARG, "w"},
    {"w=i8[3,8] scale=f32[3,1] group=16 out=f32[3,8]", ADZE_BAD_ARG, "group is 16"},
    {"w=i8[3,8] scale=f32[3] group_rows=64 out=f32[3,8]", ADZE_BAD_ARG, "group_rows is 64"},
    {"w=i8[3,8] scale=f32[1,1] group=128 group_rows=128 out=f32[3,8]", ADZE_BAD_ARG, "f8e4m3"},
    {"w=f8e4m3[3,8] scale=f32[1,1] group_rows=128 out=f32[3,8]", ADZE_BAD_ARG, "group_rows is 128"},
    {"w=u8[3,4] scale=f32[3] out=f32[3,8]", ADZE_BAD_ARG, "format is 0, w of u8 has 1"},
    {"w=i8[3,8] scale=f32[3] format=u4 out=f32[3,8]", ADZE_BAD_ARG, "format is 1, w of i8 has 0"},
    {"w=i8[3,8] scale=f32[3] format=2 out=f32[3,8]", ADZE_BAD_ARG, "format is 2"},
    {"w=i8[3,8] scale=f32[3] k=7 out=f32[3,7]", ADZE_BAD_ARG, "rows of w have 8 elements, they must have 7 for k 7"},
    {"w=u8[3,4] scale=f32[3] format=u4 k=9 out=f32[3,9]", ADZE_BAD_ARG, "they must have 5 for k 9"},
    {"w=u8[3,4] scale=f32[3] format=u4 k=6 out=f32[3,6]", ADZE_BAD_ARG, "they must have 3 for k 6"},
    {"w=i8[3,8] scale=f32[3] k=-8 out=f32[3,8]", ADZE_BAD_ARG, "k is -8, it must not be negative"},
    {"w=i8[3,8] scale=i32[3] out=f32[3,8]", ADZE_BAD_DTYPE, "scale is i32"},
    {"w=i8[3,8] scale=f32[2] out=f32[3,8]", ADZE_BAD_ARG, "it must be [1], [n] or [3, 1] for these groups"},
    {"w=i8[3,64] scale=f32[3] group=32 out=f32[3,64]", ADZE_BAD_ARG, "it must be [3, 2] for these groups"},
    {"w=i8[3,64] scale=f32[3,3] group=32 out=f32[3,64]", ADZE_BAD_ARG, "3 x 3 elements"},
    {"w=i8[3,8] scale=f32[3] zero=u8[3] out=f32[3,8]", ADZE_BAD_ARG, "zero is given, w of i8 has none"},
    {"w=u8[3,4] scale=f32[3] zero=i8[3] format=u4 out=f32[3,8]", ADZE_BAD_DTYPE, "zero is i8, it must be u8"},
    {"w=u8[3,4] scale=f32[3] zero=u8[2] format=u4 out=f32[3,8]", ADZE_BAD_ARG, "zero has rank 1"},
    {"w=i8[3,8] scale=f32[3] out_dtype=5 out=i8[3,8]", ADZE_BAD_DTYPE, "out_dtype is i8"},
    {"w=i8[3,8] scale=f32[3] out=bf16[3,8]", ADZE_BAD_DTYPE, "out is bf16, it must be f32"},
    {"w=u8[3,4] scale=f32[3] format=u4 out=f32[3,7]", ADZE_BAD_ARG, "out"},
    {NULL, ADZE_OK, NULL},
};

static const char *const bench[] = {
    "w=u8[4096,5504] scale=$[4096,86] group=128 format=u4 out_dtype=3",
    "w=u8[4096,5504] scale=$[4096,86] zero=u8[4096,86] group=128 format=u4 out_dtype=3",
    "w=i8[4096,11008] scale=f32[4096] out_dtype=3",
    "w=f8e4m3[4096,11008] scale=f32[32,86] group=128 group_rows=128 out_dtype=3",
    "w=i8[4096,4096] scale=f32[4096] out_dtype=3",
    NULL,
};
static const char *const huge[] = {"w=u8[600000,2048] scale=$[600000,32] group=128 format=u4 out_dtype=3", NULL};

/* Scales of every size, and among numbers of f8e4m3 NaN and the smallest. */
static void fill(void *args)
{
    const adze_dequantize_args *a = args;
    static const double sizes[] = {0x1p-149, 0x1.8p-25, 3e38, 0, INFINITY, NAN, -65504, 0x1.fffp-127};
    const adze_tensor *s = &a->scale;
    for (int64_t i = 0; i < adze_count(s); i++) {
        const int64_t across = s->shape[s->rank - 1];
        const int64_t at = s->rank == 2 ? i / across * s->stride[0] + i % across : i * s->stride[0];
        if (i % 3 == 1)
            adze_put(s, at, sizes[i / 3 % 8]);
    }
    const int64_t k = a->w.shape[1];
    for (int64_t i = 0; i < a->w.shape[0] && a->w.dtype == ADZE_F8E4M3 && k > 0; i++) {
        adze_put(&a->w, i * a->w.stride[0] + i * 7 % k, NAN);
        adze_put(&a->w, i * a->w.stride[0] + (i * 13 + 2) % k, i % 2 ? 0x1p-9 : -0.0);
    }
}

/* Rows depend on nothing but their own. */
static void cut(void *args)
{
    enum { ROWS = 96 };
    adze_dequantize_args *a = args;
    adze_tensor *const rows[] = {&a->w, &a->scale, &a->zero};
    for (int i = 0; i < 3; i++) {
        const int64_t most = i == 1 && a->group_rows == 128 ? 1 : ROWS;
        rows[i]->shape[0] = rows[i]->shape[0] < most ? rows[i]->shape[0] : most;
    }
}

const adze_suite adze_suite_dequantize = {
    .op = &adze_op_dequantize, .good = good, .bad = bad, .bench = bench, .huge = huge, .fill = fill, .cut = cut};
