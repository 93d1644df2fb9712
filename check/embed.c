/* embed: what is checked and what is timed. */
#include "suite.h"

static const char *const good[] = {
    "table=$[11,64] ids=i32[2,5]",
    "table=$[11,64] ids=i32[2,5] scale=45.254834",
    "table=$[300,37]@+1 ids=i64[7] scale=-0.3",
    "table=$[300:50,37:1] ids=i64[2:30,3:8,4:1]@+1",
    "out=$[2:400,3:101,100:1]@+3 table=$[5,100]@+1 ids=i32[2:0,3:1] scale=8",
    "table=$[5,33] ids=i32[40] scale=3.3 values:special",
    "table=$[3,1] ids=i64[1,1,1,1] scale=1.5",
    "table=$[3,16] ids=i32[0]",
    "table=$[3,0] ids=i32[4]",
    "table=$[70,520] ids=i32[200] scale=22.6",
    NULL,
};

static const adze_bad_case bad[] = {
    {"table=i32[3,8] ids=i32[2] out=i32[2,8]", ADZE_BAD_DTYPE, "table is i32, it must be f32, f16 or bf16"},
    {"table=f32[8] ids=i32[2] out=f32[2,8]", ADZE_BAD_ARG, "table has rank 1, it must be 2"},
    {"table=f32[3,8] ids=f32[2] out=f32[2,8]", ADZE_BAD_DTYPE, "ids is f32, it must be i32 or i64"},
    {"table=f32[3,8] ids=i32[1,1,1,1,2] out=f32[1,1,1,2,8]", ADZE_BAD_ARG, "ids has rank 5, it must be 1 to 4"},
    {"table=bf16[3,8] ids=i32[2] out=f32[2,8]", ADZE_BAD_DTYPE, "out is f32, it must be bf16"},
    {NULL, ADZE_OK, NULL},
};

static const char *const bench[] = {
    "table=$[128256,4096] ids=i32[1]",
    "table=$[128256,4096] ids=i32[4096]",
    "table=$[262144,2048] ids=i32[512] scale=45.254834",
    NULL,
};

/* Ids are rows of the table: the last one first. */
static void fill(void *args)
{
    const adze_embed_args *a = args;
    const int64_t count = adze_count(&a->ids), rows = a->table.shape[0];
    const adze_tensor *const tensors[] = {&a->ids};
    adze_rows r;
    adze_rows_init(&r, &a->ids, 1, tensors);
    for (int64_t t = 0; t < count; t++) {
        const int64_t last = a->ids.shape[a->ids.rank - 1];
        const int64_t at = adze_row_offset(&r, 0, t / last) + t % last;
        adze_put(&a->ids, at, rows ? (double)(rows - 1 - (int64_t)adze_get(&a->ids, at) * t % rows) : 0);
    }
}

/* All rows stay, so that the ids of the whole call are those of the small one. */
static void cut(void *args)
{
    enum { COLUMNS = 16 };
    adze_embed_args *a = args;
    if (a->table.shape[1] > COLUMNS)
        a->table.shape[1] = COLUMNS;
}

static void bytes(const void *args, int64_t *read, int64_t *written)
{
    const adze_embed_args *a = args;
    *written = adze_count(&a->ids) * a->table.shape[1] * (int64_t)adze_dtype_size(a->table.dtype);
    *read = *written + adze_count(&a->ids) * (int64_t)adze_dtype_size(a->ids.dtype);
}

const adze_suite adze_suite_embed = {
    .op = &adze_op_embed, .good = good, .bad = bad, .bench = bench, .fill = fill, .cut = cut, .bytes = bytes};
