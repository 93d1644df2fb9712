/* dispatch.c - copy and check the arguments, take the first kernel that accepts, run it; errors; the trace
 * line. */
#include "kernel.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ARGS_MAX = 4096, SEARCH_MAX = 10000 };

#define X(name) &adze_op_##name,
const adze_op *const adze_ops[] = {ADZE_OPS(X) NULL};
#undef X

static _Thread_local char last_error[256];

const char *adze_last_error(void)
{
    return last_error;
}

adze_status adze_fail(adze_status status, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    vsnprintf(last_error, sizeof last_error, format, ap);
    va_end(ap);
    return status;
}

uint32_t adze_version(void)
{
    return ADZE_VERSION;
}

const adze_op *adze_find_op(const char *name, size_t length)
{
    for (const adze_op *const *op = adze_ops; *op; op++)
        if (strlen((*op)->name) == length && memcmp((*op)->name, name, length) == 0)
            return *op;
    return NULL;
}

/* ADZE_TRACE and ADZE_KERNEL, read once. */
static struct {
    _Atomic int read;
    int trace;          /* 1: a line per call; 2: also why earlier kernels were passed over */
    const char *kernel; /* "op:row" */
} settings;
static pthread_once_t settings_once = PTHREAD_ONCE_INIT;

static void read_settings(void)
{
    const char *trace = getenv("ADZE_TRACE");
    settings.trace = !trace || !*trace || strcmp(trace, "0") == 0 ? 0 : 1 + (strcmp(trace, "dispatch") == 0);
    settings.kernel = getenv("ADZE_KERNEL");
    settings.read = 1;
}

static int is_tensor(const adze_field *f)
{
    return f->kind <= ADZE_OUT_OPTIONAL;
}
static int is_out(const adze_field *f)
{
    return f->kind >= ADZE_OUT && f->kind <= ADZE_OUT_OPTIONAL;
}
static const adze_tensor *tensor_at(const adze_field *f, const char *args)
{
    return (const void *)(args + f->offset);
}

/* The span of a view in elements, low and high included; 0 when it leaves the address space. Sizes are above
 * 0. */
static inline int span(const adze_tensor *t, int64_t *low, int64_t *high)
{
    const int64_t limit = INT64_MAX / 16;
    *low = *high = 0;
    for (int d = 0; d < t->rank; d++) {
        int64_t reach;
        if (__builtin_mul_overflow(t->shape[d] - 1, t->stride[d], &reach) || reach <= -limit || reach >= limit)
            return 0;
        *low += reach < 0 ? reach : 0;
        *high += reach > 0 ? reach : 0;
    }
    return *low > -limit && *high < limit;
}

/* What must hold for one tensor of any op. */
adze_status adze_check_tensor(const adze_op *op, const adze_field *f, const adze_tensor *t)
{
    if (t->dtype == ADZE_NONE) {
        ADZE_REQUIRE(f->kind != ADZE_IN, ADZE_BAD_ARG, "%s: %s is absent", op->name, f->name);
        return ADZE_OK;
    }
    const size_t size = adze_dtype_size(t->dtype);
    ADZE_REQUIRE(size > 0, ADZE_BAD_DTYPE, "%s: %s has the unknown dtype %d", op->name, f->name, t->dtype);
    ADZE_REQUIRE(t->rank >= 0 && t->rank <= 5, ADZE_BAD_ARG, "%s: %s has rank %d, at most 5 is possible", op->name,
                 f->name, t->rank);
    int64_t count = 1;
    for (int d = 0; d < t->rank; d++) {
        ADZE_REQUIRE(t->shape[d] >= 0, ADZE_BAD_ARG, "%s: %s has size %lld in dimension %d", op->name, f->name,
                     (long long)t->shape[d], d);
        ADZE_REQUIRE(!__builtin_mul_overflow(count, t->shape[d], &count) && count < (int64_t)1 << 48, ADZE_BAD_ARG,
                     "%s: %s has more than 2^48 elements", op->name, f->name);
    }
    if (count == 0)
        return ADZE_OK;
    int64_t low, high;
    ADZE_REQUIRE(span(t, &low, &high), ADZE_BAD_ARG, "%s: the strides of %s leave the address space", op->name,
                 f->name);
    ADZE_REQUIRE(t->data, ADZE_BAD_ARG, "%s: %s has no data", op->name, f->name);
    ADZE_REQUIRE(((uintptr_t)t->data & (size - 1)) == 0, ADZE_BAD_ARG,
                 "%s: %s starts at %p, not a multiple of %zu bytes", op->name, f->name, t->data, size);
    return ADZE_OK;
}

/* Dimensions of two views, as steps in bytes over ranges that include zero. */
typedef struct steps {
    int n;
    int64_t step[10], low[10], high[10];
    int64_t width; /* a distance of less than this is an overlap */
    int budget;    /* of the search */
} steps;

static void steps_add(steps *s, int64_t step, int64_t low, int64_t high)
{
    if (step < 0) {
        const int64_t swap = -low;
        step = -step, low = -high, high = swap;
    }
    int at = 0;
    while (at < s->n && s->step[at] > step)
        at++;
    if (at < s->n && s->step[at] == step) {
        s->low[at] += low, s->high[at] += high;
        return;
    }
    for (int i = s->n++; i > at; i--)
        s->step[i] = s->step[i - 1], s->low[i] = s->low[i - 1], s->high[i] = s->high[i - 1];
    s->step[at] = step, s->low[at] = low, s->high[at] = high;
}

/* Whether some choice of indices brings `distance` within the width. Largest step first, so few branches
 * survive. */
static int steps_meet(steps *s, int at, int64_t distance)
{
    if (--s->budget < 0)
        return 0;
    if (at == s->n)
        return distance < s->width && distance > -s->width;
    int64_t low = 0, high = 0;
    for (int i = at + 1; i < s->n; i++)
        low += s->step[i] * s->low[i], high += s->step[i] * s->high[i];
    for (int64_t i = s->low[at]; i <= s->high[at]; i++) {
        const int64_t rest = distance + i * s->step[at];
        if (rest + high <= -s->width) { /* too far below: jump to the first index that may reach */
            i += (-s->width - rest - high) / s->step[at];
            continue;
        }
        if (rest + low >= s->width)
            return 0;
        if (steps_meet(s, at + 1, rest))
            return 1;
    }
    return 0;
}

/* Whether two views share memory. Neither is empty. A search beyond its budget counts as no. */
static int overlap(const adze_tensor *a, const adze_tensor *b)
{
    const int64_t size[2] = {(int64_t)adze_dtype_size(a->dtype), (int64_t)adze_dtype_size(b->dtype)};
    int64_t a_low, a_high, b_low, b_high;
    span(a, &a_low, &a_high);
    span(b, &b_low, &b_high);
    const char *const a_data = a->data, *const b_data = b->data;
    if ((uintptr_t)(a_data + (a_high + 1) * size[0]) <= (uintptr_t)(b_data + b_low * size[1]) ||
        (uintptr_t)(b_data + (b_high + 1) * size[1]) <= (uintptr_t)(a_data + a_low * size[0]))
        return 0;
    steps s = {.width = size[0] > size[1] ? size[0] : size[1], .budget = SEARCH_MAX};
    for (int d = 0; d < a->rank; d++)
        if (a->shape[d] > 1)
            steps_add(&s, a->stride[d] * size[0], 0, a->shape[d] - 1);
    for (int d = 0; d < b->rank; d++)
        if (b->shape[d] > 1)
            steps_add(&s, -b->stride[d] * size[1], 0, b->shape[d] - 1);
    return steps_meet(&s, 0, (int64_t)((intptr_t)a_data - (intptr_t)b_data));
}

static int empty(const adze_tensor *t)
{
    for (int d = 0; d < t->rank; d++)
        if (t->shape[d] == 0)
            return 1;
    return t->dtype == ADZE_NONE;
}

static int same_view(const adze_tensor *a, const adze_tensor *b)
{
    int same = a->data == b->data && a->dtype == b->dtype && a->rank == b->rank;
    for (int d = 0; same && d < a->rank; d++)
        same = a->shape[d] == b->shape[d] && (a->stride[d] == b->stride[d] || a->shape[d] == 1);
    return same;
}

/* Whether two elements of one view share memory: a stride must reach past all smaller ones. */
static int folds(const adze_tensor *t)
{
    int64_t reach = 1;
    unsigned used = 0;
    for (int round = 0; round < t->rank; round++) {
        int at = 0;
        while (used >> at & 1)
            at++;
        for (int d = at + 1; d < t->rank; d++)
            if (!(used >> d & 1) && llabs(t->stride[d]) < llabs(t->stride[at]))
                at = d;
        used |= 1u << at;
        if (t->shape[at] == 1)
            continue;
        if (llabs(t->stride[at]) < reach)
            return 1;
        reach = llabs(t->stride[at]) * t->shape[at];
    }
    return 0;
}

/* Each output must have the shape and dtype that the inputs give it, and memory of its own or an input's very
 * view. */
static adze_status check_outputs(const adze_op *op, const char *args)
{
    _Alignas(16) char want[ARGS_MAX];
    memcpy(want, args, op->args_size);
    for (const adze_field *f = op->fields; f->name; f++)
        if (is_out(f))
            ((adze_tensor *)(void *)(want + f->offset))->dtype = ADZE_NONE;
    op->outputs(want);
    for (const adze_field *f = op->fields; f->name; f++) {
        if (!is_out(f))
            continue;
        const adze_tensor *got = tensor_at(f, args), *due = tensor_at(f, want);
        if (f->kind == ADZE_OUT_OPTIONAL && got->dtype == ADZE_NONE)
            continue;
        ADZE_REQUIRE(due->dtype != ADZE_NONE || got->dtype == ADZE_NONE, ADZE_BAD_ARG,
                     "%s: %s must be absent, the other arguments give it no value", op->name, f->name);
        ADZE_REQUIRE(got->dtype != ADZE_NONE || due->dtype == ADZE_NONE, ADZE_BAD_ARG, "%s: %s is absent", op->name,
                     f->name);
        ADZE_REQUIRE(got->dtype == due->dtype, ADZE_BAD_DTYPE, "%s: %s is %s, it must be %s", op->name, f->name,
                     adze_dtype_name(got->dtype), adze_dtype_name(due->dtype));
        ADZE_REQUIRE(got->dtype == ADZE_NONE || got->rank == due->rank, ADZE_BAD_ARG,
                     "%s: %s has rank %d, it must have %d", op->name, f->name, got->rank, due->rank);
        for (int d = 0; d < due->rank && got->dtype; d++)
            ADZE_REQUIRE(got->shape[d] == due->shape[d], ADZE_BAD_ARG,
                         "%s: %s has %lld in dimension %d, it must have %lld", op->name, f->name,
                         (long long)got->shape[d], d, (long long)due->shape[d]);
        ADZE_CHECK(adze_check_rows(op->name, f->name, got));
        if (empty(got))
            continue;
        ADZE_REQUIRE(!folds(got), ADZE_BAD_ARG, "%s: elements of %s share memory", op->name, f->name);
        for (const adze_field *g = op->fields; g->name; g++) {
            if (!is_tensor(g) || g == f)
                continue;
            const adze_tensor *other = tensor_at(g, args);
            ADZE_REQUIRE(empty(other) || (!is_out(g) && same_view(got, other)) || !overlap(got, other), ADZE_BAD_ARG,
                         "%s: %s overlaps %s and is not the same view", op->name, f->name, g->name);
        }
    }
    return ADZE_OK;
}

/* A tensor as `adze run` reads it: dtype[size:stride,...], then where it lies when that is not a fresh
 * 64-byte line. */
static void trace_tensor(const adze_op *op, const char *args, const adze_field *f)
{
    const adze_tensor *t = tensor_at(f, args);
    const int64_t size = (int64_t)adze_dtype_size(t->dtype);
    fprintf(stderr, " %s=%s[", f->name, adze_dtype_name(t->dtype));
    for (int d = 0; d < t->rank; d++)
        fprintf(stderr, "%s%lld:%lld", d ? "," : "", (long long)t->shape[d], (long long)t->stride[d]);
    fprintf(stderr, "]");
    if (empty(t))
        return;
    int64_t low, high;
    for (const adze_field *g = op->fields; g < f; g++) {
        const adze_tensor *base = tensor_at(g, args);
        if (!is_tensor(g) || empty(base) || base->dtype != t->dtype || !span(base, &low, &high))
            continue;
        const intptr_t away = (intptr_t)t->data - (intptr_t)base->data;
        if (away >= low * size && away <= high * size) {
            fprintf(stderr, "@%s", g->name);
            if (away)
                fprintf(stderr, "%+lld", (long long)(away / size));
            return;
        }
    }
    const int64_t offset = (int64_t)((uintptr_t)t->data % 64) / size;
    if (offset)
        fprintf(stderr, "@+%lld", (long long)offset);
}

__attribute__((cold, noinline)) static void trace(const adze_op *op, const char *args, const char *kernel)
{
    flockfile(stderr);
    fprintf(stderr, "%s", op->name);
    for (const adze_field *f = op->fields; f->name; f++) {
        const char *p = args + f->offset;
        if (is_tensor(f)) {
            if (tensor_at(f, args)->dtype != ADZE_NONE)
                trace_tensor(op, args, f);
        } else if (f->kind == ADZE_FLOAT) {
            if (*(const float *)(const void *)p != 0)
                fprintf(stderr, " %s=%.9g", f->name, (double)*(const float *)(const void *)p);
        } else if (*(const int32_t *)(const void *)p != 0) {
            const int32_t value = *(const int32_t *)(const void *)p;
            const adze_word *w = f->words;
            while (w && w->name && w->value != value)
                w++;
            if (w && w->name)
                fprintf(stderr, " %s=%s", f->name, w->name);
            else
                fprintf(stderr, " %s=%d", f->name, value);
        }
    }
    if (((const adze_call *)(const void *)args)->flags & ADZE_CONST_WEIGHTS)
        fprintf(stderr, " flags=const_weights");
    fprintf(stderr, " -> %s\n", kernel);
    funlockfile(stderr);
}

/* Copies the caller's struct, of whatever version, and checks all that can be checked before a kernel is
 * chosen. */
static adze_status take_args(const adze_op *op, const void *caller, char *args)
{
    const size_t size = caller ? ((const adze_call *)caller)->size : 0;
    ADZE_REQUIRE(size >= sizeof(adze_call) && size <= ARGS_MAX, ADZE_BAD_ARG,
                 "%s: args.call.size is %zu; write .call = ADZE_CALL(%s)", op->name, size, op->name);
    memset(args, 0, op->args_size);
    memcpy(args, caller, size < op->args_size ? size : op->args_size);
    size_t known = sizeof(adze_call);
    for (const adze_field *f = op->fields; f->name; f++) {
        const size_t end = f->offset + (is_tensor(f) ? sizeof(adze_tensor) : 4);
        known = end > known ? end : known;
    }
    for (size_t i = known; i < size; i++)
        ADZE_REQUIRE(!((const char *)caller)[i], ADZE_BAD_ARG,
                     "%s: byte %zu of args is set; this library, version %u, knows %zu", op->name, i,
                     (unsigned)ADZE_VERSION, known);
    const adze_call *call = (const void *)args;
    ADZE_REQUIRE((call->flags & ~ADZE_CONST_WEIGHTS) == 0, ADZE_BAD_ARG, "%s: flags are %#x, known are %#x", op->name,
                 call->flags, ADZE_CONST_WEIGHTS);
    for (const adze_field *f = op->fields; f->name; f++)
        if (is_tensor(f))
            ADZE_CHECK(adze_check_tensor(op, f, tensor_at(f, args)));
    ADZE_CHECK(op->validate(args));
    return check_outputs(op, args);
}

__attribute__((noinline)) static adze_status check_scratch(const adze_op *op, adze_stream s, const char *args)
{
    const adze_call *call = (const void *)args;
    const size_t need = op->scratch(s, args);
    ADZE_REQUIRE(need == 0 || (call->scratch && call->scratch_size >= need), ADZE_SCRATCH,
                 "%s: scratch has %zu bytes, %zu are needed", op->name, call->scratch ? call->scratch_size : 0, need);
    ADZE_REQUIRE(need == 0 || (uintptr_t)call->scratch % 16 == 0, ADZE_BAD_ARG,
                 "%s: scratch starts at %p, not a multiple of 16 bytes", op->name, call->scratch);
    return ADZE_OK;
}

/* Whether ADZE_KERNEL names another row of this op. */
__attribute__((cold, noinline)) static int forced_away(const adze_op *op, const adze_kernel *k)
{
    const size_t n = strlen(op->name);
    return strncmp(settings.kernel, op->name, n) == 0 && settings.kernel[n] == ':' &&
           strcmp(settings.kernel + n + 1, k->name) != 0;
}

__attribute__((cold, noinline)) static void trace_passed_over(const adze_op *op, const adze_kernel *k,
                                                              const char *why)
{
    fprintf(stderr, "%s: %s passed over: %s\n", op->name, k->name, why);
}

/* The first kernel that takes the call runs it. The args have been checked. */
static adze_status run(const adze_op *op, const adze_kernel *only, adze_stream s, const void *args)
{
    if (!settings.read)
        pthread_once(&settings_once, read_settings);
    if (s.device != ADZE_CPU)
        ADZE_CHECK(adze_check_device(op->name, s.device));
    if (op->scratch)
        ADZE_CHECK(check_scratch(op, s, args));
    for (const adze_kernel *k = only ? only : op->kernels; k->run; k++) {
        const char *why = settings.kernel && forced_away(op, k) ? "ADZE_KERNEL names another"
                          : !adze_can_run(k, s)                 ? "not for this device"
                          : k->accepts && !k->accepts(s, args)  ? "does not take this call"
                                                                : NULL;
        if (!why) {
            if (settings.trace)
                trace(op, args, k->name);
            return k->on_cuda ? adze_cuda_call(k->run, s, args) : k->run(s, args);
        }
        if (settings.trace > 1)
            trace_passed_over(op, k, why);
        if (only)
            break;
    }
    return adze_fail(ADZE_NO_KERNEL, "%s: no kernel for this device, dtype and shape", op->name);
}

adze_status adze_dispatch_to(const adze_op *op, const adze_kernel *only, adze_stream s, const void *caller)
{
    _Alignas(16) char args[ARGS_MAX];
    ADZE_CHECK(take_args(op, caller, args));
    return run(op, only, s, args);
}

adze_status adze_dispatch_made(const adze_op *op, adze_stream s, const void *args)
{
    return run(op, NULL, s, args);
}

adze_status adze_dispatch(const adze_op *op, adze_stream s, const void *caller)
{
    return adze_dispatch_to(op, NULL, s, caller);
}

adze_status adze_dispatch_outputs(const adze_op *op, void *args)
{
    ADZE_CHECK(op->validate(args));
    op->outputs(args);
    return ADZE_OK;
}

adze_status adze_dispatch_scratch(const adze_op *op, adze_stream s, const void *caller, size_t *bytes)
{
    _Alignas(16) char args[ARGS_MAX];
    ADZE_REQUIRE(bytes, ADZE_BAD_ARG, "%s: bytes is NULL", op->name);
    ADZE_CHECK(take_args(op, caller, args));
    *bytes = op->scratch ? op->scratch(s, args) : 0;
    return ADZE_OK;
}
