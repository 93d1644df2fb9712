/* sample_row.cuh - a row of logits, whatever sample is to do with it. A row belongs to a block, or to a cluster of
   blocks with a part each.

   A block makes the scores of its part once, in shared memory, or again for each pass where they do not fit there.
   The tokens that top_k and top_p keep are those whose score is at least a threshold: it is found by its bits, 11 in
   a pass, from the number or the weight of the scores that share the bits before, in bins in shared memory. In a
   cluster every block adds up the bins of all. Once the tokens from the first 11 bits on are few, they are listed,
   and the first block of the cluster finishes with that list alone: the passes that follow are short.
   The choice is the first token at which the sum of the weights exceeds u times the whole. Of a list it is found as
   the threshold was, by the bits of the index; of a part by warps with neighbouring tokens. */
#ifndef ADZE_CUDA_SAMPLE_ROW_CUH
#define ADZE_CUDA_SAMPLE_ROW_CUH

#include "cluster.cuh"
#include "sample_sums.cuh"
#include "unit.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, LISTED = 1024, CLUSTER = 8;
constexpr int IN_FLIGHT = 4; /* vectors of logits that a thread has asked for */

struct sample_params {
    const void *logits;
    void *out;
    float *logprob; /* NULL: not asked for */
    whole_numbers seed, counter, previous, previous_count;
    int64_t batch, stride; /* rows of logits; from one to the next */
    int64_t out_stride, logprob_stride, most_previous;
    int32_t vocab, part, room; /* of a row, of a block; scores that shared memory has room for */
    int32_t top_k;
    float temperature, top_p, min_p, penalty; /* penalty 0: none */
    bool out_wide, own_seed;
};

/* body(i, f) for the W logits from x[i] on, of the thread's units of x[first] to x[end - 1]. Those of a unit that is
   not there are -infinity, and its i is `end` or more. end is less than 2^30. */
template <typename T, int W, int EACH = IN_FLIGHT, typename BODY>
__device__ __forceinline__ void each_logits(const T *x, int32_t first, int32_t end, BODY body)
{
    constexpr int32_t STEP = THREADS * W;
    for (int32_t i = first + (int32_t)threadIdx.x * W; i < end; i += EACH * STEP) {
        unit<T, W> v[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            v[e].fill(-INFINITY);
            if (i + e * STEP < end)
                v[e].fetch(x + i + e * STEP);
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            float f[W];
            v[e].get(f);
            body(i + e * STEP, f);
        }
    }
}

/* What a block tells the others: two numbers each time. */
enum { SHARE_MOST, SHARE_LOGITS, SHARE_TOP_P, SHARE_KEPT, SHARES };
struct alignas(16) sample_space {
    sample_bins bins;
    uint32_t index[LISTED];
    float score[LISTED];
    uint64_t most[WARPS];
    weight_sum sum[WARPS];
    uint32_t number[WARPS];
    uint64_t share[SHARES][2];
    uint32_t listed;
    uint32_t found, found_number, before_number; /* a bin, its tokens and those before it */
    weight_sum before;
    weight_sum logits; /* the sum of exp(x - max(x)) */
    float max_x;
};
constexpr int SPACE = (int)(sizeof(sample_space) + 127) / 128 * 128;

template <typename T, int W>
struct sample_row {
    const sample_params &p;
    sample_space &space;
    float *const y;
    const uint32_t row;
    const T *const x;
    const int thread = (int)threadIdx.x, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int rank, ranks; /* of the blocks that share the row; of a list there is one */
    int32_t first, end;
    int64_t previous; /* how many of them count */
    bool held, listed = false;
    float largest = 0;   /* score */
    uint32_t lowest = 0; /* the smallest key that is kept */

    __device__ __forceinline__ sample_row(const sample_params &params, char *shared, uint32_t its, int its_rank,
                                          int its_ranks)
        : p(params), space(*(sample_space *)shared), y((float *)(shared + SPACE)), row(its),
          x((const T *)params.logits + its * params.stride), rank(its_rank), ranks(its_ranks)
    {
        first = min(rank * (int64_t)p.part, (int64_t)p.vocab);
        end = min(first + (int64_t)p.part, (int64_t)p.vocab);
        held = p.part <= p.room;
        previous = p.previous_count.data ? p.previous_count.get(row * p.previous_count.stride) : p.most_previous;
        previous = p.penalty == 0 || previous < 0 ? 0 : previous < p.most_previous ? previous : p.most_previous;
    }

    /* Of all threads that share the row: what was stored in shared memory before is visible after it. */
    __device__ __forceinline__ void barrier() const
    {
        if (ranks > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
    }
    __device__ __forceinline__ uint32_t load_word(const uint32_t *from, int of) const
    {
        return ranks > 1 ? __float_as_uint(cluster_load(from, of)) : *from;
    }
    __device__ __forceinline__ uint4 load_words(const uint32_t *from, int of) const
    {
        if (ranks == 1)
            return *(const uint4 *)from;
        const float4 v = cluster_load4(from, of);
        return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
    }
    __device__ __forceinline__ void put_share(int which, uint64_t a, uint64_t b)
    {
        if (thread == 0)
            space.share[which][0] = a, space.share[which][1] = b;
        barrier();
    }
    __device__ __forceinline__ uint64_t get_share(int which, int i, int of) const
    {
        const uint32_t *from = (const uint32_t *)&space.share[which][i];
        return load_word(from, of) | (uint64_t)load_word(from + 1, of) << 32;
    }

    /* ---- Scores ---- */

    __device__ __forceinline__ static float logit(float v) { return (v == v ? v : -INFINITY) + 0.0f; /* no -0 */ }
    __device__ __forceinline__ float warmed(float v) const
    {
        return p.temperature > 0 ? v / p.temperature + 0.0f : v;
    }
    /* The scores of n tokens from `begin` on; the largest logit that the thread saw. The scores of previous ids are
       always made from the logit: an id may occur several times. */
    template <int EACH>
    __device__ __forceinline__ float make(int32_t begin, int32_t n)
    {
        float most = -INFINITY;
        each_logits<T, W, EACH>(x + begin, 0, n, [&](int32_t i, const float(&f)[W]) {
            if (i >= n)
                return;
#pragma unroll
            for (int j = 0; j < W; j++) {
                const float own = logit(f[j]);
                most = fmaxf(most, own);
                y[i + j] = warmed(own);
            }
        });
        __syncthreads();
        if (previous == 0)
            return most;
        for (int64_t j = thread; j < previous; j += THREADS) {
            const int64_t id = p.previous.get(row * p.previous.stride + j);
            if (id < begin || id >= begin + n)
                continue;
            const float own = logit(to_float(x[id]));
            y[id - begin] = warmed((own < 0 ? own * p.penalty : own / p.penalty) + 0.0f);
        }
        __syncthreads();
        return most;
    }
    /* body(index, score) for the tokens of the block, or of the list. All threads of a block call it. */
    template <typename BODY>
    __device__ __forceinline__ void each(BODY body)
    {
        if (listed) {
            for (int32_t i = thread; i < (int32_t)space.listed; i += THREADS)
                body(space.index[i], space.score[i]);
            return;
        }
        for (int32_t begin = first; begin < end; begin += p.room) {
            const int32_t n = min(end - begin, p.room);
            if (!held) {
                __syncthreads(); /* the scores before may still be read */
                make<1>(begin, n);
            }
#pragma unroll 2
            for (int32_t i = thread; i < n; i += THREADS)
                body((uint32_t)(begin + i), y[i]);
            if (end - begin <= p.room)
                break; /* the next `begin` might overflow */
        }
    }

    /* ---- Sums over the block ---- */

    __device__ __forceinline__ uint64_t block_most(uint64_t v)
    {
        v = warp_most(v);
        __syncthreads(); /* what was there may still be read */
        if (lane == 0)
            space.most[warp] = v;
        __syncthreads();
        return warp_most(lane < WARPS ? space.most[lane] : 0);
    }
    __device__ __forceinline__ weight_sum block_total(weight_sum v)
    {
        v = warp_total(v);
        __syncthreads();
        if (lane == 0)
            space.sum[warp] = v;
        __syncthreads();
        return warp_total(lane < WARPS ? space.sum[lane] : weight_sum{0, 0});
    }

    /* ---- Thresholds ---- */

    __device__ __forceinline__ bool kept(uint32_t key, float w) const
    {
        return key >= lowest && (w >= p.min_p || key == sample_key(largest));
    }
    /* Adds up the bins of all blocks, the largest first, and finds that at which the sum reaches `most`: with fewer,
       or less, before it. What space has as before all bins becomes what is before that one. */
    template <select_by BY>
    __device__ __forceinline__ void find(double most)
    {
        constexpr int EACH = BINS / THREADS;
        static_assert(EACH == 4, "a thread reads the bins that 16 bytes have");
        const int own = BINS - EACH * (thread + 1);
        uint32_t number[EACH] = {}, numbers = 0;
        weight_sum sum[EACH] = {}, sums = {0, 0};
#pragma unroll 2
        for (int of = 0; of < ranks; of++) {
            const uint4 n = load_words(&space.bins.count[own], of);
            number[0] += n.w, number[1] += n.z, number[2] += n.y, number[3] += n.x;
            if (BY == BY_NUMBER)
                continue;
            const uint4 l = load_words(&space.bins.low[own], of), m = load_words(&space.bins.middle[own], of);
            const uint4 h = load_words(&space.bins.high[own], of);
            sum[0].add({m.w | (uint64_t)h.w << 32, l.w});
            sum[1].add({m.z | (uint64_t)h.z << 32, l.z});
            sum[2].add({m.y | (uint64_t)h.y << 32, l.y});
            sum[3].add({m.x | (uint64_t)h.x << 32, l.x});
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            numbers += number[j];
            sums.add(sum[j]);
        }
        const uint32_t up_to = warp_prefix(numbers);
        const weight_sum sum_up_to = BY == BY_NUMBER ? sums : warp_prefix(sums);
        if (lane == 31)
            space.number[warp] = up_to, space.sum[warp] = sum_up_to;
        uint32_t at = space.before_number + up_to - numbers;
        weight_sum sum_at = {space.before.high + sum_up_to.high - sums.high,
                             space.before.low + sum_up_to.low - sums.low};
        __syncthreads();
        for (int w = 0; w < warp; w++) {
            at += space.number[w];
            if (BY != BY_NUMBER)
                sum_at.add(space.sum[w]);
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            weight_sum next = sum_at;
            next.add(sum[j]);
            const double from = BY == BY_NUMBER ? at : sum_at.value();
            const double to = BY == BY_NUMBER ? at + number[j] : next.value();
            if (BY == BY_INDEX ? from <= most && to > most : from < most && to >= most) {
                space.found = (uint32_t)(own + EACH - 1 - j);
                space.found_number = number[j];
                space.before_number = at;
                space.before = sum_at;
            }
            at += number[j];
            sum_at = next;
        }
        barrier(); /* every block has read the bins of all, and this one what was found */
    }
    /* The key of the token at which the sum of tokens, or of weights, in the order of their keys, reaches `most`, or
       a smaller one with no token between. There is one: the sum of all is at least `most`. */
    template <select_by BY>
    __device__ __forceinline__ uint32_t select(double most)
    {
        uint32_t key = 0;
        int shift = 21;
        bool first_pass = true;
        if (BY == BY_INDEX && p.vocab <= 1 << 21)
            key = ~0u << 21, shift = 10; /* the first bits of all */
#pragma unroll 1
        for (;; shift = shift > 10 ? 10 : 0) {
            const int bits = shift > 0 ? 11 : 10;
            uint32_t *const words = space.bins.count; /* the first; numbers need no others */
            const int used = (int)(BY == BY_NUMBER ? sizeof space.bins.count : sizeof space.bins) / 4;
            for (int i = thread; i < used; i += THREADS)
                words[i] = 0;
            if (thread == 0 && first_pass)
                space.before_number = 0, space.before = {0, 0};
            first_pass = false;
            __syncthreads();
            each([&](uint32_t index, float score) {
                const uint32_t of_score = sample_key(score), own = BY == BY_INDEX ? ~index : of_score;
                if (of_score < lowest || ((uint64_t)(own ^ key) >> (shift + bits)) != 0)
                    return;
                const uint32_t bin = own >> shift & ((1u << bits) - 1);
                const float w = BY == BY_NUMBER ? 0 : sample_weight(score, largest);
                if (BY == BY_INDEX && !kept(of_score, w))
                    return;
                atomicAdd(&space.bins.count[bin], 1u);
                if (BY != BY_NUMBER)
                    space.bins.add(bin, fixed_weight(w));
            });
            barrier();
            find<BY>(most);
            key |= space.found << shift;
            const uint32_t in_bin = space.found_number, all = space.before_number + in_bin;
            if (shift == 0 || (BY != BY_INDEX && in_bin == 1) || (BY == BY_NUMBER && (double)all == most))
                return key;
            if (BY != BY_INDEX && !listed && all <= LISTED && !list(key))
                return key;
        }
    }
    /* Lists the tokens from a key on, of which there are at most LISTED, in the first block; false in the others. */
    __device__ __forceinline__ bool list(uint32_t key)
    {
        if (thread == 0)
            space.listed = 0;
        __syncthreads();
        each([&](uint32_t index, float score) {
            const uint32_t own = sample_key(score);
            if (own < key || own < lowest)
                return;
            const uint32_t at = atomicAdd(&space.listed, 1u);
            space.index[at] = index;
            space.score[at] = score;
        });
        barrier();
        uint32_t all = space.listed;
        if (rank == 0) {
            for (int of = 1; of < ranks; of++) {
                const uint32_t n = load_word(&space.listed, of);
                for (uint32_t i = (uint32_t)thread; i < n; i += THREADS) {
                    space.index[all + i] = load_word(&space.index[i], of);
                    space.score[all + i] = __uint_as_float(load_word((const uint32_t *)&space.score[i], of));
                }
                all += n;
            }
        }
        barrier(); /* the other blocks may end */
        ranks = 1;
        listed = true;
        if (thread == 0 && rank == 0)
            space.listed = all;
        __syncthreads();
        return rank == 0;
    }

    /* ---- The choice ---- */

    /* The sum of all blocks, and in `before` that of the blocks before this one. */
    __device__ __forceinline__ weight_sum of_blocks(int which, const weight_sum &own, weight_sum &before)
    {
        weight_sum whole = {0, 0};
        put_share(which, own.high, own.low);
        for (int of = 0; of < ranks; of++) {
            if (of == rank)
                before = whole;
            whole.add({get_share(which, 0, of), get_share(which, 1, of)});
        }
        return whole;
    }
    /* Of the tokens that are kept; top_p comes before min_p. */
    __device__ __forceinline__ weight_sum total(bool before_min_p)
    {
        weight_sum sum = {0, 0};
        each([&](uint32_t, float score) {
            const float w = sample_weight(score, largest);
            if (before_min_p ? sample_key(score) >= lowest : kept(sample_key(score), w))
                sum.add(fixed_weight(w));
        });
        return block_total(sum);
    }
    /* The token of this block at which the sum exceeds `target`, or -1 in all threads but one of one block: `before`
       is the sum of the blocks before it. */
    __device__ __forceinline__ int32_t walk(weight_sum before, double target)
    {
        int32_t found = -1;
        for (int32_t begin = first; begin < end; begin += p.room) {
            const int32_t n = min(end - begin, p.room), share = (n + WARPS - 1) / WARPS;
            const int32_t from = min(warp * share, n), to = min(from + share, n);
            const auto weight = [&](int32_t i) -> weight_sum {
                if (i >= to)
                    return {0, 0};
                const float w = sample_weight(y[i], largest);
                return kept(sample_key(y[i]), w) ? fixed_weight(w) : weight_sum{0, 0};
            };
            __syncthreads(); /* the scores, or sums, before may still be read */
            if (!held)
                make<1>(begin, n);
            weight_sum own = {0, 0};
            for (int32_t i = from + lane; i < to; i += 32)
                own.add(weight(i));
            own = warp_total(own);
            if (lane == 0)
                space.sum[warp] = own;
            __syncthreads();
            weight_sum at = before;
            for (int w = 0; w < WARPS; w++) {
                if (w == warp)
                    at = before;
                before.add(space.sum[w]);
            }
            weight_sum next = at;
            next.add(own);
            if (at.value() <= target && next.value() > target)
                for (int32_t i = from; i < to; i += 32) {
                    next = warp_prefix(weight(i + lane));
                    next.add(at);
                    const uint32_t beyond = __ballot_sync(~0u, next.value() > target);
                    if (beyond) {
                        found = lane == __ffs((int)beyond) - 1 ? begin + i + lane : -1;
                        break;
                    }
                    at = {__shfl_sync(~0u, next.high, 31), __shfl_sync(~0u, next.low, 31)};
                }
            if (end - begin <= p.room)
                break;
        }
        return found;
    }

    __device__ __forceinline__ void write(int32_t id) const
    {
        if (p.out_wide)
            ((int64_t *)p.out)[row * p.out_stride] = id;
        else
            ((int32_t *)p.out)[row * p.out_stride] = id;
        if (!p.logprob)
            return;
        const float own = logit(to_float(x[id]));
        p.logprob[row * p.logprob_stride] =
            (float)((own == space.max_x ? 0 : (double)own - (double)space.max_x) - log(space.logits.value()));
    }

    /* The sum of exp(x - max(x)). */
    __device__ __forceinline__ weight_sum total_x(float max_x)
    {
        weight_sum sum = {0, 0};
        if (previous == 0 && (p.temperature == 0 || p.temperature == 1)) { /* scores are logits */
            each([&](uint32_t, float score) { sum.add(fixed_weight(sample_weight(score, max_x))); });
        } else {
            for (int32_t i = first + thread * W; i < end; i += THREADS * W) {
                unit<T, W> v;
                float f[W];
                v.fetch(x + i);
                v.get(f);
#pragma unroll
                for (int j = 0; j < W; j++)
                    sum.add(fixed_weight(sample_weight(logit(f[j]), max_x)));
                if (end - i <= THREADS * W)
                    break;
            }
        }
        return block_total(sum);
    }

    /* The scores and the largest of them; false where that was all to do. */
    __device__ __forceinline__ bool start()
    {
        /* The largest logit, and of the largest scores the one with the lowest index. */
        float most_x = -INFINITY;
        uint64_t best = 0;
        if (held)
            most_x = make<IN_FLIGHT>(first, end - first);
        else
            for (int32_t i = first + thread; i < end; i += THREADS) {
                most_x = fmaxf(most_x, logit(to_float(x[i])));
                if (end - i <= THREADS)
                    break;
            }
        each([&](uint32_t index, float score) {
            const uint64_t own = (uint64_t)sample_key(score) << 32 | (uint32_t)~index;
            best = own > best ? own : best;
        });
        best = block_most(best);
        uint64_t best_x = block_most(sample_key(most_x));
        put_share(SHARE_MOST, best, best_x);
        for (int of = 0; of < ranks; of++) {
            const uint64_t other = get_share(SHARE_MOST, 0, of), other_x = get_share(SHARE_MOST, 1, of);
            best = other > best ? other : best;
            best_x = other_x > best_x ? other_x : best_x;
        }
        largest = sample_value((uint32_t)(best >> 32));
        const float max_x = sample_value((uint32_t)best_x);
        if (p.logprob) {
            weight_sum before, sum = of_blocks(SHARE_LOGITS, total_x(max_x), before);
            if (thread == 0)
                space.logits = sum, space.max_x = max_x;
            __syncthreads();
        }
        if (p.temperature == 0) {
            if (rank == 0 && thread == 0)
                write((int32_t) ~(uint32_t)best);
            barrier(); /* no block ends while another reads its shared memory */
            return false;
        }
        return true;
    }

    /* u times the sum of what is kept. */
    __device__ __forceinline__ double target(const weight_sum &whole) const
    {
        return (double)adze_philox_uniform((uint64_t)p.seed.get(row * p.seed.stride),
                                           (uint64_t)p.counter.get(row * p.counter.stride),
                                           p.own_seed ? 0 : (uint64_t)row) *
               whole.value();
    }
    /* A token, of the scores or of the list. */
    __device__ __forceinline__ void draw()
    {
        if (p.top_k && p.top_k < p.vocab) {
            lowest = select<BY_NUMBER>(p.top_k);
            if (listed && rank != 0)
                return;
        }
        if (p.top_p > 0 && p.top_p < 1) {
            weight_sum before, left = of_blocks(SHARE_TOP_P, total(true), before);
            lowest = select<BY_WEIGHT>((double)p.top_p * left.value());
            if (listed && rank != 0)
                return;
        }
        weight_sum before, whole = of_blocks(SHARE_KEPT, total(false), before);
        const double most = target(whole);
        if (listed) {
            const uint32_t id = ~select<BY_INDEX>(most);
            if (thread == 0)
                write((int32_t)id);
            return;
        }
        const int32_t id = walk(before, most);
        if (id >= 0)
            write(id);
        barrier();
    }
};

#endif
