/* attention: the contract, the definition, and the kernels. */
#include "attention_sizes.h"

#include "value.h"

#include <stdlib.h>

static const adze_field fields[] = {
    ADZE_OUTPUT(attention, ADZE_OUT, out, 0, 0, 0),
    ADZE_OUTPUT(attention, ADZE_OUT_OPTIONAL, lse, 0, 0, 0),
    ADZE_FIELD(attention, ADZE_IN, q),
    ADZE_FIELD(attention, ADZE_IN, k),
    ADZE_FIELD(attention, ADZE_IN, v),
    ADZE_FIELD(attention, ADZE_OPTIONAL, mask),
    ADZE_FIELD(attention, ADZE_OPTIONAL, sinks),
    ADZE_FIELD(attention, ADZE_OPTIONAL, lengths),
    ADZE_FIELD(attention, ADZE_OPTIONAL, block_table),
    ADZE_FIELD(attention, ADZE_OPTIONAL, q_offsets),
    ADZE_FIELD(attention, ADZE_OPTIONAL, k_offsets),
    ADZE_FIELD(attention, ADZE_OPTIONAL, k_scale),
    ADZE_FIELD(attention, ADZE_OPTIONAL, v_scale),
    ADZE_FIELD(attention, ADZE_FLOAT, scale),
    ADZE_FIELD(attention, ADZE_FLOAT, softcap),
    ADZE_FIELD(attention, ADZE_INT, causal),
    ADZE_FIELD(attention, ADZE_INT, window),
    ADZE_FIELDS_END,
};

/* ---- The contract ---- */

static int is_quantised(int dtype)
{
    return dtype == ADZE_I8 || dtype == ADZE_F8E4M3;
}

static adze_status check_rank(const char *name, const adze_tensor *t, int rank)
{
    ADZE_REQUIRE(t->rank == rank, ADZE_BAD_ARG, "attention: %s has rank %d, it must be %d", name, t->rank, rank);
    return adze_check_rows("attention", name, t);
}

static adze_status check_size(const char *name, const adze_tensor *t, int dimension, int64_t due)
{
    ADZE_REQUIRE(t->shape[dimension] == due, ADZE_BAD_ARG,
                 "attention: %s has %lld in dimension %d, it must have %lld", name, (long long)t->shape[dimension],
                 dimension, (long long)due);
    return ADZE_OK;
}

/* An optional tensor of i32; without elements to read it is not looked at. */
static adze_status check_index(const char *name, const adze_tensor *t, int rank, int64_t due)
{
    if (!t->dtype)
        return ADZE_OK;
    ADZE_REQUIRE(t->dtype == ADZE_I32, ADZE_BAD_DTYPE, "attention: %s is %s, it must be i32", name,
                 adze_dtype_name(t->dtype));
    ADZE_CHECK(check_rank(name, t, rank));
    return check_size(name, t, 0, due);
}

static adze_status check_heads(const adze_attention_args *a)
{
    ADZE_CHECK(adze_check_float("attention", "q", &a->q));
    ADZE_CHECK(check_rank("q", &a->q, 4));
    ADZE_CHECK(check_rank("k", &a->k, 4));
    ADZE_CHECK(check_rank("v", &a->v, 4));
    ADZE_REQUIRE(a->k.dtype == a->q.dtype || is_quantised(a->k.dtype), ADZE_BAD_DTYPE,
                 "attention: k is %s, it must be q's %s, i8 or f8e4m3", adze_dtype_name(a->k.dtype),
                 adze_dtype_name(a->q.dtype));
    ADZE_REQUIRE(a->v.dtype == a->k.dtype, ADZE_BAD_DTYPE, "attention: v is %s, it must be k's %s",
                 adze_dtype_name(a->v.dtype), adze_dtype_name(a->k.dtype));
    ADZE_REQUIRE(a->q.shape[3] > 0 && a->q.shape[3] <= 1024, ADZE_BAD_ARG,
                 "attention: rows of q have %lld elements, they must have 1 to 1024", (long long)a->q.shape[3]);
    ADZE_CHECK(check_size("k", &a->k, 3, a->q.shape[3]));
    for (int d = 0; d < 3; d++)
        ADZE_CHECK(check_size("v", &a->v, d, a->k.shape[d]));
    const int64_t heads = a->q.shape[1], kv_heads = a->k.shape[1];
    ADZE_REQUIRE(kv_heads > 0 && heads % kv_heads == 0, ADZE_BAD_ARG,
                 "attention: q has %lld heads, they must be a multiple of k's %lld", (long long)heads,
                 (long long)kv_heads);
    return ADZE_OK;
}

/* The number of sequences, in all that has one. */
static adze_status check_sequences(const adze_attention_args *a)
{
    const adze_tensor *const packed[] = {&a->q_offsets, &a->k_offsets};
    for (int i = 0; i < 2; i++)
        ADZE_REQUIRE(!packed[i]->dtype || packed[i]->rank != 1 || packed[i]->shape[0] > 0, ADZE_BAD_ARG,
                     "attention: %s is empty, it must have sequences + 1 elements", i ? "k_offsets" : "q_offsets");
    const int64_t sequences = attention_sizes_of(a).sequences;
    ADZE_CHECK(check_index("q_offsets", &a->q_offsets, 1, sequences + 1));
    ADZE_CHECK(check_index("k_offsets", &a->k_offsets, 1, sequences + 1));
    ADZE_CHECK(check_index("lengths", &a->lengths, 1, sequences));
    ADZE_CHECK(check_index("block_table", &a->block_table, 2, sequences));
    if (a->q_offsets.dtype)
        ADZE_CHECK(check_size("q", &a->q, 0, 1));
    if (a->k_offsets.dtype) {
        ADZE_REQUIRE(!a->lengths.dtype, ADZE_BAD_ARG, "attention: lengths is given, k_offsets has the lengths");
        ADZE_REQUIRE(!a->block_table.dtype, ADZE_BAD_ARG,
                     "attention: block_table is given, it must be absent with k_offsets");
        return check_size("k", &a->k, 0, 1);
    }
    if (!a->block_table.dtype)
        return check_size("k", &a->k, 0, sequences);
    ADZE_REQUIRE(a->lengths.dtype, ADZE_BAD_ARG, "attention: lengths is absent, block_table needs it");
    ADZE_REQUIRE(a->k.shape[2] > 0, ADZE_BAD_ARG, "attention: pages of k have no rows");
    return ADZE_OK;
}

static adze_status check_mask(const adze_attention_args *a)
{
    const adze_tensor *t = &a->mask;
    if (!t->dtype)
        return ADZE_OK;
    ADZE_REQUIRE(t->dtype == ADZE_BOOL || t->dtype == ADZE_U8 || t->dtype == ADZE_F32 || t->dtype == a->q.dtype,
                 ADZE_BAD_DTYPE, "attention: mask is %s, it must be bool, u8, f32 or q's %s",
                 adze_dtype_name(t->dtype), adze_dtype_name(a->q.dtype));
    ADZE_REQUIRE(!a->q_offsets.dtype && !a->k_offsets.dtype, ADZE_BAD_ARG,
                 "attention: mask is given, it must be absent with q_offsets and k_offsets");
    ADZE_REQUIRE(t->rank >= 1 && t->rank <= 4, ADZE_BAD_ARG, "attention: mask has rank %d, it must be 1 to 4",
                 t->rank);
    const int64_t due[] = {a->q.shape[0], a->q.shape[1], a->q.shape[2], attention_sizes_of(a).n};
    for (int d = 0; d < t->rank; d++) {
        const int of = d + 4 - t->rank;
        ADZE_REQUIRE(t->shape[d] == due[of] || (of < 3 && t->shape[d] == 1), ADZE_BAD_ARG,
                     "attention: mask has %lld in dimension %d, it must have %lld%s", (long long)t->shape[d], d,
                     (long long)due[of], of < 3 ? " or 1" : "");
    }
    return adze_check_rows("attention", "mask", t);
}

static adze_status check_sinks(const adze_attention_args *a)
{
    const adze_tensor *t = &a->sinks;
    if (!t->dtype)
        return ADZE_OK;
    ADZE_REQUIRE(t->dtype == ADZE_F32 || t->dtype == a->q.dtype, ADZE_BAD_DTYPE,
                 "attention: sinks is %s, it must be f32 or q's %s", adze_dtype_name(t->dtype),
                 adze_dtype_name(a->q.dtype));
    ADZE_CHECK(check_rank("sinks", t, 1));
    return check_size("sinks", t, 0, a->q.shape[1]);
}

static adze_status check_scale(const adze_attention_args *a, const char *name, const adze_tensor *t)
{
    const int fewer = is_quantised(a->k.dtype);
    ADZE_REQUIRE(fewer || !t->dtype, ADZE_BAD_ARG, "attention: %s is given, k and v are not quantised", name);
    ADZE_REQUIRE(!fewer || t->dtype, ADZE_BAD_ARG, "attention: %s is absent, k and v of %s need it", name,
                 adze_dtype_name(a->k.dtype));
    if (!fewer)
        return ADZE_OK;
    ADZE_REQUIRE(t->dtype == ADZE_F32, ADZE_BAD_DTYPE, "attention: %s is %s, it must be f32", name,
                 adze_dtype_name(t->dtype));
    if (t->rank == 1 && t->shape[0] == 1)
        return ADZE_OK;
    ADZE_REQUIRE(t->rank == 3, ADZE_BAD_ARG, "attention: %s has rank %d, it must be [1], or of rank 3 as k without d",
                 name, t->rank);
    for (int d = 0; d < 3; d++)
        ADZE_CHECK(check_size(name, t, d, a->k.shape[d]));
    return adze_check_rows("attention", name, t);
}

static adze_status validate(const void *args)
{
    const adze_attention_args *a = args;
    ADZE_CHECK(check_heads(a));
    ADZE_CHECK(check_sequences(a));
    ADZE_CHECK(check_mask(a));
    ADZE_CHECK(check_sinks(a));
    ADZE_CHECK(check_scale(a, "k_scale", &a->k_scale));
    ADZE_CHECK(check_scale(a, "v_scale", &a->v_scale));
    ADZE_REQUIRE(a->softcap >= 0, ADZE_BAD_ARG, "attention: softcap is %g, it must not be negative",
                 (double)a->softcap);
    ADZE_CHECK(adze_check_range("attention", "causal", a->causal, 0, 1));
    ADZE_REQUIRE(a->window >= 0, ADZE_BAD_ARG, "attention: window is %d, it must not be negative", a->window);
    return ADZE_OK;
}

static void outputs(void *args)
{
    adze_attention_args *a = args;
    adze_like(&a->out, &a->q);
    a->out.shape[3] = a->v.shape[3];
    adze_like(&a->lse, &a->q);
    a->lse.rank = 3;
    a->lse.dtype = ADZE_F32;
}

/* ---- The definition ---- */

typedef struct definition {
    const adze_attention_args *a;
    adze_sums sums;
    attention_sizes sizes;
    int64_t sequence, kv_head; /* whose keys are in k and v */
    int64_t keys;
    double *k, *v, *q; /* v by columns, as they are summed */
    adze_value *p;     /* of the query's keys: the score, then exp(s - max), then that as a factor of v */
    int64_t *next;     /* by key: the next that may have a larger score, */
    int64_t *more;     /* and how many such follow one another */
    int64_t row;       /* of out that p is for */
    attention_range seen;
    adze_value sum; /* the denominator */
    double max;
} definition;

static double scale_at(const adze_tensor *t, int64_t at)
{
    return !t->dtype ? 1 : adze_get(t, t->rank == 1 ? 0 : at);
}

static void read_keys(definition *d, const attention_sequence *s, int64_t sequence, int64_t head)
{
    const adze_attention_args *a = d->a;
    if (d->k && d->sequence == sequence && d->kv_head == head)
        return;
    free(d->k);
    free(d->v);
    d->k = calloc((size_t)(s->n * d->sizes.d) + 1, sizeof *d->k);
    d->v = calloc((size_t)(s->n * d->sizes.dv) + 1, sizeof *d->v);
    for (int64_t j = 0; j < s->n; j++) {
        const adze_tensor *const t[] = {&a->k, &a->v, &a->k_scale, &a->v_scale};
        int64_t at[4];
        for (int i = 0; i < 4; i++)
            at[i] = attention_key_at(a, &d->sizes, s, sequence, t[i], head, j);
        const double k_scale = scale_at(t[2], at[2]), v_scale = scale_at(t[3], at[3]);
        for (int64_t i = 0; i < d->sizes.d; i++)
            d->k[j * d->sizes.d + i] = adze_get(t[0], at[0] + i) * k_scale;
        for (int64_t i = 0; i < d->sizes.dv; i++)
            d->v[i * s->n + j] = adze_get(t[1], at[1] + i) * v_scale;
    }
    d->sequence = sequence, d->kv_head = head, d->keys = s->n;
}

/* scale * q . k. A kernel may scale q first, which rounds each product once more. A quantised key is rounded when it
   is scaled, or the sum is. */
static adze_value product(const definition *d, int64_t j)
{
    const adze_attention_args *a = d->a;
    adze_dot dot = {0};
    for (int64_t i = 0; i < d->sizes.d; i++)
        adze_dot_add(&dot, d->q[i], 0, d->k[j * d->sizes.d + i]);
    adze_value y = adze_dotted(d->sums, &dot);
    if (!isfinite(y.v))
        return adze_exact(a->scale < 0 ? -y.v : y.v);
    y.e += ADZE_U * (is_quantised(a->k.dtype) ? 3 : 1) * dot.magnitude;
    const double scale = a->scale != 0 ? a->scale : 1 / sqrt((double)d->sizes.d);
    return adze_mul(y, (adze_value){scale, a->scale != 0 ? 0 : ADZE_U * scale});
}

/* The tanh of a kernel is 1 - 2 / (e^2|x| + 1) with the sign of x, or better: exp is off by 4 u, the sum by u, the
   quotient, which is at most 1, by 2 u, and the difference by u. */
static adze_value capped(adze_value s, float softcap)
{
    const adze_value x = adze_div(s, adze_exact(softcap));
    if (!isfinite(s.v))
        return adze_exact(tanh(s.v) * softcap);
    return adze_mul((adze_value){tanh(x.v), x.e + 8 * ADZE_U}, adze_exact(softcap));
}

static adze_value score(const definition *d, int64_t mask_at, int64_t j)
{
    const adze_attention_args *a = d->a;
    const int hides = a->mask.dtype == ADZE_BOOL || a->mask.dtype == ADZE_U8;
    if (hides && adze_get(&a->mask, mask_at + j) == 0)
        return adze_exact(-INFINITY);
    adze_value s = product(d, j);
    if (a->softcap != 0)
        s = capped(s, a->softcap);
    if (a->mask.dtype && !hides)
        s = adze_add(s, adze_element(&a->mask, mask_at + j));
    return isfinite(s.v) ? s : adze_exact(s.v);
}

/* How often the maximum of a kernel that walks over the keys may change: it takes blocks of 16 keys or more, and
   begins anywhere. A key may be a new maximum after another when the bounds of their scores leave it open. */
static double changes(const definition *d, int64_t n)
{
    const adze_value *s = d->p;
    int64_t most = 0;
    for (int64_t j = n - 1; j >= 0; j--) {
        int64_t next = j + 1;
        while (next < n && !(s[next].v + s[next].e > s[j].v - s[j].e))
            next = d->next[next];
        d->next[j] = next;
        d->more[j] = next < n ? d->more[next] + 1 : 0;
        most = d->more[j] > most ? d->more[j] : most;
    }
    return fmin((double)most, (double)n / 16) + 3;
}

/* exp(s - max). The difference is rounded, once more in base 2, and so it is in steps when the maximum changes: their
   errors are those of the whole difference together. Each exp is good to two float units, or to a unit of the
   subnormal floats, which may be flushed to zero. */
static adze_value power(adze_value s, double max, double steps)
{
    const double x = s.v - max, e = s.e + 2 * ADZE_U * fabs(x);
    if (!isfinite(x))
        return adze_exact(exp(x));
    const double p = exp(x), off = p * expm1(e);
    return (adze_value){p, off + (p + off) * ADZE_U * (4 + 5 * steps) + 0x1p-126};
}

/* A weight is rounded to q's dtype on tensor cores. */
static double rounding_of(const definition *d, double p)
{
    const int dtype = d->sums == ADZE_SUMS_TENSOR ? d->a->q.dtype : ADZE_F32;
    return dtype == ADZE_BF16 ? p * 0x1p-8 : dtype == ADZE_F16 ? p * 0x1p-11 + 0x1p-25 : 0;
}

/* The weights of a row of out, before they are divided by their sum. */
static void weigh(definition *d, int64_t row)
{
    const adze_attention_args *a = d->a;
    const int64_t m = a->q.shape[2], batch = row / m / d->sizes.heads, head = row / m % d->sizes.heads;
    attention_sequence s = {0};
    int64_t sequence = 0, i = -1, stride[3] = {0};
    for (; sequence < d->sizes.sequences; sequence++) {
        s = attention_sequence_of(a, &d->sizes, sequence);
        i = row % m - s.first;
        if (s.batch == batch && i >= 0 && i < s.m)
            break;
    }
    d->row = row;
    d->seen = (attention_range){0, 0};
    d->max = -INFINITY;
    d->sum = adze_exact(0);
    if (sequence == d->sizes.sequences)
        return;
    read_keys(d, &s, sequence, head / (d->sizes.heads / d->sizes.kv_heads));
    const int64_t at = batch * a->q.stride[0] + head * a->q.stride[1] + row % m * a->q.stride[2];
    for (int64_t c = 0; c < d->sizes.d; c++)
        d->q[c] = adze_get(&a->q, at + c);
    attention_mask_strides(&a->mask, stride);
    const int64_t mask_at = batch * stride[0] + head * stride[1] + i * stride[2];
    d->seen = attention_range_of(a, &s, i);
    const int64_t n = d->seen.high - d->seen.low;
    d->max = a->sinks.dtype ? adze_get(&a->sinks, head) : -INFINITY;
    const adze_value sink = adze_exact(d->max);
    double top = -INFINITY;
    for (int64_t j = 0; j < n; j++) {
        d->p[j] = score(d, mask_at, d->seen.low + j);
        top = isnan(d->p[j].v) || d->p[j].v > top ? d->p[j].v : top;
    }
    d->max = isnan(top) ? top : fmax(d->max, top);
    if (top == -INFINITY)
        d->seen.high = d->seen.low;
    if (d->max == -INFINITY)
        return;
    const double steps = changes(d, d->seen.high - d->seen.low);
    const adze_value own = sink.v == -INFINITY ? adze_exact(0) : power(sink, d->max, 1);
    double total = own.v, error = own.e;
    for (int64_t j = 0; j < d->seen.high - d->seen.low; j++) {
        d->p[j] = power(d->p[j], d->max, steps);
        total += d->p[j].v, error += d->p[j].e;
        d->p[j].e += rounding_of(d, d->p[j].v);
    }
    d->sum = adze_summed(n + 1, total, total, error);
}

static adze_value element(const definition *d, int64_t column)
{
    const int64_t n = d->seen.high - d->seen.low;
    if (n == 0)
        return adze_exact(0);
    const double *v = d->v + column * d->keys + d->seen.low;
    adze_dot dot = {0};
    for (int64_t j = 0; j < n; j++)
        adze_dot_add(&dot, d->p[j].v, d->p[j].e, v[j]);
    adze_value y = adze_dotted(d->sums, &dot);
    if (isfinite(y.v) && is_quantised(d->a->v.dtype))
        y.e += 2 * ADZE_U * (dot.magnitude + dot.error);
    y = adze_div(y, d->sum);
    return isfinite(y.v) ? y : adze_exact(y.v);
}

/* max + log(sum), which a kernel may compute in base 2; its log is good to two float units. */
static adze_value log_sum(const definition *d)
{
    if (d->sum.v == 0)
        return adze_exact(-INFINITY);
    const double log_of = log(d->sum.v), low = d->sum.v - d->sum.e;
    if (!isfinite(log_of) || low <= 0)
        return (adze_value){log_of, isfinite(log_of) ? INFINITY : 0};
    const adze_value y = adze_fn(d->sum, log_of, 1 / low, 2);
    return adze_add(adze_mul(y, (adze_value){1, ADZE_U}), (adze_value){d->max, 2 * ADZE_U * fabs(d->max)});
}

typedef struct place {
    int64_t index, of;
} place;
static int by_index(const void *a, const void *b)
{
    const int64_t x = ((const place *)a)->index, y = ((const place *)b)->index;
    return (x > y) - (x < y);
}

/* Row after row: the weights of a row are computed once. */
static void reference_at(const void *args, int sums, int output, int64_t n, const int64_t *index, adze_value *out)
{
    const adze_attention_args *a = args;
    definition d = {.a = a, .sums = (adze_sums)sums, .sizes = attention_sizes_of(a), .row = -1};
    if (d.sums == ADZE_SUMS_TENSOR && a->k.dtype == ADZE_F32)
        d.sums = ADZE_SUMS_SPLIT;
    const int64_t columns = output == 0 ? d.sizes.dv : 1;
    d.q = calloc((size_t)d.sizes.d, sizeof *d.q);
    d.p = calloc((size_t)d.sizes.n + 1, sizeof *d.p);
    d.next = calloc((size_t)d.sizes.n + 1, sizeof *d.next);
    d.more = calloc((size_t)d.sizes.n + 1, sizeof *d.more);
    place *at = calloc((size_t)n + 1, sizeof *at);
    for (int64_t i = 0; i < n; i++)
        at[i] = (place){index ? index[i] : i, i};
    if (index)
        qsort(at, (size_t)n, sizeof *at, by_index);
    for (int64_t i = 0; i < n; i++) {
        if (at[i].index / columns != d.row)
            weigh(&d, at[i].index / columns);
        out[at[i].of] = output == 0 ? element(&d, at[i].index % columns) : log_sum(&d);
    }
    free(at);
    free(d.more);
    free(d.next);
    free(d.p);
    free(d.q);
    free(d.k);
    free(d.v);
}

/* On CUDA calls that tensor cores cannot take are summed key after key: no more than a tensor core may lose. f32 is
   ADZE_SUMS_SPLIT. */
static int sums_of(const adze_kernel *kernel)
{
    return kernel && !kernel->on_cuda ? ADZE_SUMS_BLOCKS : ADZE_SUMS_TENSOR;
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_attention_args *a = args;
    for (int i = 0; i < 2; i++)
        if (out[i])
            reference_at(args, sums_of(NULL), i, adze_count(i ? &a->lse : &a->out), NULL, out[i]);
}

static const adze_samples samples = {sums_of, reference_at};

ADZE_KERNELS(attention)

/* On CUDA, where few queries see many keys, parts of a row of out pass through scratch. */
ADZE_CUDA_SCRATCH(attention)

const adze_op adze_op_attention = {"attention",
                                   sizeof(adze_attention_args),
                                   ADZE_FIRST_SIZE(attention, window),
                                   fields,
                                   validate,
                                   outputs,
                                   reference,
                                   kernels,
                                   scratch,
                                   &samples};

adze_status adze_attention(adze_stream stream, const adze_attention_args *args)
{
    return adze_dispatch(&adze_op_attention, stream, args);
}

adze_status adze_attention_scratch(adze_stream stream, const adze_attention_args *args, size_t *bytes)
{
    return adze_dispatch_scratch(&adze_op_attention, stream, args, bytes);
}
