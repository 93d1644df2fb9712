/* sample: what is checked and what is timed. Many short rows: each is another random number. */
#include "suite.h"

static const char *const good[] = {
    "logits=$[40,300] seed=i64[1] counter=i64[1] temperature=0.8",
    "out=i64[3]@+1 logprob=f32[3]@+1 logits=$[3,4099]@+1 out_dtype=8", /* the largest */
    "logits=$[5,37] values:equal",
    "logits=$[30:120,100:1] seed=i64[30] counter=i32[30] temperature=1 top_k=5",
    "logits=$[40,200] seed=i64[1] counter=i32[1] temperature=1.3 top_p=0.7 out_dtype=8",
    "logits=$[40,333] seed=i64[1] temperature=0.5 min_p=0.2 logprob=none",
    "logits=$[30,64] seed=i64[1] counter=i64[30] previous=i32[30,40] previous_count=i32[30] temperature=0.9 "
    "penalty=1.4",
    "logits=$[30,64] previous=i64[30:50,40:1] penalty=0.6",
    "logits=$[40,5000] seed=i64[1] previous=i64[40,20] temperature=1.7 penalty=1.2 top_k=60 top_p=0.8 min_p=0.05",
    "logits=$[12,2049] seed=i64[12] temperature=30 top_k=2048 top_p=0.999 values:wide",
    "logits=$[40,50] seed=i64[1] temperature=0.7 top_k=3 top_p=0.9 values:equal", /* ties are kept together */
    "logits=$[6,500] seed=i64[1] temperature=1 top_p=0.5 values:special",
    "logits=$[4,1] seed=i64[1] temperature=2 top_k=9 top_p=0.1 min_p=1",
    "logits=$[0,64] seed=i64[1] temperature=1",
    /* the token alone */
    "logits=$[3,20003]@+1 logprob=none",
    "out=i64[5] logits=$[5,4104] logprob=none out_dtype=8 values:equal",
    "logits=$[4,9] logprob=none values:special",
    "logits=$[20,300] seed=i64[1] counter=i64[20] temperature=0.7 top_k=50 top_p=0.9 logprob=none",
    "logits=$[3,17000] seed=i64[3] temperature=1.3 top_k=20 min_p=0.02 logprob=none",
    "logits=$[2,140003] seed=i64[1] temperature=1.1 top_k=40 top_p=0.9 logprob=none", /* parts of two chunks */
    "logits=$[2,9001]@+1 seed=i64[1] temperature=0.01 top_k=256 top_p=0.5 logprob=none values:wide",
    "logits=$[3,4800] seed=i64[1] temperature=1 top_k=7 top_p=0.8 logprob=none values:equal", /* all are kept */
    "logits=$[9,120] seed=i64[1] temperature=1 top_k=5 logprob=none values:special",
    "logits=$[2,600] seed=i64[1] temperature=1e20 top_k=9 top_p=0.6 logprob=none",
    NULL,
};

#define L "logits=f32[3,8] "
static const adze_bad_case bad[] = {
    {"logits=i32[3,8]", ADZE_BAD_DTYPE, "logits is i32, it must be f32, f16 or bf16"},
    {"logits=f32[8]", ADZE_BAD_ARG, "logits has rank 1, it must be 2"},
    {"logits=f32[3,0] out=i32[3]", ADZE_BAD_ARG, "rows of logits have 0 elements"},
    {L "temperature=1", ADZE_BAD_ARG, "seed is absent, temperature 1 needs it"},
    {L "temperature=-1 seed=i64[1]", ADZE_BAD_ARG, "temperature is -1"},
    {L "temperature=1 seed=f32[1]", ADZE_BAD_DTYPE, "seed is f32, it must be i32 or i64"},
    {L "temperature=1 seed=i64[2]", ADZE_BAD_ARG, "seed has 2 elements, it must have 3 or 1"},
    {L "temperature=1 seed=i64[1,1]", ADZE_BAD_ARG, "seed has rank 2, it must be 1"},
    {L "temperature=1 seed=i64[1] counter=f32[1]", ADZE_BAD_DTYPE, "counter is f32, it must be i32 or i64"},
    {L "temperature=1 seed=i64[1] top_p=1.5", ADZE_BAD_ARG, "top_p is 1.5, it must be 0 to 1"},
    {L "temperature=1 seed=i64[1] min_p=-1", ADZE_BAD_ARG, "min_p is -1, it must be 0 to 1"},
    {L "temperature=1 seed=i64[1] top_k=-1", ADZE_BAD_ARG, "top_k is -1"},
    {L "penalty=1.1", ADZE_BAD_ARG, "penalty is 1.1 and previous is absent, either needs the other"},
    {L "penalty=-1 previous=i32[3,2]", ADZE_BAD_ARG, "penalty is -1"},
    {L "penalty=1.1 previous=i32[2,2]", ADZE_BAD_ARG, "previous has 2 elements, it must have 3"},
    {L "previous_count=i32[3]", ADZE_BAD_ARG, "previous_count is given without previous"},
    {L "penalty=1.1 previous=i32[3,2] previous_count=i64[3]", ADZE_BAD_DTYPE,
     "previous_count is i64, it must be i32"},
    {L "out_dtype=1 out=f32[3]", ADZE_BAD_DTYPE, "out_dtype is f32, it must be i32 or i64"},
    {NULL, ADZE_OK, NULL},
};

static const char *const bench[] = {
    "logits=$[1,128256] logprob=none",
    "logits=$[1,128256] seed=i64[1] counter=i64[1] temperature=0.7 top_k=50 top_p=0.9 logprob=none",
    "logits=$[64,128256] seed=i64[64] counter=i64[1] temperature=0.7 top_k=50 top_p=0.9 logprob=none",
    "logits=$[1,151936]",
    "logits=$[1,151936] seed=i64[1] counter=i64[1] temperature=0.7 top_k=50 top_p=0.9",
    "logits=$[64,151936] seed=i64[64] counter=i64[1] temperature=0.7 top_k=50 top_p=0.9",
    NULL,
};

/* Ids of the vocabulary, some of them twice, and some that it does not have; counts up to n. */
static void fill(void *args)
{
    const adze_sample_args *a = args;
    if (a->previous.rank != 2 || a->logits.rank != 2)
        return;
    const int64_t n = a->previous.shape[1], vocab = a->logits.shape[1];
    for (int64_t b = 0; b < a->previous.shape[0]; b++) {
        for (int64_t j = 0; j < n; j++)
            adze_put(&a->previous, b * a->previous.stride[0] + j,
                     j % 13 == 5 ? -1.0 : (double)((j * j * 7 + b) % (vocab + 3)));
        if (a->previous_count.dtype == ADZE_I32)
            adze_put(&a->previous_count, b, (double)((b * 11 + n) % (n + 1)));
    }
}

const adze_suite adze_suite_sample = {.op = &adze_op_sample, .good = good, .bad = bad, .bench = bench, .fill = fill};
