/* group_norm on the CPU.

   The shape alone determines how a group is divided, so that the bits do not depend on the number of threads: into
   parts, and these into chunks that stay in L1 while first their mean and then their squared deviations are summed.
   Chunks and parts are combined by Chan's formula in double. A group of one part is written at once by the thread
   that summed it. Otherwise all parts of as many groups as the cache holds are summed, and then written. */
#include "cpu/act.h"

#include <stdlib.h>

enum {
    CHUNK = 4096,       /* elements of a chunk, channels first */
    BLOCK = 64,         /* positions of a chunk, channels last: terms that a lane adds */
    FEW = 1024,         /* positions, below which chunks have fewer of them: threads have equal shares */
    TILE = 512,         /* channels of a chunk, channels last */
    PIECE = 32768,      /* elements of a part, while there are few parts */
    PARTS = 64,         /* of a group */
    SHARES = 2048,      /* parts summed before any is written */
    STACK_SHARES = 512, /* the same when the heap has no memory */
};

typedef struct share { /* the statistics of a part, or of a group */
    double n, mean, square;
} share;

typedef struct group_call {
    const adze_group_norm_args *a;
    adze_tensor x, out;          /* as few dimensions as possible */
    adze_rows rows, sum_rows;    /* of x and out; of x alone, for the sums */
    int64_t len, sum_len;        /* of a row */
    int64_t per_channel;         /* rows, channels first */
    int64_t positions;           /* rows of a batch entry, channels last */
    int64_t channels, per_group; /* channels */
    int64_t count, chunk;        /* elements of a group; elements or positions of a chunk */
    int64_t parts, part;         /* parts of a group; elements or positions of a part */
    int64_t first, last;         /* the groups that are being summed and written, of all batch entries */
    share *shares;               /* [last - first, parts] */
    int64_t most;                /* shares that fit in memory */
    int last_layout, stream;
} group_call;

INLINE int64_t min_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
INLINE int64_t max_of(int64_t a, int64_t b)
{
    return a > b ? a : b;
}
INLINE vf16 group_load(const void *data, int dtype, int64_t i, int64_t n)
{
    return row_load_part(data, dtype, i, min_of(n, LANES));
}
INLINE const char *group_row(const group_call *c, const adze_rows *rows, int dtype, int64_t row, int64_t i)
{
    return (const char *)c->x.data + (adze_row_offset(rows, 0, row) + i) * adze_float_size(dtype);
}
INLINE char *group_out_row(const group_call *c, int dtype, int64_t row, int64_t i)
{
    return (char *)c->out.data + (adze_row_offset(&c->rows, 1, row) + i) * adze_float_size(dtype);
}

/* Chan: the squared deviations of two sets from their common mean. */
INLINE void share_add(share *s, double n, double mean, double square)
{
    const double all = s->n + n, away = mean - s->mean, rate = n / all;
    s->mean += away * rate;
    s->square += square + away * away * s->n * rate;
    s->n = all;
}

/* ---- Channels first: rows of one channel each, those of a group are neighbours ---- */

/* The sum of v, or of (v - mean)^2, over elements begin..end of a group. */
INLINE float first_reduce(const group_call *c, int dtype, int64_t group, int64_t begin, int64_t end, int square,
                          float mean)
{
    vf_total total = {0};
    const int64_t per_group = c->count / c->sum_len;
    for (int64_t n; begin < end; begin += n) {
        const int64_t row = begin / c->sum_len, at = begin - row * c->sum_len;
        const char *data = group_row(c, &c->sum_rows, dtype, group * per_group + row, at);
        n = min_of(end - begin, c->sum_len - at);
        int64_t i = 0;
        for (; i + 4 * LANES <= n; i += 4 * LANES)
            for (int set = 0; set < 4; set++)
                vf_total_add(&total, set, vf16_minus(row_load(data, dtype, i + set * LANES), mean), square);
        for (int set = 0; set < 4; set++, i += LANES) {
            if (i >= n)
                break;
            const vf16 v = vf16_minus(group_load(data, dtype, i, n - i), mean);
            vf_total_add(&total, set, n - i < LANES ? vf16_cut(v, n - i, 0) : v, square);
        }
    }
    return vf_total_sum(&total);
}

INLINE void first_sum(const group_call *c, int dtype, int64_t group, int64_t part, share *s)
{
    const int64_t end = min_of((part + 1) * c->part, c->count);
    *s = (share){0, 0, 0};
    for (int64_t at = part * c->part; at < end; at += c->chunk) {
        const int64_t stop = min_of(at + c->chunk, end);
        const double n = (double)(stop - at), mean = (double)first_reduce(c, dtype, group, at, stop, 0, 0) / n;
        share_add(s, n, mean, (double)first_reduce(c, dtype, group, at, stop, 1, (float)mean));
    }
}

INLINE float group_param(const adze_tensor *t, int dtype, int64_t channel, float absent)
{
    return !t->dtype              ? absent
           : t->dtype == ADZE_F32 ? ((const float *)t->data)[channel]
                                  : row_load_one(t->data, dtype, channel);
}

/* Normalises sixteen elements, or the n < 16 last, and applies act. */
INLINE void group_store(const group_call *c, int dtype, int act, char *to, int64_t i, int64_t n, vf16 y)
{
    if (act) {
        if (c->a->rounding & ADZE_ROUND_STEPS)
            y = row_round(dtype, y);
        for (int p = 0; p < VF_PARTS; p++)
            y.part[p] = vf_act(act, y.part[p]);
    }
    row_store_part(to, dtype, i, y, min_of(n, LANES), c->stream);
}

INLINE void first_write(const group_call *c, int dtype, int act, int64_t group, int64_t part, const share *s)
{
    const float mean = (float)s->mean, rstd = 1 / sqrtf((float)(s->square / s->n) + c->a->eps);
    const int64_t end = min_of((part + 1) * c->part, c->count), per_group = c->per_group * c->per_channel;
    int64_t n;
    for (int64_t begin = part * c->part; begin < end; begin += n) {
        const int64_t row = begin / c->len, at = begin - row * c->len;
        const int64_t channel = group % c->a->groups * c->per_group + row / c->per_channel;
        const float scale = rstd * group_param(&c->a->weight, dtype, channel, 1);
        const float bias = group_param(&c->a->bias, dtype, channel, 0);
        const char *from = group_row(c, &c->rows, dtype, group * per_group + row, at);
        char *to = group_out_row(c, dtype, group * per_group + row, at);
        n = min_of(end - begin, c->len - at);
        for (int64_t i = 0; i < n; i += LANES) {
            vf16 y = vf16_minus(group_load(from, dtype, i, n - i), mean);
            for (int p = 0; p < VF_PARTS; p++)
                y.part[p] = y.part[p] * scale + bias;
            group_store(c, dtype, act, to, i, n - i, y);
        }
    }
}

/* ---- Channels last: rows of one position each ---- */

/* Adds `rows` positions, 4 or 1, which are `stride` bytes apart, to the sums per channel of v, or of (v - mean)^2. */
INLINE void last_add_part(const char *from, int64_t stride, int dtype, int rows, int64_t i, int64_t n,
                          const float *mean, float *sum)
{
    vf16 lane = row_load(sum, ADZE_F32, i);
    const vf16 m = mean ? row_load(mean, ADZE_F32, i) : vf16_all(0);
    for (int r = 0; r < rows; r++) {
        const vf16 v = vf16_sub(row_load_part(from + r * stride, dtype, i, n), m);
        for (int p = 0; p < VF_PARTS; p++)
            lane.part[p] += mean ? v.part[p] * v.part[p] : v.part[p];
    }
    row_store(sum, ADZE_F32, i, lane);
}
INLINE void last_add(const char *from, int64_t stride, int dtype, int rows, int64_t n, const float *mean, float *sum)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        last_add_part(from, stride, dtype, rows, i, LANES, mean, sum);
    if (i < n)
        last_add_part(from, stride, dtype, rows, i, n - i, mean, sum);
}
INLINE void last_reduce(const group_call *c, int dtype, int64_t row, int64_t rows, int64_t channel, int64_t n,
                        const float *mean, float *sum)
{
    const int64_t stride = adze_row_stride(&c->rows, 0) * adze_float_size(dtype);
    memset(sum, 0, (size_t)((n + LANES - 1) / LANES * LANES) * sizeof *sum);
    for (int64_t run; rows > 0; row += run, rows -= run) {
        const char *from = group_row(c, &c->rows, dtype, row, channel);
        int64_t r = 0;
        run = min_of(rows, adze_rows_run(&c->rows, row));
        for (; r + 4 <= run; r += 4)
            last_add(from + r * stride, stride, dtype, 4, n, mean, sum);
        for (; r < run; r++)
            last_add(from + r * stride, stride, dtype, 1, n, mean, sum);
    }
}
/* Four sums, so that additions need not wait for each other. */
INLINE double sum_of(const float *v, int64_t n)
{
    double sum[4] = {0};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (int k = 0; k < 4; k++)
            sum[k] += (double)v[i + k];
    for (; i < n; i++)
        sum[0] += (double)v[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* One chunk: `n` channels of `rows` positions; each group in it gives a share. */
INLINE void last_chunk(const group_call *c, int dtype, int64_t batch, int64_t row, int64_t rows, int64_t channel,
                       int64_t n, int64_t part)
{
    float sum[TILE], mean[TILE] = {0};
    double means[TILE];
    last_reduce(c, dtype, row, rows, channel, n, NULL, sum);
    for (int64_t i = 0, next; i < n; i = next) {
        next = min_of(n, ((channel + i) / c->per_group + 1) * c->per_group - channel);
        means[i] = sum_of(sum + i, next - i) / (double)((next - i) * rows);
        for (int64_t k = i; k < next; k++)
            mean[k] = (float)means[i];
    }
    last_reduce(c, dtype, row, rows, channel, n, mean, sum);
    for (int64_t i = 0, next; i < n; i = next) {
        const int64_t group = (channel + i) / c->per_group;
        next = min_of(n, (group + 1) * c->per_group - channel);
        share_add(&c->shares[(batch * c->a->groups + group - c->first) * c->parts + part],
                  (double)((next - i) * rows), means[i], sum_of(sum + i, next - i));
    }
}

INLINE void last_put(const group_call *c, int dtype, int act, const char *from, char *to, int64_t i, int64_t n,
                     const float *mean, const float *scale, const float *bias)
{
    vf16 y = vf16_sub(row_load_part(from, dtype, i, n), row_load(mean, ADZE_F32, i));
    const vf16 s = row_load(scale, ADZE_F32, i), b = row_load(bias, ADZE_F32, i);
    for (int p = 0; p < VF_PARTS; p++)
        y.part[p] = y.part[p] * s.part[p] + b.part[p];
    group_store(c, dtype, act, to, i, n, y);
}
INLINE void last_write(const group_call *c, int dtype, int act, int64_t batch, int64_t row, int64_t rows,
                       int64_t channel, int64_t n)
{
    float mean[TILE] = {0}, scale[TILE] = {0}, bias[TILE] = {0};
    for (int64_t i = 0, next; i < n; i = next) {
        const int64_t group = (channel + i) / c->per_group;
        const share *s = &c->shares[(batch * c->a->groups + group - c->first) * c->parts];
        const float rstd = 1 / sqrtf((float)(s->square / s->n) + c->a->eps);
        next = min_of(n, (group + 1) * c->per_group - channel);
        for (int64_t k = i; k < next; k++) {
            mean[k] = (float)s->mean;
            scale[k] = group_param(&c->a->weight, dtype, channel + k, 1) * rstd;
            bias[k] = group_param(&c->a->bias, dtype, channel + k, 0);
        }
    }
    const int64_t size = adze_float_size(dtype);
    for (int64_t run; rows > 0; row += run, rows -= run) {
        const char *from = group_row(c, &c->rows, dtype, row, channel);
        char *to = group_out_row(c, dtype, row, channel);
        run = min_of(rows, adze_rows_run(&c->rows, row));
        for (int64_t r = 0; r < run; r++) {
            int64_t i = 0;
            for (; i + LANES <= n; i += LANES)
                last_put(c, dtype, act, from, to, i, LANES, mean, scale, bias);
            if (i < n)
                last_put(c, dtype, act, from, to, i, n - i, mean, scale, bias);
            from += adze_row_stride(&c->rows, 0) * size;
            to += adze_row_stride(&c->rows, 1) * size;
        }
    }
}

/* One part of the positions of one batch entry, for its groups within first..last. */
INLINE void last_part(const group_call *c, int dtype, int act, int64_t batch, int64_t part, int write)
{
    const int64_t groups = c->a->groups, begin = part * c->part, end = min_of(begin + c->part, c->positions);
    const int64_t from = max_of(c->first - batch * groups, 0), to = min_of(c->last - batch * groups, groups);
    for (int64_t g = from; g < to && !write; g++)
        c->shares[(batch * groups + g - c->first) * c->parts + part] = (share){0, 0, 0};
    for (int64_t channel = from * c->per_group; channel < to * c->per_group; channel += TILE) {
        const int64_t n = min_of(TILE, to * c->per_group - channel), row = batch * c->positions;
        if (write)
            last_write(c, dtype, act, batch, row + begin, end - begin, channel, n);
        for (int64_t p = begin; p < end && !write; p += c->chunk)
            last_chunk(c, dtype, batch, row + p, min_of(c->chunk, end - p), channel, n, part);
    }
}

/* ---- The call ---- */

INLINE void group_sum(const group_call *c, int dtype, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++) {
        const int64_t part = i % c->parts, group = i / c->parts;
        if (c->last_layout)
            last_part(c, dtype, 0, c->first / c->a->groups + group, part, 0);
        else
            first_sum(c, dtype, c->first + group, part, &c->shares[i]);
    }
}
INLINE void group_out(const group_call *c, int dtype, int act, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++) {
        const int64_t part = i % c->parts, group = i / c->parts;
        if (c->last_layout)
            last_part(c, dtype, act, c->first / c->a->groups + group, part, 1);
        else
            first_write(c, dtype, act, c->first + group, part, &c->shares[group * c->parts]);
    }
    if (c->stream)
        row_stream_end();
}
/* The common activations have specialised loops. */
INLINE void group_out_act(const group_call *c, int dtype, int64_t begin, int64_t end)
{
    switch (c->a->act) {
    case ADZE_ACT_NONE: group_out(c, dtype, ADZE_ACT_NONE, begin, end); break;
    case ADZE_ACT_SILU: group_out(c, dtype, ADZE_ACT_SILU, begin, end); break;
    default: group_out(c, dtype, c->a->act, begin, end); break;
    }
}

static void sum_body(void *context, int64_t begin, int64_t end)
{
    const group_call *c = context;
    switch (c->x.dtype) {
    case ADZE_F32: group_sum(c, ADZE_F32, begin, end); break;
    case ADZE_F16: group_sum(c, ADZE_F16, begin, end); break;
    default: group_sum(c, ADZE_BF16, begin, end); break;
    }
}
static void write_body(void *context, int64_t begin, int64_t end)
{
    const group_call *c = context;
    switch (c->x.dtype) {
    case ADZE_F32: group_out_act(c, ADZE_F32, begin, end); break;
    case ADZE_F16: group_out_act(c, ADZE_F16, begin, end); break;
    default: group_out_act(c, ADZE_BF16, begin, end); break;
    }
}

/* Whole groups of one part. */
static void group_body(void *context, int64_t begin, int64_t end)
{
    group_call c = *(const group_call *)context;
    share s;
    c.shares = &s;
    for (c.first = begin; c.first < end; c.first++) {
        c.last = c.first + 1;
        sum_body(&c, 0, 1);
        write_body(&c, 0, 1);
    }
}

/* A rank of 2 has no positions: both layouts are one. */
static void group_shape(group_call *c)
{
    const adze_group_norm_args *a = c->a;
    c->last_layout = a->channels_last || a->x.rank == 2;
    c->channels = a->x.shape[c->last_layout ? a->x.rank - 1 : 1];
    c->per_group = c->channels / a->groups;
    c->count = adze_count(&a->x) / (a->x.shape[0] * a->groups);
    c->positions = c->count / c->per_group;
    adze_merge(2, (adze_tensor *[]){&c->x, &c->out}, c->last_layout ? c->x.rank : 2);
    adze_rows_init(&c->rows, &c->x, 2, (const adze_tensor *[]){&c->x, &c->out});
    c->len = c->x.shape[c->x.rank - 1];
    if (c->last_layout) {
        c->chunk = c->positions < FEW ? BLOCK / 4 : BLOCK;
        c->parts = min_of(c->count * a->groups / PIECE, (c->positions + c->chunk - 1) / c->chunk);
    } else {
        adze_tensor x = a->x;
        adze_merge(1, (adze_tensor *[]){&x}, 2);
        if (x.rank == 3 && x.stride[1] == x.shape[2]) { /* the channels of a group follow each other */
            x.shape[1] = a->groups, x.shape[2] = c->count;
            x.stride[1] = c->count;
        }
        adze_rows_init(&c->sum_rows, &x, 1, (const adze_tensor *[]){&x});
        c->sum_len = x.shape[x.rank - 1];
        c->per_channel = c->positions / c->len;
        /* No lane adds more than 64 terms in a chunk. A chunk of short rows begins at the start of a row. */
        c->chunk = c->sum_len >= CHUNK ? CHUNK : max_of(64 / ((c->sum_len + 63) / 64), 1) * c->sum_len;
        c->parts = min_of(c->count / PIECE, (c->count + c->chunk - 1) / c->chunk);
    }
    c->parts = max_of(min_of(c->parts, PARTS), 1);
    const int64_t all = c->last_layout ? c->positions : c->count, chunks = (all + c->chunk - 1) / c->chunk;
    c->part = (chunks + c->parts - 1) / c->parts * c->chunk;
    c->parts = (all + c->part - 1) / c->part;
    c->stream = row_streams(&c->out, adze_count(&c->out)) && c->len % LANES == 0;
}

/* How many groups are summed before they are written: what half the cache holds, or whole batch entries. */
static int64_t group_wave(const group_call *c)
{
    const int64_t size = adze_float_size(c->x.dtype), most = c->most / c->parts, groups = c->a->groups;
    const int64_t cached = max_of((int64_t)(adze_cpu_cache() / 2) / (c->count * size), 1);
    if (!c->last_layout || most < groups)
        return c->last_layout ? most : min_of(most, cached);
    return min_of(most / groups, max_of(cached / groups, 1)) * groups;
}

ADZE_CPU_KERNEL(group_norm)
{
    (void)stream;
    group_call c = {.a = args};
    c.x = c.a->x, c.out = c.a->out;
    if (adze_count(&c.x) == 0)
        return ADZE_OK;
    group_shape(&c);
    const int64_t groups = c.a->groups, all = c.x.shape[0] * groups;
    if (!c.last_layout && c.parts == 1) {
        adze_parallel_for(all, row_grain(c.count), group_body, &c);
        return ADZE_OK;
    }
    share on_stack[STACK_SHARES], *const heap = all * c.parts > STACK_SHARES ? malloc(SHARES * sizeof *heap) : NULL;
    c.shares = heap ? heap : on_stack;
    c.most = heap ? SHARES : STACK_SHARES;
    const int64_t wave = group_wave(&c);
    c.stream = c.stream && (!c.last_layout || wave * c.per_group % LANES == 0); /* the first channel of a wave */
    for (c.first = 0; c.first < all; c.first = c.last) {
        c.last = min_of(c.first + wave, all);
        const int64_t entries = c.last_layout ? (c.last - 1) / groups - c.first / groups + 1 : c.last - c.first;
        const int64_t grain = row_grain(c.part * (c.last_layout ? c.channels : 1));
        adze_parallel_for(entries * c.parts, grain, sum_body, &c);
        for (int64_t g = 0; g < c.last - c.first; g++)
            for (int64_t part = 1; part < c.parts; part++) {
                const share *s = &c.shares[g * c.parts + part];
                share_add(&c.shares[g * c.parts], s->n, s->mean, s->square);
            }
        adze_parallel_for(entries * c.parts, grain, write_body, &c);
    }
    free(heap);
    return ADZE_OK;
}
