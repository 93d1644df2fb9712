/* quantize: what is checked and what is timed. i8 is dtype 5, f8e4m3 is 4, u8 is 11. */
#include "suite.h"

#define EACH(rest)                                                                                                   \
    rest " dtype=5", rest " dtype=5 group=32 scale_dtype=2", rest " dtype=4", rest " dtype=4 group_rows=-1",         \
        rest " dtype=4 group=64 scale_dtype=3", rest " dtype=11 format=u4 group=128 scale_dtype=3",                  \
        rest " dtype=11 format=u4", rest " dtype=11 format=u4 group=32 zero_points=1 scale_dtype=2",                 \
        rest " dtype=11 format=u4 zero_points=1"

static const char *const good[] = {
    EACH("x=$[3,200]"),
    EACH("x=$[7,1]"),
    EACH("x=$[2,33]"),
    EACH("x=$[2,3,135]"),
    EACH("x=$[5,64] values:zero"),
    EACH("x=$[5,97] values:outlier"),
    EACH("x=$[5,96] values:equal"),
    EACH("x=$[5,96] values:mean"),
    EACH("x=$[64]"),
    EACH("x=$[0,64]"),
    EACH("x=$[3,0]"),
    EACH("x=$[7:131,130:1]@+1"),
    EACH("x=$[2:768,3:64,4:192,64:1]"),
    "x=$[128,128] dtype=4 group=128 group_rows=128",
    "x=$[200,300] dtype=4 group=128 group_rows=128",
    "x=$[1,1] dtype=4 group=128 group_rows=128 scale_dtype=3",
    "x=$[300,129]@+3 dtype=4 group=128 group_rows=128 values:outlier",
    "x=$[0,129] dtype=4 group=128 group_rows=128",
    "x=$[300,520] dtype=5",
    "x=$[3,5000] dtype=11 format=u4 group=128",
    "out=i8[3:300,200:1]@+1 scale=f32[3]@+1 x=$[3,200] dtype=5",
    "out=u8[3:300,100:1]@+1 scale=f16[3:9,7:1]@+1 zero=u8[3:8,7:1]@+1 x=$[3,200] dtype=11 format=u4 group=32 "
    "zero_points=1 scale_dtype=2",
    NULL,
};

static const adze_bad_case bad[] = {
    {"x=i32[3,8] dtype=5 out=i8[3,8] scale=f32[3]", ADZE_BAD_DTYPE, "x is i32"},
    {"x=f32[3,8] dtype=1 out=f32[3,8] scale=f32[3]", ADZE_BAD_DTYPE, "dtype is f32, it must be i8, f8e4m3 or u8"},
    {"x=f32[3,8] dtype=11 out=u8[3,4] scale=f32[3]", ADZE_BAD_ARG, "format is 0, dtype u8 has 1"},
    {"x=f32[3,8] dtype=5 format=u4 out=i8[3,8] scale=f32[3]", ADZE_BAD_ARG, "format is 1, dtype i8 has 0"},
    {"x=f32[3,8] dtype=5 format=2 out=i8[3,8] scale=f32[3]", ADZE_BAD_ARG, "format is 2"},
    {"x=f32[3,8] dtype=5 group=16 out=i8[3,8] scale=f32[3,1]", ADZE_BAD_ARG, "group is 16"},
    {"x=f32[3,8] dtype=5 group_rows=128 out=i8[3,8] scale=f32[3]", ADZE_BAD_ARG, "group_rows is 128"},
    {"x=f32[3,8] dtype=5 group=32 group_rows=-1 out=i8[3,8] scale=f32[1]", ADZE_BAD_ARG, "group is 32, it must be 0"},
    {"x=f32[2,3,8] dtype=4 group=128 group_rows=128 out=f8e4m3[2,3,8] scale=f32[1,1]", ADZE_BAD_ARG, "rank 3"},
    {"x=f32[3,8] dtype=5 zero_points=1 out=i8[3,8] scale=f32[3] zero=u8[3]", ADZE_BAD_ARG, "only 4 bits have them"},
    {"x=f32[3,8] dtype=11 format=u4 group_rows=-1 zero_points=1 out=u8[3,4] scale=f32[1] zero=u8[1]", ADZE_BAD_ARG,
     "zero_points is 1, it must be 0 when group_rows is -1"},
    {"x=f32[3,8] dtype=5 zero_points=2 out=i8[3,8] scale=f32[3]", ADZE_BAD_ARG, "zero_points is 2"},
    {"x=f32[3,8] dtype=5 scale_dtype=7 out=i8[3,8] scale=i32[3]", ADZE_BAD_DTYPE, "scale_dtype is i32"},
    {"x=f32[3,8] dtype=5 out=i8[3,8] scale=f32[3,1]", ADZE_BAD_ARG, "scale has rank 2, it must have 1"},
    {"x=f32[3,8] dtype=5 out=i8[3,8] scale=f16[3]", ADZE_BAD_DTYPE, "scale is f16, it must be f32"},
    {"x=f32[3,8] dtype=5 out=i8[3,8] scale=f32[3] zero=u8[3]", ADZE_BAD_ARG, "zero must be absent"},
    {NULL, ADZE_OK, NULL},
};

static const char *const bench[] = {
    "x=$[4096,4096] dtype=5",
    "x=$[4096,4096] dtype=4 group=128 group_rows=128",
    "x=$[4096,4096] dtype=11 format=u4 group=128 scale_dtype=3",
    "x=$[16,4096] dtype=4",
    NULL,
};

const adze_suite adze_suite_quantize = {.op = &adze_op_quantize, .good = good, .bad = bad, .bench = bench};
