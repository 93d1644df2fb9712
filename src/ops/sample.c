/* sample: the contract, the definition, and the kernels. */
#include "sampling.h"
#include "value.h"

#include <stdlib.h>
#include <string.h>

static int also_token(const void *args, int64_t row, double got);
static int also_logprob(const void *args, int64_t row, double got);

static const adze_field fields[] = {
    ADZE_CHOICE(sample, ADZE_OUT, out, also_token),
    ADZE_CHOICE(sample, ADZE_OUT_OPTIONAL, logprob, also_logprob),
    ADZE_FIELD(sample, ADZE_IN, logits),
    ADZE_FIELD(sample, ADZE_OPTIONAL, seed),
    ADZE_FIELD(sample, ADZE_OPTIONAL, counter),
    ADZE_FIELD(sample, ADZE_OPTIONAL, previous),
    ADZE_FIELD(sample, ADZE_OPTIONAL, previous_count),
    ADZE_FIELD(sample, ADZE_FLOAT, temperature),
    ADZE_FIELD(sample, ADZE_FLOAT, top_p),
    ADZE_FIELD(sample, ADZE_FLOAT, min_p),
    ADZE_FIELD(sample, ADZE_FLOAT, penalty),
    ADZE_FIELD(sample, ADZE_INT, top_k),
    ADZE_FIELD(sample, ADZE_INT, out_dtype),
    ADZE_FIELDS_END,
};

/* ---- The contract ---- */

static adze_status check_whole(const char *name, const adze_tensor *t, int rank, int i64)
{
    if (!t->dtype)
        return ADZE_OK;
    ADZE_REQUIRE(t->dtype == ADZE_I32 || (i64 && t->dtype == ADZE_I64), ADZE_BAD_DTYPE,
                 "sample: %s is %s, it must be i32%s", name, adze_dtype_name(t->dtype), i64 ? " or i64" : "");
    ADZE_REQUIRE(t->rank == rank, ADZE_BAD_ARG, "sample: %s has rank %d, it must be %d", name, t->rank, rank);
    return adze_check_rows("sample", name, t);
}

static adze_status check_batch(const char *name, const adze_tensor *t, int64_t batch, int one)
{
    ADZE_REQUIRE(!t->dtype || t->shape[0] == batch || (one && t->shape[0] == 1), ADZE_BAD_ARG,
                 "sample: %s has %lld elements, it must have %lld%s", name, (long long)t->shape[0], (long long)batch,
                 one ? " or 1" : "");
    return ADZE_OK;
}

static adze_status check_share(const char *name, float value)
{
    ADZE_REQUIRE(value >= 0 && value <= 1, ADZE_BAD_ARG, "sample: %s is %g, it must be 0 to 1", name, (double)value);
    return ADZE_OK;
}

static adze_status validate(const void *args)
{
    const adze_sample_args *a = args;
    ADZE_CHECK(adze_check_float("sample", "logits", &a->logits));
    ADZE_REQUIRE(a->logits.rank == 2, ADZE_BAD_ARG, "sample: logits has rank %d, it must be 2", a->logits.rank);
    ADZE_CHECK(adze_check_rows("sample", "logits", &a->logits));
    const int64_t batch = a->logits.shape[0], vocab = a->logits.shape[1];
    ADZE_REQUIRE((vocab > 0 || batch == 0) && vocab <= INT32_MAX, ADZE_BAD_ARG,
                 "sample: rows of logits have %lld elements, they must have 1 to 2^31 - 1", (long long)vocab);
    ADZE_CHECK(check_whole("seed", &a->seed, 1, 1));
    ADZE_CHECK(check_whole("counter", &a->counter, 1, 1));
    ADZE_CHECK(check_whole("previous", &a->previous, 2, 1));
    ADZE_CHECK(check_whole("previous_count", &a->previous_count, 1, 0));
    ADZE_CHECK(check_batch("seed", &a->seed, batch, 1));
    ADZE_CHECK(check_batch("counter", &a->counter, batch, 1));
    ADZE_CHECK(check_batch("previous", &a->previous, batch, 0));
    ADZE_CHECK(check_batch("previous_count", &a->previous_count, batch, 0));
    ADZE_REQUIRE(a->temperature >= 0, ADZE_BAD_ARG, "sample: temperature is %g, it must not be negative",
                 (double)a->temperature);
    ADZE_REQUIRE(a->temperature == 0 || a->seed.dtype, ADZE_BAD_ARG,
                 "sample: seed is absent, temperature %g needs it", (double)a->temperature);
    ADZE_REQUIRE(a->penalty >= 0, ADZE_BAD_ARG, "sample: penalty is %g, it must not be negative", (double)a->penalty);
    ADZE_REQUIRE((a->penalty != 0) == (a->previous.dtype != ADZE_NONE), ADZE_BAD_ARG,
                 "sample: penalty is %g and previous is %s, either needs the other", (double)a->penalty,
                 a->previous.dtype ? "given" : "absent");
    ADZE_REQUIRE(a->previous.dtype || !a->previous_count.dtype, ADZE_BAD_ARG,
                 "sample: previous_count is given without previous");
    ADZE_CHECK(check_share("top_p", a->top_p));
    ADZE_CHECK(check_share("min_p", a->min_p));
    ADZE_REQUIRE(a->top_k >= 0, ADZE_BAD_ARG, "sample: top_k is %d, it must not be negative", a->top_k);
    ADZE_REQUIRE(a->out_dtype == 0 || a->out_dtype == ADZE_I32 || a->out_dtype == ADZE_I64, ADZE_BAD_DTYPE,
                 "sample: out_dtype is %s, it must be i32 or i64", adze_dtype_name(a->out_dtype));
    return ADZE_OK;
}

static void outputs(void *args)
{
    adze_sample_args *a = args;
    adze_like(&a->out, &a->logits);
    a->out.rank = 1;
    a->out.dtype = a->out_dtype ? a->out_dtype : ADZE_I32;
    adze_like(&a->logprob, &a->out);
    a->logprob.dtype = ADZE_F32;
}

/* ---- The definition ---- */

/* What a correct float exp() may be off, and a sum of such terms, which is exact to 2^-40. */
#define EXP_ERROR 0x1p-22
#define SUM_ERROR 0x1p-40

typedef struct scores {
    int64_t n;
    float *x, *y;   /* the logits as floats, and what the choice is made of */
    float *sorted;  /* y, the largest first */
    double *weight; /* exp(y - max), of the tokens */
    float max;
    float lowest;        /* the smallest y that is kept */
    int64_t least, most; /* how many distinct values of y, the largest first, are certainly kept, and possibly */
} scores;

static int larger_first(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

static double weight_of(float y, float max)
{
    const float d = y == max ? 0 : (float)((double)y - (double)max);
    return d < ADZE_SAMPLE_LOWEST ? 0 : exp((double)d);
}

static void free_scores(scores *s)
{
    free(s->x);
    free(s->y);
    free(s->sorted);
    free(s->weight);
}

/* Where sums of floats decide: how far part - share * whole, of which part is a part, lies from 0 as a number of its
   bounds. Terms on both sides of the comparison have the same error. */
static double lies(double part, double whole, double share)
{
    const double rest = fmax(whole - part, 0);
    const double bound = EXP_ERROR * ((1 - share) * part + share * rest) + SUM_ERROR * whole;
    return ((1 - share) * part - share * rest) / bound;
}

/* Which distinct values are kept: by `exact` in number, `least` certainly and `most` possibly. */
static void filter(const adze_sample_args *a, scores *s)
{
    const int64_t top_k = a->top_k && a->top_k < s->n ? a->top_k : s->n;
    int64_t kept = top_k;
    while (kept < s->n && s->sorted[kept] == s->sorted[top_k - 1])
        kept++;
    double whole = 0, ahead = 0;
    for (int64_t i = 0; i < kept; i++)
        whole += weight_of(s->sorted[i], s->max);
    s->least = s->most = 0;
    s->lowest = s->max;
    int exact = 1, certain = 1, possible = 1;
    for (int64_t i = 0, next; i < kept && possible; i = next) {
        const double w = weight_of(s->sorted[i], s->max);
        for (next = i; next < kept && s->sorted[next] == s->sorted[i];)
            next++;
        if (i > 0 && a->top_p > 0 && a->top_p < 1) {
            const double at = lies(ahead, whole, a->top_p);
            exact = exact && ahead < a->top_p * whole;
            certain = certain && at < -1;
            possible = possible && at <= 1;
        }
        if (i > 0 && a->min_p > 0) {
            exact = exact && w >= a->min_p;
            certain = certain && w * (1 - EXP_ERROR) >= a->min_p;
            possible = possible && w * (1 + EXP_ERROR) >= a->min_p;
        }
        s->least += certain;
        s->most += possible;
        s->lowest = exact ? s->sorted[i] : s->lowest;
        ahead += (double)(next - i) * w;
    }
}

static int make_scores(const adze_sample_args *a, int64_t row, scores *s)
{
    memset(s, 0, sizeof *s);
    s->n = a->logits.shape[1];
    const size_t n = (size_t)s->n;
    s->x = calloc(n, sizeof *s->x);
    s->y = calloc(n, sizeof *s->y);
    s->sorted = calloc(n, sizeof *s->sorted);
    s->weight = calloc(n, sizeof *s->weight);
    if (!s->x || !s->y || !s->sorted || !s->weight)
        return 0;
    for (int64_t i = 0; i < s->n; i++) {
        const float x = (float)adze_get(&a->logits, row * a->logits.stride[0] + i);
        s->x[i] = isnan(x) ? -INFINITY : x;
    }
    memcpy(s->y, s->x, n * sizeof *s->y);
    const int64_t count = adze_sample_previous(a, row), most = a->previous.dtype ? a->previous.shape[1] : 0;
    for (int64_t j = 0; j < count && j < most; j++) {
        const int64_t id = adze_sample_whole(&a->previous, row * a->previous.stride[0] + j);
        if (id >= 0 && id < s->n)
            s->y[id] = s->x[id] < 0 ? s->x[id] * a->penalty : s->x[id] / a->penalty;
    }
    s->max = -INFINITY;
    for (int64_t i = 0; i < s->n; i++) {
        if (a->temperature > 0)
            s->y[i] /= a->temperature;
        s->max = s->y[i] > s->max ? s->y[i] : s->max;
    }
    for (int64_t i = 0; i < s->n; i++)
        s->weight[i] = weight_of(s->y[i], s->max);
    if (a->temperature == 0)
        return 1;
    memcpy(s->sorted, s->y, n * sizeof *s->sorted);
    qsort(s->sorted, n, sizeof *s->sorted, larger_first);
    filter(a, s);
    return 1;
}

/* The sum of the weights that a filter keeps. */
static double kept_weight(const scores *s, float lowest)
{
    double whole = 0;
    for (int64_t i = 0; i < s->n; i++)
        whole += s->y[i] >= lowest ? s->weight[i] : 0;
    return whole;
}

static int64_t choose(const adze_sample_args *a, int64_t row, const scores *s)
{
    int64_t last = 0;
    if (a->temperature == 0) {
        while (s->y[last] != s->max)
            last++;
        return last;
    }
    const double target = adze_sample_uniform(a, row) * kept_weight(s, s->lowest);
    double sum = 0;
    for (int64_t i = 0; i < s->n; i++) {
        if (s->y[i] < s->lowest || s->weight[i] == 0)
            continue;
        sum += s->weight[i];
        last = i;
        if (sum > target)
            break;
    }
    return last;
}

/* Whether a token is the choice for some filter that float error leaves open, and u within the error of its sums. */
static int also_token(const void *args, int64_t row, double got)
{
    const adze_sample_args *a = args;
    const int64_t id = (int64_t)got;
    scores s;
    if (a->temperature == 0 || !(got >= 0 && got < (double)a->logits.shape[1]) || !make_scores(a, row, &s))
        return 0;
    const double u = adze_sample_uniform(a, row);
    int open = 0;
    int64_t values = 0;
    for (int64_t i = 0; i < s.n && values <= s.most && !open; i++) {
        if (i > 0 && s.sorted[i] == s.sorted[i - 1])
            continue;
        const float lowest = s.sorted[i];
        if (++values < s.least || values > s.most || s.y[id] < lowest || s.weight[id] == 0)
            continue;
        const double whole = kept_weight(&s, lowest);
        double before = 0;
        for (int64_t j = 0; j < id; j++)
            before += s.y[j] >= lowest ? s.weight[j] : 0;
        open = lies(before, whole, u) <= 1 && lies(before + s.weight[id], whole, u) >= -1;
    }
    free_scores(&s);
    return open;
}

static adze_value logprob_of(const scores *s, int64_t id)
{
    float max = -INFINITY;
    double sum = 0, error = 0;
    for (int64_t i = 0; i < s->n; i++)
        max = s->x[i] > max ? s->x[i] : max;
    for (int64_t i = 0; i < s->n; i++) {
        const double d = s->x[i] == max ? 0 : (double)s->x[i] - (double)max, w = exp(d);
        sum += w;
        error += w > 0 ? w * (EXP_ERROR + ADZE_U * fabs(d)) + 0x1p-125 : 0;
    }
    const double d = s->x[id] == max ? 0 : (double)s->x[id] - (double)max;
    return (adze_value){d - log(sum), (error + SUM_ERROR * sum) / (sum - error) + SUM_ERROR * fabs(d)};
}

/* The log-probability of another choice. */
static int also_logprob(const void *args, int64_t row, double got)
{
    const adze_sample_args *a = args;
    const int64_t id = adze_sample_whole(&a->out, row * a->out.stride[0]);
    scores s;
    if (id < 0 || id >= a->logits.shape[1] || !make_scores(a, row, &s))
        return 0;
    const adze_value due = logprob_of(&s, id);
    free_scores(&s);
    return fabs(got - due.v) <= due.e + 0.5 * adze_dtype_ulp(ADZE_F32, fabs(due.v) + due.e);
}

static void reference(const void *args, adze_value *const *out)
{
    const adze_sample_args *a = args;
    for (int64_t row = 0; row < a->logits.shape[0]; row++) {
        scores s;
        const int made = make_scores(a, row, &s);
        const int64_t id = made ? choose(a, row, &s) : -1;
        out[0][row] = adze_exact((double)id);
        if (out[1] && made)
            out[1][row] = logprob_of(&s, id);
        free_scores(&s);
    }
}

ADZE_KERNELS(sample)

const adze_op adze_op_sample = {"sample",
                                sizeof(adze_sample_args),
                                ADZE_FIRST_SIZE(sample, out_dtype),
                                fields,
                                validate,
                                outputs,
                                reference,
                                kernels,
                                NULL,
                                NULL};

adze_status adze_sample(adze_stream stream, const adze_sample_args *args)
{
    return adze_dispatch(&adze_op_sample, stream, args);
}
