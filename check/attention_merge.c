/* attention_merge: what is checked and what is timed. */
#include "suite.h"

#include <math.h>

#define PARTS(shape, lse) "x=$[" shape "] x_lse=f32[" lse "] y=$[" shape "] y_lse=f32[" lse "]"

static const char *const good[] = {
    PARTS("2,4,5,64", "2,4,5"),
    PARTS("2,4,5,64", "2,4,5") " lse=none",
    PARTS("9,1", "9"),
    PARTS("3,2,2,3,40", "3,2,2,3"),
    PARTS("0,40", "0"),
    PARTS("7,0", "7"),
    PARTS("70,300", "70"),
    PARTS("9,40", "9") " values:special",
    PARTS("33,48", "33") " values:special", /* also in parts without keys */
    "out=$[2:700,3:41,40:1]@+1 lse=f32[2:9,3:1]@+3 x=$[2:-400,3:130,40:1]@+3 x_lse=f32[2:5,3:1]@+1 y=$[2,3,40]@+5 "
    "y_lse=f32[2:0,3:1]",
    NULL,
};

static const adze_bad_case bad[] = {
    {"x=i32[3,8] x_lse=f32[3] y=i32[3,8] y_lse=f32[3] out=i32[3,8]", ADZE_BAD_DTYPE, "x is i32"},
    {"x=f32[8] x_lse=f32[1] y=f32[8] y_lse=f32[1] out=f32[8]", ADZE_BAD_ARG, "x has rank 1, it must be 2 to 5"},
    {"x=f32[3,8] x_lse=f32[3] y=f32[3,9] y_lse=f32[3] out=f32[3,8]", ADZE_BAD_ARG, "y has 9 in dimension 1"},
    {"x=f32[3,8] x_lse=f16[3] y=f32[3,8] y_lse=f32[3] out=f32[3,8]", ADZE_BAD_DTYPE, "x_lse is f16, it must be f32"},
    {"x=f32[3,8] x_lse=f32[3,8] y=f32[3,8] y_lse=f32[3] out=f32[3,8]", ADZE_BAD_ARG, "x_lse has rank 2"},
    {"x=f32[3,8] x_lse=f32[3] y=f32[3,8] y_lse=f32[4] out=f32[3,8]", ADZE_BAD_ARG, "y_lse has 4 in dimension 0"},
    {NULL, ADZE_OK, NULL},
};

static const char *const bench[] = {PARTS("1,32,4096,128", "1,32,4096") " lse=none", NULL};

/* Parts without keys: one of the two, and now and then both. */
static void fill(void *args)
{
    const adze_attention_merge_args *a = args;
    const adze_tensor *const lse[] = {&a->x_lse, &a->y_lse};
    if (adze_op_attention_merge.validate(a) != ADZE_OK)
        return;
    for (int i = 0; i < 2; i++) {
        adze_tensor t = *lse[i];
        const adze_tensor *view = &t;
        adze_rows rows;
        t.shape[t.rank++] = 1;
        adze_rows_init(&rows, &t, 1, &view);
        for (int64_t r = 0; r < rows.count; r++)
            if (r % 7 == 3 || r % 7 == 4 + i)
                adze_put(&t, adze_row_offset(&rows, 0, r), -INFINITY);
    }
}

const adze_suite adze_suite_attention_merge = {
    .op = &adze_op_attention_merge, .good = good, .bad = bad, .bench = bench, .fill = fill};
