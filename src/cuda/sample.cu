/* sample on CUDA, in one launch.

   sample_largest.cuh has the largest score, and sample_listed.cuh a choice among few tokens. sample_row.cuh has the
   passes for everything else. */
#include "launch.cuh"
#include "rows.cuh"
#include "sample_largest.cuh"
#include "sample_listed.cuh"

enum { LARGEST, FROM_LIST, IN_BLOCK, IN_CLUSTER };
constexpr adze_variant VARIANTS[] = {
    {"largest", "temperature 0, without a penalty and logprob"},
    {"listed", "top_k of up to 256, without a penalty and logprob"},
    {"block", "a row in a block"},
    {"cluster", "a row in a cluster of up to 8 blocks"},
    {NULL, NULL},
};

template <typename T, int W>
__global__ void __launch_bounds__(THREADS, 1) sample_rows(const __grid_constant__ sample_params p)
{
    extern __shared__ __align__(128) char shared[];
    const int ranks = cluster_size();
    pdl_launch_next();
    pdl_wait();
    sample_row<T, W> row(p, shared, blockIdx.x / (unsigned)ranks, cluster_rank(), ranks);
    if (row.start())
        row.draw();
}

/* ---- The host ---- */

/* room: scores that shared memory is to have room for, at most. */
template <typename T, int W>
static adze_status sample_launch(const cuda_call &s, sample_params p, int variant, int ranks, int64_t room)
{
    const int64_t part = ceil_div(ceil_div(p.vocab, 8), ranks) * 8;
    p.part = (int32_t)(part < p.vocab ? part : p.vocab);
    p.room = (int32_t)(part < room ? part : room);
    const int64_t blocks = p.batch * ranks;
    if (variant == LARGEST)
        return launch(s, sample_largest<T, W>, blocks, dim3(THREADS), {sizeof(largest_space), ranks}, p);
    const launch_shape shape = {(size_t)(SPACE + p.room * 4), ranks};
    return launch(s, variant == FROM_LIST ? sample_listed<T, W> : sample_rows<T, W>, blocks, dim3(THREADS), shape, p);
}

/* Blocks of a row: more while there are places for them, and where fewer could not hold its scores. */
static int sample_ranks(const sample_params &p, int64_t places, int64_t room)
{
    const int64_t few = 8 * THREADS;
    int ranks = 1;
    while (ranks < CLUSTER && p.vocab / ranks > few && (p.batch * ranks * 2 <= places || p.vocab / ranks >= room))
        ranks *= 2;
    return ranks;
}
template <typename T>
static adze_status sample_launch_as(const cuda_call &s, const sample_params &p, bool aligned)
{
    const bool clusters = adze_cuda_clusters(s.device) && p.batch <= 0x7fffffff / CLUSTER;
    const int64_t sms = s.gpu.sm_count, most = (s.gpu.block_shared - SPACE) / 4 / 8 * 8;
    const auto run = [&](int variant, int ranks, int64_t room) {
        return aligned ? sample_launch<T, VEC<T>>(s, p, variant, ranks, room)
                       : sample_launch<T, 1>(s, p, variant, ranks, room);
    };
    const bool plain = p.penalty == 0 && !p.logprob && p.vocab < 1 << 30;
    if (s.takes(LARGEST, plain && p.temperature == 0)) /* two blocks share an SM */
        return run(LARGEST, clusters ? sample_ranks(p, 2 * sms, INT64_MAX) : 1, 0);
    /* Of a temperature beyond these, quotients of logits that are not near to each other may be equal. */
    const bool warm = p.temperature >= 1e-20f && p.temperature <= 1e20f;
    if (s.takes(FROM_LIST, plain && warm && p.top_k > 0 && p.top_k < p.vocab && p.top_k <= SORTED))
        return run(FROM_LIST, clusters ? sample_ranks(p, sms, INT64_MAX) : 1, most < 4096 ? most : 4096);
    const int ranks = clusters ? sample_ranks(p, sms, most) : 1;
    if (s.takes(IN_CLUSTER, clusters, ranks > 1))
        return run(IN_CLUSTER, ranks > 1 ? ranks : 2, most);
    return s.takes(IN_BLOCK, true) ? run(IN_BLOCK, 1, most) : ADZE_NO_KERNEL;
}

static whole_numbers sample_numbers(const adze_tensor *t)
{
    whole_numbers numbers = {};
    if (t->dtype) {
        numbers.data = t->data;
        numbers.wide = t->dtype == ADZE_I64;
        numbers.stride = t->shape[0] == 1 ? 0 : t->stride[0];
    }
    return numbers;
}

static adze_status sample_run(const cuda_call &s, const adze_sample_args *a)
{
    sample_params p = {};
    p.batch = a->logits.shape[0], p.vocab = (int32_t)a->logits.shape[1];
    if (p.batch == 0)
        return ADZE_OK;
    if (p.batch > 0x7fffffff)
        return adze_fail(ADZE_NO_KERNEL, "sample: %lld rows are too many", (long long)p.batch);
    p.logits = a->logits.data, p.stride = a->logits.stride[0];
    p.out = a->out.data, p.out_stride = a->out.stride[0], p.out_wide = a->out.dtype == ADZE_I64;
    p.logprob = a->logprob.dtype ? (float *)a->logprob.data : NULL, p.logprob_stride = a->logprob.stride[0];
    p.seed = sample_numbers(&a->seed), p.counter = sample_numbers(&a->counter);
    p.previous = sample_numbers(&a->previous), p.previous_count = sample_numbers(&a->previous_count);
    p.most_previous = a->previous.dtype ? a->previous.shape[1] : 0;
    p.own_seed = a->seed.shape[0] == p.batch; /* of a batch of one, both are the same */
    p.temperature = a->temperature, p.top_p = a->top_p, p.min_p = a->min_p, p.penalty = a->penalty;
    p.top_k = a->top_k;
    const bool aligned = rows_aligned(&a->logits, p.vocab);
    const int form =
        a->logits.dtype | aligned << 4 | (p.temperature > 0) << 5 | (p.top_k > 0) << 6 | (p.top_p > 0) << 7;
    return s.tuned(form, p.batch, p.vocab, 0, 0, [&] {
        switch (a->logits.dtype) {
        case ADZE_F32: return sample_launch_as<float>(s, p, aligned);
        case ADZE_F16: return sample_launch_as<f16>(s, p, aligned);
        default: return sample_launch_as<bf16>(s, p, aligned);
        }
    });
}
CUDA_ENTRIES(sample, VARIANTS, sample_run)
