/* kv_append: what is checked and what is timed. */
#include "suite.h"

#define CACHE(batch, heads, slots, d)                                                                                \
    "k_cache=$[" batch "," heads "," slots "," d "] v_cache=$[" batch "," heads "," slots "," d "] "
#define STORED(dtype, batch, heads, slots, d)                                                                        \
    "k_cache=" dtype "[" batch "," heads "," slots "," d "] v_cache=" dtype "[" batch "," heads "," slots "," d      \
    "] k_scale=f32[" batch "," heads "," slots "] v_scale=f32[" batch "," heads "," slots "] "
#define TOKENS(batch, heads, kv_heads, m, d)                                                                         \
    "q=$[" batch "," heads "," m "," d "] k=$[" batch "," kv_heads "," m "," d "] v=$[" batch "," kv_heads "," m     \
    "," d "] "

static const char *const good[] = {
    CACHE("2", "2", "9", "64") TOKENS("2", "4", "2", "3", "64") "lengths=i32[2] cos=$[2,3,64] sin=$[2,3,64] "
                                                                "rounding=2",
    /* copies: no q, no tables, a value of its own dim, places in any order, rows that are no multiple of anything */
    "k_cache=$[2,3,17,37]@+1 v_cache=$[2,3,17,20] k=$[2,3,5,37] v=$[2,3,5,20]@+3 positions=i32[2,5]",
    /* tables by slot */
    CACHE("3", "2", "33", "64") TOKENS("3", "4", "2", "1", "64") "lengths=i32[3] cos=f32[40,32] sin=f32[40,32] "
                                                                 "table_by_slot=1",
    CACHE("2", "1", "40", "48") TOKENS("2", "3", "1", "4", "48") "positions=i32[2,4] cos=$[37:50,24:1] "
                                                                 "sin=$[37:48,24:1] table_by_slot=1 rotary_dim=24 "
                                                                 "pairs=interleaved rounding=2",
    /* pages, and a norm */
    CACHE("7", "2", "4", "64")
        TOKENS("2", "4", "2", "5", "64") "lengths=i32[2] block_table=i32[2,3] q_weight=$[64] k_weight=$[64] "
                                         "cos=$[5,64] sin=$[5,64] norm=1 eps=1e-6 rounding=3",
    CACHE("90", "1", "1", "40")
        TOKENS("1", "2", "1", "3", "40") "positions=i32[1,3] block_table=i32[1:99,80:1] q_weight=f32[40] "
                                         "cos=f32[3,20] sin=f32[3,20] norm=1 eps=1e-5 weight_offset=1 values:tiny",
    CACHE("2", "2", "9", "64")
        TOKENS("2", "3", "2", "2", "64") "lengths=i32[2] q_weight=$[192] k_weight=$[128] cos=f32[2,64] sin=f32[2,64] "
                                         "norm=1 across_heads=1 eps=1e-6 weight_offset=1 rounding=5 "
                                         "pairs=interleaved",
    CACHE("2", "2", "9", "96") TOKENS("2", "4", "2", "3", "96") "lengths=i32[2] norm=1 eps=1e-6 rounding=4 "
                                                                "values:special",
    CACHE("2", "2", "9", "32") TOKENS("2", "4", "2", "3", "32") "lengths=i32[2] k_weight=$[32] cos=$[3,32] "
                                                                "sin=$[3,32] norm=1 eps=1e-6",
    /* heads after tokens, in a cache of slots before heads; q, k and v in one tensor */
    "k_cache=$[2:2000,2:66,9:140,64:1]@+1 v_cache=$[2:2000,2:66,9:140,64:1] q_out=$[2:900,4:64,3:300,64:1]@+1 "
    "q=$[2:1536,4:64,3:512,64:1] k=$[2:1536,2:64,3:512,64:1]@q+256 v=$[2:1536,2:64,3:512,64:1]@q+384 "
    "lengths=i32[2] cos=f32[1:0,3:70,64:1] sin=f32[1,3,64]",
    CACHE("2", "2", "9", "64") TOKENS("2", "4", "2", "0", "64") "lengths=i32[2]",
    CACHE("2", "8", "200", "64") TOKENS("2", "8", "8", "90", "64") "lengths=i32[2] cos=$[2,90,64] sin=$[2,90,64]",
    /* long heads, of which a part rotates */
    CACHE("3", "2", "40", "256")
        TOKENS("3", "3", "2", "31", "256") "positions=i32[3,31] q_weight=f32[256] k_weight=f32[256] cos=f32[31,32] "
                                           "sin=f32[31,32] rotary_dim=64 norm=1 eps=1e-6 weight_offset=1",
    /* fewer bits */
    STORED("i8", "2", "2", "9", "64") TOKENS("2", "4", "2", "3", "64") "lengths=i32[2] cos=$[2,3,64] sin=$[2,3,64] "
                                                                       "rounding=2",
    STORED("f8e4m3", "7", "3", "4", "40")
        TOKENS("2", "3", "3", "5", "40") "lengths=i32[2] block_table=i32[2,3] cos=f32[30,20] sin=f32[30,20] norm=1 "
                                         "eps=1e-6 k_weight=$[40] table_by_slot=1 rounding=1",
    STORED("i8", "1", "2", "99", "128")
        TOKENS("1", "30", "2", "70", "128") "lengths=i32[1] cos=$[1,70,96] sin=$[1,70,96] rotary_dim=96",
    "k_cache=i8[2:999,3:37,9:111,37:1]@+1 v_cache=i8[2,3,9,200] k_scale=f32[2:99,3:21,9:1] "
    "v_scale=f32[2:99,3:11,9:1]@+1 "
    "k=$[2,3,5,37] v=$[2,3,5,200] positions=i32[2,5]",
    NULL,
};

#define K   "k=bf16[2,2,3,64] v=bf16[2,2,3,64] "
#define B16 "k_cache=bf16[2,2,9,64] v_cache=bf16[2,2,9,64] "
static const adze_bad_case bad[] = {
    {B16 "k=i32[2,2,3,64] v=i32[2,2,3,64] lengths=i32[2]", ADZE_BAD_DTYPE, "k is i32, it must be f32, f16 or bf16"},
    {B16 "k=bf16[2,3,64] v=bf16[2,3,64] lengths=i32[2]", ADZE_BAD_ARG, "k has rank 3, it must be 4"},
    {B16 "k=bf16[2,2,3,64] v=bf16[2,3,3,64] lengths=i32[2]", ADZE_BAD_ARG, "v has 3 in dimension 1, it must have 2"},
    {B16 K "q=bf16[2,4,2,64] lengths=i32[2]", ADZE_BAD_ARG, "q has 2 in dimension 2, it must have 3"},
    {B16 K "q=f16[2,4,3,64] lengths=i32[2]", ADZE_BAD_DTYPE, "q is f16, k is bf16"},
    {"k_cache=f16[2,2,9,64] v_cache=f16[2,2,9,64] " K "lengths=i32[2]", ADZE_BAD_DTYPE,
     "k_cache is f16, it must be k's bf16, i8 or f8e4m3"},
    {"k_cache=bf16[3,2,9,64] v_cache=bf16[3,2,9,64] " K "lengths=i32[2]", ADZE_BAD_ARG,
     "k_cache has batch 3, k has 2"},
    {"k_cache=bf16[2,2,9,64] v_cache=bf16[2,2,8,64] " K "lengths=i32[2]", ADZE_BAD_ARG,
     "v_cache and k_cache have different shapes"},
    {"k_cache=bf16[2,1,9,64] v_cache=bf16[2,1,9,64] " K "lengths=i32[2]", ADZE_BAD_ARG,
     "k_cache has 1 heads, k has 2"},
    {"k_cache=bf16[2,2,9,64] v_cache=bf16[2,2,9,32] " K "lengths=i32[2]", ADZE_BAD_ARG,
     "v_cache has head_dim 32, it must have 64"},
    {"k_cache=bf16[2,2,9,64] v_cache=bf16[2,2,9,64]@k_cache+5 " K "lengths=i32[2]", ADZE_BAD_ARG,
     "k_cache overlaps v_cache; it needs memory of its own"},
    {B16 "k=bf16[2:1152,2:576,3:64,64:1]@k_cache+64 v=bf16[2,2,3,64] lengths=i32[2]", ADZE_BAD_ARG,
     "k_cache overlaps k"},
    {B16 K "lengths=i32[2] k_scale=f32[2,2,9]", ADZE_BAD_ARG, "k_scale is given, the cache is bf16"},
    {"k_cache=i8[2,2,9,64] v_cache=i8[2,2,9,64] " K "k_scale=f32[2,2,9] lengths=i32[2]", ADZE_BAD_ARG,
     "v_scale is absent, the cache is i8"},
    {"k_cache=i8[2,2,9,64] v_cache=i8[2,2,9,64] " K "k_scale=f16[2,2,9] v_scale=f32[2,2,9] lengths=i32[2]",
     ADZE_BAD_DTYPE, "k_scale is f16, it must be f32"},
    {"k_cache=i8[2,2,9,64] v_cache=i8[2,2,9,64] " K "k_scale=f32[2,2,8] v_scale=f32[2,2,9] lengths=i32[2]",
     ADZE_BAD_ARG, "k_scale has 8 in dimension 2, the cache has 9"},
    {"k_cache=i8[1,1,2,1040] v_cache=i8[1,1,2,64] k=f32[1,1,1,1040] v=f32[1,1,1,64] k_scale=f32[1,1,2] "
     "v_scale=f32[1,1,2] lengths=i32[1]",
     ADZE_BAD_ARG, "k_cache of i8 has head_dim 1040, it must be at most 1024"},
    {B16 K, ADZE_BAD_ARG, "lengths and positions are absent"},
    {B16 K "lengths=i32[2] positions=i32[2,3]", ADZE_BAD_ARG, "lengths and positions are both given"},
    {B16 K "lengths=i64[2]", ADZE_BAD_DTYPE, "lengths is i64, it must be i32"},
    {B16 K "lengths=i32[3]", ADZE_BAD_ARG, "lengths has batch 3, k has 2"},
    {B16 K "positions=i32[2,2]", ADZE_BAD_ARG, "positions has 2 tokens, k has 3"},
    {B16 K "lengths=i32[2] block_table=i32[2]", ADZE_BAD_ARG, "block_table has rank 1, it must be 2"},
    {B16 K "lengths=i32[2] k_weight=bf16[64]", ADZE_BAD_ARG, "k_weight is given without norm"},
    {B16 K "lengths=i32[2] q_weight=bf16[64] norm=1", ADZE_BAD_ARG, "q_weight is given without q"},
    {B16 K "lengths=i32[2] k_weight=bf16[32] norm=1", ADZE_BAD_ARG, "k_weight has 32 elements, it must have 64"},
    {B16 K "lengths=i32[2] cos=f32[3,64]", ADZE_BAD_ARG, "cos is given without sin"},
    {B16 K "lengths=i32[2] rotary_dim=32", ADZE_BAD_ARG, "without cos and sin"},
    {B16 K "lengths=i32[2] cos=f32[4,64] sin=f32[4,64]", ADZE_BAD_ARG, "cos has 4 positions, q has 3"},
    {B16 K "lengths=i32[2] cos=f32[1,3,64] sin=f32[1,3,64] table_by_slot=1", ADZE_BAD_ARG, "cos has rank 3"},
    {B16 K "lengths=i32[2] rounding=1", ADZE_BAD_ARG, "rounding is 1"},
    {B16 K "lengths=i32[2] norm=2", ADZE_BAD_ARG, "norm is 2"},
    {B16 K "lengths=i32[2] norm=1 eps=-1", ADZE_BAD_ARG, "eps is -1"},
    {NULL, ADZE_OK, NULL},
};

#define QWEN(batch, slots)                                                                                           \
    CACHE(batch, "8", slots, "128")                                                                                  \
    TOKENS(batch, "32", "8", "1", "128")                                                                             \
    "lengths=i32[" batch "] q_weight=$[128] k_weight=$[128] cos=$[128,128] "                                         \
    "sin=$[128,128] norm=1 eps=1e-6 table_by_slot=1 rounding=3"
static const char *const bench[] = {
    CACHE("1", "8", "256", "128") TOKENS("1", "32", "8", "1", "128") "lengths=i32[1] cos=$[1,1,128] sin=$[1,1,128]",
    QWEN("1", "256"),
    QWEN("8", "32"),
    CACHE("128", "8", "4", "128") TOKENS("8", "32", "8", "1", "128") "lengths=i32[8] block_table=i32[8,16] "
                                                                     "cos=f32[64,64] sin=f32[64,64] table_by_slot=1",
    STORED("f8e4m3", "8", "8", "32", "128") TOKENS("8", "32", "8", "1", "128") "lengths=i32[8] cos=$[8,1,128] "
                                                                               "sin=$[8,1,128] rounding=2",
    CACHE("1", "8", "512", "128") TOKENS("1", "32", "8", "512", "128") "lengths=i32[1] cos=$[512,128] "
                                                                       "sin=$[512,128] rounding=2",
    NULL,
};

/* Every token has a place of its own, where the cache has as many. */
static void fill(void *args)
{
    const adze_kv_append_args *a = args;
    const int64_t batch = a->k.shape[0], m = a->k.shape[2], rows = a->k_cache.shape[2];
    int64_t slots = rows;
    if (a->block_table.dtype)
        slots *= a->block_table.shape[1];
    if (a->table_by_slot && a->cos.shape[0] < slots)
        slots = a->cos.shape[0];
    if (a->k.rank != 4 || a->k_cache.rank != 4 || batch < 1)
        return;
    for (int64_t b = 0; b < batch; b++) {
        if (a->lengths.dtype == ADZE_I32 && b < a->lengths.shape[0])
            adze_put(&a->lengths, b * a->lengths.stride[0], slots > m ? (double)((5 * b + 1) % (slots - m + 1)) : 0);
        for (int64_t t = 0; a->positions.dtype && t < a->positions.shape[1]; t++)
            adze_put(&a->positions, b * a->positions.stride[0] + t * a->positions.stride[1],
                     2 * m + b < slots ? (double)(slots - 1 - 2 * t - b) : (double)t);
        for (int64_t j = 0; a->block_table.rank == 2 && j < a->block_table.shape[1]; j++)
            adze_put(&a->block_table, b * a->block_table.stride[0] + j * a->block_table.stride[1],
                     (double)(a->k_cache.shape[0] - 1 - b * a->block_table.shape[1] - j)); /* -1 and less: no page */
    }
}

/* Of the caches, the rows that are written. */
static void bytes(const void *args, int64_t *read, int64_t *written)
{
    const adze_kv_append_args *a = args;
    const int64_t size = (int64_t)adze_dtype_size(a->k.dtype), stored = (int64_t)adze_dtype_size(a->k_cache.dtype);
    const int64_t q = a->q.dtype ? adze_count(&a->q) : 0, tokens = a->k.shape[0] * a->k.shape[2];
    const int64_t kv = adze_count(&a->k) + adze_count(&a->v), rows = tokens * a->k.shape[1];
    const int64_t columns = a->cos.dtype ? a->cos.shape[a->cos.rank - 1] : 0;
    *read = (q + kv) * size + 2 * tokens * columns * (int64_t)adze_dtype_size(a->cos.dtype);
    *written = q * size + kv * stored + (a->k_scale.dtype ? 2 * 4 * rows : 0);
}

const adze_suite adze_suite_kv_append = {
    .op = &adze_op_kv_append, .good = good, .bad = bad, .bench = bench, .fill = fill, .bytes = bytes};
