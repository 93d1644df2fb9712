/* sample on the CPU. A thread takes rows. Each pass over a row makes its scores again, a chunk at a time, so that no
   row is too long for the stack. The tokens that top_k and top_p keep are those whose score is at least a threshold:
   it is found by its bits, eight in a pass, from the number or the weight of the scores that share the bits before.
   A row is divided into parts. The k-th largest of their largest scores is a lower bound of the threshold of top_k,
   so sixteen scores below it are passed over at once. Weights are floats and their sums doubles. */
#include "cpu/act.h"
#include "sampling.h"

enum { CHUNK = 2048, BINS = 256, PARTS = 64 * LANES };

typedef struct sample_row {
    const adze_sample_args *a;
    const char *x;
    const void *previous;
    int64_t row, vocab, count; /* count: of previous */
    float max, lowest;         /* of the scores: the largest, and the smallest that is kept */
} sample_row;

typedef struct sample_space {
    float y[CHUNK] __attribute__((aligned(64)));
    float w[CHUNK] __attribute__((aligned(64)));
    double weight[BINS];
    int64_t count[BINS];
    float most[PARTS]; /* the largest score of each part of a row: of a lane, in some chunks */
} sample_space;

INLINE void sample_load(const char *x, int dtype, int64_t begin, int64_t n, float *y)
{
    for (int64_t i = 0; i < n; i += LANES) {
        vf16 v = row_load_part(x, dtype, begin + i, n - i < LANES ? n - i : LANES);
        for (int p = 0; p < VF_PARTS; p++)
            v.part[p] = vf_select(v.part[p] == v.part[p], v.part[p], vf_all(-INFINITY)) + 0.0f; /* no -0 */
        if (n - i < LANES)
            v = vf16_cut(v, n - i, -INFINITY);
        row_store(y, ADZE_F32, i, v);
    }
}
NO_INLINE void sample_logits(const sample_row *r, int64_t begin, int64_t n, float *y)
{
    switch (r->a->logits.dtype) {
    case ADZE_F32: sample_load(r->x, ADZE_F32, begin, n, y); break;
    case ADZE_F16: sample_load(r->x, ADZE_F16, begin, n, y); break;
    default: sample_load(r->x, ADZE_BF16, begin, n, y); break;
    }
}

INLINE int64_t sample_previous(const sample_row *r, int64_t j)
{
    return r->a->previous.dtype == ADZE_I32 ? ((const int32_t *)r->previous)[j] : ((const int64_t *)r->previous)[j];
}

/* An id may occur several times: its score is always made from the logit. */
NO_INLINE void sample_penalise(const sample_row *r, int64_t begin, int64_t n, float *y)
{
    const float penalty = r->a->penalty;
    for (int64_t j = 0; j < r->count; j++) {
        const int64_t id = sample_previous(r, j);
        if (id < begin || id >= begin + n)
            continue;
        float x[LANES];
        sample_logits(r, id, 1, x);
        y[id - begin] = (x[0] < 0 ? x[0] * penalty : x[0] / penalty) + 0.0f;
    }
}

/* n scores, a part of the last sixteen being -infinity; their number. */
INLINE int64_t sample_scores(const sample_row *r, int64_t begin, float *y)
{
    const int64_t n = r->vocab - begin < CHUNK ? r->vocab - begin : CHUNK;
    const float temperature = r->a->temperature;
    sample_logits(r, begin, n, y);
    if (r->count)
        sample_penalise(r, begin, n, y);
    for (int64_t i = 0; temperature > 0 && temperature != 1 && i < n; i += LANES) {
        vf16 v = row_load(y, ADZE_F32, i);
        for (int p = 0; p < VF_PARTS; p++)
            v.part[p] = v.part[p] / temperature + 0.0f;
        row_store(y, ADZE_F32, i, v);
    }
    return n;
}

/* exp(y - max): 1 for the largest, also where it is infinite. */
INLINE void sample_weights(const float *y, int64_t n, float max, float *w)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const vf16 v = row_load(y, ADZE_F32, i);
        vf16 e;
        for (int p = 0; p < VF_PARTS; p++) {
            const vf d = v.part[p] - max, power = vf_exp(d);
            e.part[p] = vf_select(d >= ADZE_SAMPLE_LOWEST, power, vf_all(0));
            e.part[p] = vf_select(v.part[p] == max, vf_all(1), e.part[p]);
        }
        row_store(w, ADZE_F32, i, e);
    }
}

/* Whether none of the sixteen scores from i on is kept. */
INLINE int sample_none(const sample_row *r, const sample_space *space, int64_t i)
{
    return vf16_max_lane(row_load(space->y, ADZE_F32, i)) < r->lowest;
}
/* Of n scores; those of sixteen of which none is kept are 0. */
INLINE void sample_some_weights(const sample_row *r, sample_space *space, int64_t n)
{
    if (r->lowest == -INFINITY) {
        sample_weights(space->y, n, r->max, space->w);
        return;
    }
    for (int64_t i = 0; i < n; i += LANES)
        if (sample_none(r, space, i))
            row_store(space->w, ADZE_F32, i, vf16_all(0));
        else
            sample_weights(space->y + i, LANES, r->max, space->w + i);
}

/* Of the tokens that are kept; the others, and what a chunk has after its last one, are 0. */
INLINE int64_t sample_kept(const sample_row *r, int64_t begin, sample_space *space)
{
    const float least = r->a->min_p;
    const int64_t n = sample_scores(r, begin, space->y);
    sample_some_weights(r, space, n);
    for (int64_t i = 0; i < n; i++)
        space->w[i] = space->y[i] >= r->lowest && (space->w[i] >= least || space->y[i] == r->max) ? space->w[i] : 0;
    for (int64_t i = n; i < (n + LANES - 1) / LANES * LANES; i++)
        space->w[i] = 0;
    return n;
}

INLINE double sample_sum(const float *w, int64_t n)
{
    double lane[LANES] = {0}, sum = 0;
    for (int64_t i = 0; i < n; i += LANES)
        for (int l = 0; l < LANES; l++)
            lane[l] += (double)w[i + l];
    for (int l = 0; l < LANES; l++)
        sum += lane[l];
    return sum;
}

/* The largest score and the lowest index that has it, and the largest ones of each part. */
static int64_t sample_largest(sample_row *r, sample_space *space)
{
    const int64_t chunks = (r->vocab + CHUNK - 1) / CHUNK, in_part = (chunks * LANES + PARTS - 1) / PARTS;
    int64_t best = 0;
    r->max = -INFINITY;
    for (int64_t i = 0; i < PARTS; i += LANES)
        row_store(space->most, ADZE_F32, i, vf16_all(-INFINITY));
    for (int64_t begin = 0; begin < r->vocab; begin += CHUNK) {
        const int64_t n = sample_scores(r, begin, space->y), part = begin / CHUNK / in_part * LANES;
        vf16 most = vf16_all(-INFINITY), before = row_load(space->most, ADZE_F32, part);
        for (int64_t i = 0; i < n; i += LANES) {
            const vf16 v = row_load(space->y, ADZE_F32, i);
            for (int p = 0; p < VF_PARTS; p++)
                most.part[p] = vf_max(most.part[p], v.part[p]);
        }
        for (int p = 0; p < VF_PARTS; p++)
            before.part[p] = vf_max(most.part[p], before.part[p]);
        row_store(space->most, ADZE_F32, part, before);
        const float max = vf16_max_lane(most);
        if (max > r->max) {
            r->max = max;
            for (best = begin; space->y[best - begin] != max;)
                best++;
        }
    }
    return best;
}

/* Bits in the order of the floats. */
INLINE uint32_t sample_key(float y)
{
    uint32_t bits;
    memcpy(&bits, &y, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
INLINE float sample_value(uint32_t key)
{
    const uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* The number, or the weight, of the scores whose first bits are those of `key`, by the next eight. */
static void sample_bins(const sample_row *r, sample_space *space, uint32_t key, int shift, int weighted)
{
    const int some = r->lowest > -INFINITY;
    memset(space->weight, 0, sizeof space->weight);
    memset(space->count, 0, sizeof space->count);
    for (int64_t begin = 0; begin < r->vocab; begin += CHUNK) {
        const int64_t n = sample_scores(r, begin, space->y);
        if (weighted)
            sample_some_weights(r, space, n);
        for (int64_t i = 0; i < n; i++) {
            if (some && i % LANES == 0 && sample_none(r, space, i)) {
                i += LANES - 1;
                continue;
            }
            const uint32_t own = sample_key(space->y[i]);
            if (space->y[i] < r->lowest || ((uint64_t)(own ^ key) >> (shift + 8)) != 0)
                continue;
            space->count[own >> shift & (BINS - 1)]++;
            if (weighted)
                space->weight[own >> shift & (BINS - 1)] += (double)space->w[i];
        }
    }
}

/* The smallest score that has fewer than `most` scores before it, or less than that weight. */
static float sample_threshold(const sample_row *r, sample_space *space, double most, int weighted)
{
    uint32_t key = 0;
    double ahead = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        sample_bins(r, space, key, shift, weighted);
        double before = ahead;
        uint32_t found = BINS;
        for (uint32_t bin = BINS; bin-- > 0 && before < most;) {
            if (space->count[bin] == 0)
                continue;
            found = bin;
            ahead = before;
            before += weighted ? space->weight[bin] : (double)space->count[bin];
        }
        if (found == BINS) /* no score at all, as in a row without tokens */
            return r->lowest;
        key |= found << shift;
    }
    return sample_value(key);
}

/* The k-th largest of the parts' largest scores (quickselect, which reorders them): k scores are not below it. */
static float sample_bound(sample_space *space, int64_t k)
{
    float *const y = space->most;
    for (int64_t low = 0, high = PARTS - 1; low < high;) {
        const float pivot = y[(low + high) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (y[i] > pivot)
                i++;
            while (y[j] < pivot)
                j--;
            if (i <= j) {
                const float t = y[i];
                y[i++] = y[j], y[j--] = t;
            }
        }
        if (k - 1 <= j)
            high = j;
        else if (k - 1 >= i)
            low = i;
        else
            break;
    }
    return y[k - 1];
}

static int64_t sample_choose(sample_row *r, sample_space *space)
{
    const adze_sample_args *a = r->a;
    const int64_t best = sample_largest(r, space);
    r->lowest = -INFINITY;
    if (a->temperature == 0)
        return best;
    if (a->top_k && a->top_k < r->vocab) {
        r->lowest = a->top_k < PARTS ? sample_bound(space, a->top_k) : r->lowest;
        r->lowest = sample_threshold(r, space, a->top_k, 0);
    }
    if (a->top_p > 0 && a->top_p < 1) {
        double whole = 0;
        for (int64_t begin = 0; begin < r->vocab; begin += CHUNK) {
            const int64_t n = sample_scores(r, begin, space->y);
            sample_some_weights(r, space, n);
            for (int64_t i = 0; i < (n + LANES - 1) / LANES * LANES; i++)
                space->w[i] = i < n && space->y[i] >= r->lowest ? space->w[i] : 0;
            whole += sample_sum(space->w, n);
        }
        r->lowest = sample_threshold(r, space, (double)a->top_p * whole, 1);
    }
    double whole = 0, sum = 0;
    for (int64_t begin = 0; begin < r->vocab; begin += CHUNK) {
        const int64_t n = sample_kept(r, begin, space);
        whole += sample_sum(space->w, n);
    }
    const double target = (double)adze_sample_uniform(a, r->row) * whole;
    int64_t last = best;
    for (int64_t begin = 0; begin < r->vocab; begin += CHUNK) {
        const int64_t n = sample_kept(r, begin, space);
        const double next = sum + sample_sum(space->w, n);
        for (int64_t i = 0; i < n && next > target; i++) {
            sum += (double)space->w[i];
            last = space->w[i] > 0 ? begin + i : last;
            if (sum > target)
                return last;
        }
        if (next > target) /* the sum of the whole chunk was larger by its last bit */
            return last;
        sum = next;
    }
    return last;
}

/* log(softmax(x)[id]) of the logits as they are. */
static float sample_logprob(const sample_row *row, sample_space *space, int64_t id)
{
    adze_sample_args plain = *row->a;
    sample_row r = *row;
    plain.temperature = 0;
    r.a = &plain;
    r.count = 0;
    sample_largest(&r, space);
    double sum = 0;
    for (int64_t begin = 0; begin < r.vocab; begin += CHUNK) {
        const int64_t n = sample_scores(&r, begin, space->y);
        sample_weights(space->y, n, r.max, space->w);
        for (int64_t i = n; i < (n + LANES - 1) / LANES * LANES; i++)
            space->w[i] = 0;
        sum += sample_sum(space->w, n);
    }
    float x[LANES];
    sample_logits(&r, id, 1, x);
    return (float)((x[0] == r.max ? 0 : (double)x[0] - (double)r.max) - log(sum));
}

static void body(void *context, int64_t begin, int64_t end)
{
    const adze_sample_args *a = context;
    sample_space space;
    for (int64_t b = begin; b < end; b++) {
        sample_row r = {.a = a,
                        .x =
                            (const char *)a->logits.data + b * a->logits.stride[0] * adze_float_size(a->logits.dtype),
                        .row = b,
                        .vocab = a->logits.shape[1],
                        .count = a->penalty > 0 ? adze_sample_previous(a, b) : 0};
        if (r.count)
            r.previous = (const char *)a->previous.data +
                         b * a->previous.stride[0] * (int64_t)adze_dtype_size(a->previous.dtype);
        const int64_t id = sample_choose(&r, &space);
        if (a->out.dtype == ADZE_I32)
            ((int32_t *)a->out.data)[b] = (int32_t)id;
        else
            ((int64_t *)a->out.data)[b] = id;
        if (a->logprob.dtype)
            ((float *)a->logprob.data)[b] = sample_logprob(&r, &space, id);
    }
}

ADZE_CPU_KERNEL(sample)
{
    (void)stream;
    const adze_sample_args *a = args;
    for (int64_t b = 0; a->previous_count.dtype && b < a->logits.shape[0]; b++) {
        const int64_t count = adze_sample_previous(a, b);
        ADZE_REQUIRE(count >= 0 && count <= a->previous.shape[1], ADZE_BAD_ARG,
                     "sample: previous_count[%lld] is %lld, it must be 0 to %lld", (long long)b, (long long)count,
                     (long long)a->previous.shape[1]);
    }
    adze_parallel_for(a->logits.shape[0], row_grain(8 * a->logits.shape[1]), body, (void *)(uintptr_t)a);
    return ADZE_OK;
}
