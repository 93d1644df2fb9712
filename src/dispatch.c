/* dispatch.c - copies and checks the arguments, runs the first kernel that accepts them; errors; traces. */
#include "kernel.h"

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ARGS_MAX = 4096, FIELDS_MAX = 40 };

static _Thread_local char last_error[512];

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

/* ADZE_TRACE, ADZE_KERNEL and ADZE_THREADS, read once. */
static struct {
    _Atomic int read;
    int trace;         /* 1: a line per call; 2: also why earlier kernels were passed over */
    const adze_op *op; /* of ADZE_KERNEL, "op:kernel" or "op:kernel/variant"; NULL without it */
    const adze_kernel *forced;
    int variant;     /* counted from 0; -1: that of the kernel's choice */
    char wrong[480]; /* the error of every call, when a setting names what does not exist */
} settings;
static pthread_once_t settings_once = PTHREAD_ONCE_INIT;

static void read_kernel(const char *text)
{
    const size_t n = strcspn(text, ":");
    const adze_op *op = adze_find_op(text, n);
    int at = snprintf(settings.wrong, sizeof settings.wrong, "ADZE_KERNEL is '%.40s'; ", text);
#define SAY(...)                                                                                                     \
    at += at < (int)sizeof settings.wrong                                                                            \
              ? snprintf(settings.wrong + at, sizeof settings.wrong - (size_t)at, __VA_ARGS__)                       \
              : 0
    if (!op || text[n] != ':') {
        SAY("it must be op:kernel, with an op of");
        for (const adze_op *const *o = adze_ops; *o; o++)
            SAY(" %s", (*o)->name);
        return;
    }
    settings.op = op;
    const char *const row = text + n + 1;
    const size_t length = strcspn(row, "/");
    const int variant = row[length] == '/';
    settings.variant = -1;
    SAY("%s has", op->name);
    for (const adze_kernel *k = op->kernels; k->run; k++) {
        SAY(" %s", k->name);
        if (strlen(k->name) == length && memcmp(k->name, row, length) == 0)
            settings.forced = k;
    }
    if (settings.forced && variant) {
        settings.variant = adze_variant_find(settings.forced, row + length + 1);
        SAY("; %s has %d variants, which `adze info %s` lists", settings.forced->name,
            adze_variant_count(settings.forced), op->name);
    }
#undef SAY
    if (settings.forced && (!variant || settings.variant >= 0))
        settings.wrong[0] = '\0';
}

static void read_settings(void)
{
    const char *trace = getenv("ADZE_TRACE"), *kernel = getenv("ADZE_KERNEL");
    settings.trace = !trace || !*trace || strcmp(trace, "0") == 0 ? 0 : 1 + (strcmp(trace, "dispatch") == 0);
    if (kernel && *kernel)
        read_kernel(kernel);
    if (adze_threads_requested() < 0)
        snprintf(settings.wrong, sizeof settings.wrong,
                 "ADZE_THREADS is '%.40s', it must be 1 to %d, or 0 for the default", getenv("ADZE_THREADS"),
                 ADZE_THREADS_MAX);
    settings.read = 1;
}

static const adze_tensor *tensor_at(const adze_field *f, const char *args)
{
    return (const void *)(args + f->offset);
}

/* The span of a view in elements, low and high included; 0 when it leaves the address space. Sizes are positive. */
static inline int span(const adze_tensor *t, int64_t *low, int64_t *high)
{
    const int64_t limit = INT64_MAX / 64;
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

/* The bytes from an element of a view to another, whatever lies between; none for an empty view. */
typedef struct extent {
    uintptr_t from, to;
} extent;

/* What must hold for one tensor of any op, and where it lies. */
static inline adze_status check_tensor(const adze_op *op, const adze_field *f, const adze_tensor *t, extent *where)
{
    *where = (extent){0, 0};
    if (t->dtype == ADZE_NONE) {
        ADZE_REQUIRE(f->kind != ADZE_IN && f->kind != ADZE_INOUT, ADZE_BAD_ARG, "%s: %s is absent, it is required",
                     op->name, f->name);
        return ADZE_OK;
    }
    const size_t size = adze_dtype_size(t->dtype);
    ADZE_REQUIRE(size > 0, ADZE_BAD_DTYPE, "%s: %s has dtype %d, which no op takes", op->name, f->name, t->dtype);
    ADZE_REQUIRE(t->rank >= 0 && t->rank <= 5, ADZE_BAD_ARG, "%s: %s has rank %d, at most 5 is possible", op->name,
                 f->name, t->rank);
    int64_t count = 1;
    for (int d = 0; d < t->rank; d++) {
        ADZE_REQUIRE(t->shape[d] >= 0, ADZE_BAD_ARG, "%s: %s has size %lld in dimension %d, it must not be negative",
                     op->name, f->name, (long long)t->shape[d], d);
        ADZE_REQUIRE(!__builtin_mul_overflow(count, t->shape[d], &count) && count < (int64_t)1 << 48, ADZE_BAD_ARG,
                     "%s: %s has more than 2^48 elements", op->name, f->name);
    }
    if (count == 0)
        return ADZE_OK;
    int64_t low, high;
    ADZE_REQUIRE(span(t, &low, &high), ADZE_BAD_ARG, "%s: the strides of %s leave the address space", op->name,
                 f->name);
    ADZE_REQUIRE(t->data, ADZE_BAD_ARG, "%s: the data of %s is NULL, but %s is not empty", op->name, f->name,
                 f->name);
    ADZE_REQUIRE(((uintptr_t)t->data & (size - 1)) == 0, ADZE_BAD_ARG,
                 "%s: %s starts at %p, it must be a multiple of %zu bytes", op->name, f->name, t->data, size);
    where->from = (uintptr_t)t->data + (uintptr_t)low * size;
    where->to = (uintptr_t)t->data + (uintptr_t)(high + 1) * size;
    return ADZE_OK;
}

adze_status adze_check_tensor(const adze_op *op, const adze_field *f, const adze_tensor *t)
{
    extent where;
    return check_tensor(op, f, t, &where);
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
    int left = 0;
    for (int d = 0; d < t->rank; d++) /* of one index the stride may be any number */
        if (t->shape[d] == 1)
            used |= 1u << d;
        else
            left++;
    for (; left > 0; left--) {
        int at = 0;
        while (used >> at & 1)
            at++;
        for (int d = at + 1; d < t->rank; d++)
            if (!(used >> d & 1) && llabs(t->stride[d]) < llabs(t->stride[at]))
                at = d;
        used |= 1u << at;
        if (llabs(t->stride[at]) < reach)
            return 1;
        reach = llabs(t->stride[at]) * t->shape[at];
    }
    return 0;
}

/* The inputs that an output may be, as text for an error. */
static const char *may_be_text(const adze_op *op, const adze_field *f, char *text, size_t size)
{
    int n = snprintf(text, size, f->may_be[0] ? "it may only be the same view as" : "it needs memory of its own");
    for (const adze_field *g = op->fields; g->name; g++)
        for (int i = 0; i < ADZE_MAY_BE && f->may_be[i]; i++)
            if (f->may_be[i] == g->offset && n < (int)size)
                n += snprintf(text + n, size - (size_t)n, "%s %s", i ? " or" : "", g->name);
    return text;
}

/* Two tensors whose extents meet, of which f is an output: it is a view that f may be, or they share no element. */
__attribute__((noinline)) static adze_status check_shared(const adze_op *op, const char *args, const adze_field *f,
                                                          const adze_field *g)
{
    const adze_tensor *out = tensor_at(f, args), *other = tensor_at(g, args);
    const int same = same_view(out, other);
    int may = 0;
    for (int i = 0; i < ADZE_MAY_BE; i++)
        may |= f->may_be[i] == g->offset;
    if ((may && same) || !adze_overlap(out, other))
        return ADZE_OK;
    char text[96];
    return adze_fail(ADZE_BAD_ARG, "%s: %s overlaps %s%s", op->name, f->name, g->name,
                     may ? " and is not the same view"
                         : (snprintf(text, sizeof text, "; "), may_be_text(op, f, text + 2, sizeof text - 2), text));
}

/* What is written has memory of its own, or the very view of an input that it may be. */
static adze_status check_written(const adze_op *op, const char *args, const adze_field *f, const extent *where)
{
    const adze_tensor *t = tensor_at(f, args);
    ADZE_CHECK(adze_check_rows(op->name, f->name, t));
    if (empty(t))
        return ADZE_OK;
    ADZE_REQUIRE(!folds(t), ADZE_BAD_ARG, "%s: elements of %s share memory, each must have its own", op->name,
                 f->name);
    const extent own = where[f - op->fields];
    for (const adze_field *g = op->fields; g->name; g++) {
        const extent other = where[g - op->fields];
        if (own.from < other.to && other.from < own.to && g != f)
            ADZE_CHECK(check_shared(op, args, f, g));
    }
    return ADZE_OK;
}

/* Each output must have the shape and dtype that the inputs give it. */
static adze_status check_outputs(const adze_op *op, const char *args, const extent *where)
{
    _Alignas(16) char want[ARGS_MAX];
    memcpy(want, args, op->args_size);
    for (const adze_field *f = op->fields; f->name; f++)
        if (adze_is_made(f))
            ((adze_tensor *)(void *)(want + f->offset))->dtype = ADZE_NONE;
    op->outputs(want);
    for (const adze_field *f = op->fields; f->name; f++) {
        if (adze_is_inout(f))
            ADZE_CHECK(check_written(op, args, f, where));
        if (!adze_is_made(f))
            continue;
        const adze_tensor *got = tensor_at(f, args), *due = tensor_at(f, want);
        if (f->kind == ADZE_OUT_OPTIONAL && got->dtype == ADZE_NONE)
            continue;
        ADZE_REQUIRE(due->dtype != ADZE_NONE || got->dtype == ADZE_NONE, ADZE_BAD_ARG,
                     "%s: %s must be absent, the other arguments give it no value", op->name, f->name);
        ADZE_REQUIRE(got->dtype != ADZE_NONE || due->dtype == ADZE_NONE, ADZE_BAD_ARG,
                     "%s: %s is absent, it is required", op->name, f->name);
        ADZE_REQUIRE(got->dtype == due->dtype, ADZE_BAD_DTYPE, "%s: %s is %s, it must be %s", op->name, f->name,
                     adze_dtype_name(got->dtype), adze_dtype_name(due->dtype));
        ADZE_REQUIRE(got->dtype == ADZE_NONE || got->rank == due->rank, ADZE_BAD_ARG,
                     "%s: %s has rank %d, it must have %d", op->name, f->name, got->rank, due->rank);
        for (int d = 0; d < due->rank && got->dtype; d++)
            ADZE_REQUIRE(got->shape[d] == due->shape[d], ADZE_BAD_ARG,
                         "%s: %s has %lld in dimension %d, it must have %lld", op->name, f->name,
                         (long long)got->shape[d], d, (long long)due->shape[d]);
        ADZE_CHECK(check_written(op, args, f, where));
    }
    return ADZE_OK;
}

/* A tensor as `adze run` reads it: dtype[size:stride,...], then its place, unless that is a new 64-byte line. */
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
        if (!adze_is_tensor(g) || empty(base) || base->dtype != t->dtype || !span(base, &low, &high))
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

__attribute__((cold, noinline)) static void trace(const adze_op *op, const char *args, const adze_kernel *kernel,
                                                  int variant)
{
    flockfile(stderr);
    fprintf(stderr, "%s", op->name);
    for (const adze_field *f = op->fields; f->name; f++) {
        const char *p = args + f->offset;
        if (adze_is_tensor(f)) {
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
    const uint32_t flags = ((const adze_call *)(const void *)args)->flags;
    if (flags)
        fprintf(stderr,
                flags == ADZE_CONST_WEIGHTS     ? " flags=const_weights"
                : flags == ADZE_BATCH_INVARIANT ? " flags=batch_invariant"
                : flags == ADZE_CONST_CACHE     ? " flags=const_cache"
                                                : " flags=%u",
                flags);
    const size_t row = strcspn(kernel->name, "/"); /* the name of a variant has its own */
    fprintf(stderr, " -> %.*s%s%s\n", (int)row, kernel->name, variant < 0 ? "" : "/",
            variant < 0 ? "" : kernel->variants->list[variant].name);
    funlockfile(stderr);
}

/* The contract of the inputs. */
static adze_status check_inputs(const adze_op *op, const void *args)
{
    for (const adze_field *f = op->fields; f->name; f++)
        if (f->kind == ADZE_FLOAT) {
            const float number = *(const float *)(const void *)((const char *)args + f->offset);
            ADZE_REQUIRE(isfinite(number), ADZE_BAD_ARG, "%s: %s is %g, it must be finite", op->name, f->name,
                         (double)number);
        }
    return op->validate(args);
}

/* Reports the first byte from `known` on that a caller has set. */
__attribute__((cold, noinline)) static adze_status refuse_unknown(const adze_op *op, const char *caller, size_t known,
                                                                  size_t size)
{
    size_t at = known;
    while (!caller[at])
        at++;
    if (at < op->args_size) { /* the only bytes here that no field has are an int32_t reserved */
        int32_t reserved;
        memcpy(&reserved, caller + at / sizeof reserved * sizeof reserved, sizeof reserved);
        return adze_fail(ADZE_BAD_ARG, "%s: reserved is %d, it must be 0", op->name, reserved);
    }
    return adze_fail(
        ADZE_BAD_ARG,
        "%s: byte %zu of args, whose call.size is %zu, belongs to a field of a newer adze.h; this library is version "
        "%d.%d.%d, whose args have %zu bytes",
        op->name, at, size, ADZE_VERSION / 10000, ADZE_VERSION / 100 % 100, ADZE_VERSION % 100, op->args_size);
}

/* Copies the caller's struct, of any version, and checks all that does not depend on the kernel. */
static adze_status take_args(const adze_op *op, const void *caller, char *args)
{
    const size_t size = caller ? ((const adze_call *)caller)->size : 0;
    ADZE_REQUIRE(caller && size >= op->first_size && size <= ARGS_MAX, ADZE_BAD_ARG,
                 "%s: args.call.size is %zu, it must be at least %zu; write .call = ADZE_CALL(%s)", op->name, size,
                 op->first_size, op->name);
    memcpy(args, caller, size < op->args_size ? size : op->args_size);
    if (size < op->args_size)
        memset(args + size, 0, op->args_size - size);
    extent where[FIELDS_MAX];
    size_t known = sizeof(adze_call);
    for (const adze_field *f = op->fields; f->name; f++) {
        const size_t end = f->offset + (adze_is_tensor(f) ? sizeof(adze_tensor) : 4);
        known = end > known ? end : known;
    }
    unsigned char set = 0;
    for (size_t i = known; i < size; i++)
        set |= ((const unsigned char *)caller)[i];
    if (set)
        return refuse_unknown(op, caller, known, size);
    const adze_call *call = (const void *)args;
    const uint32_t known_flags = ADZE_CONST_WEIGHTS | ADZE_BATCH_INVARIANT | ADZE_CONST_CACHE;
    ADZE_REQUIRE(
        (call->flags & ~known_flags) == 0, ADZE_BAD_ARG,
        "%s: flags is %#x, it must be 0 or a sum of ADZE_CONST_WEIGHTS (%#x), ADZE_BATCH_INVARIANT (%#x) and "
        "ADZE_CONST_CACHE (%#x)",
        op->name, call->flags, ADZE_CONST_WEIGHTS, ADZE_BATCH_INVARIANT, ADZE_CONST_CACHE);
    for (const adze_field *f = op->fields; f->name; f++) {
        where[f - op->fields] = (extent){0, 0};
        if (adze_is_tensor(f))
            ADZE_CHECK(check_tensor(op, f, tensor_at(f, args), &where[f - op->fields]));
    }
    ADZE_CHECK(check_inputs(op, args));
    return check_outputs(op, args, where);
}

__attribute__((noinline)) static adze_status check_scratch(const adze_op *op, adze_stream s, const char *args)
{
    const adze_call *call = (const void *)args;
    const size_t need = op->scratch(s, args);
    ADZE_REQUIRE(need == 0 || (call->scratch && call->scratch_size >= need), ADZE_SCRATCH,
                 "%s: scratch has %zu bytes, it must have at least %zu", op->name,
                 call->scratch ? call->scratch_size : 0, need);
    ADZE_REQUIRE(need == 0 || (uintptr_t)call->scratch % 16 == 0, ADZE_BAD_ARG,
                 "%s: scratch starts at %p, it must be a multiple of 16 bytes", op->name, call->scratch);
    return ADZE_OK;
}

/* Whether ADZE_KERNEL names another kernel, or another variant of it than k alone is. */
__attribute__((cold, noinline)) static int forced_away(const adze_kernel *k)
{
    const size_t row = strcspn(k->name, "/");
    return strlen(settings.forced->name) != row || memcmp(settings.forced->name, k->name, row) != 0 ||
           (k->only && settings.variant >= 0 && k->only - 1 != settings.variant);
}

/* Traces the call, and runs the variant that is asked for; ADZE_NO_KERNEL: it does not take the call. */
__attribute__((cold, noinline)) static adze_status run_variant(const adze_op *op, const adze_kernel *k, adze_stream s,
                                                               const void *args)
{
    const int forced = settings.op == op ? settings.variant : -1;
    adze_choice choice = {.want = k->only ? k->only - 1 : forced, .dry = 1, .ran = -1};
    if (k->variants) {
        const adze_status status = adze_run_choice(k, s, args, &choice);
        if (status != ADZE_OK)
            return status;
    }
    if (settings.trace)
        trace(op, args, k, choice.ran);
    choice.dry = 0;
    return choice.want >= 0 ? adze_run_choice(k, s, args, &choice)
           : k->on_cuda     ? adze_cuda_call(k->run, s, args)
                            : k->run(s, args);
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
    ADZE_REQUIRE(!settings.wrong[0], ADZE_BAD_ARG, "%s: %s", op->name, settings.wrong);
    if (s.device != ADZE_CPU)
        ADZE_CHECK(adze_check_device(op->name, s.device));
    if (op->scratch)
        ADZE_CHECK(check_scratch(op, s, args));
    for (const adze_kernel *k = only ? only : op->kernels; k->run; k++) {
        const char *why = settings.op == op && forced_away(k)  ? "ADZE_KERNEL names another"
                          : !adze_can_run(k, s)                ? "not for this device"
                          : k->accepts && !k->accepts(s, args) ? "does not take this call"
                                                               : NULL;
        if (!why && !settings.trace && settings.op != op && !k->only)
            return k->on_cuda ? adze_cuda_call(k->run, s, args) : k->run(s, args);
        if (!why) {
            const adze_status status = run_variant(op, k, s, args);
            if (status != ADZE_NO_KERNEL)
                return status;
            why = "the variant does not take this call";
        }
        if (settings.trace > 1)
            trace_passed_over(op, k, why);
        if (only)
            break;
    }
    const int forced = settings.op == op, variant = forced ? settings.variant : -1;
    return adze_fail(ADZE_NO_KERNEL, "%s: no kernel for this device, dtype and shape%s%s%s%s", op->name,
                     forced ? ", of those that ADZE_KERNEL allows: " : "", forced ? settings.forced->name : "",
                     variant < 0 ? "" : "/", variant < 0 ? "" : settings.forced->variants->list[variant].name);
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

/* The tensors that a call changes, of a caller that allocates the outputs. */
__attribute__((noinline)) static adze_status check_changed(const adze_op *op, const char *args)
{
    extent where[FIELDS_MAX];
    for (const adze_field *f = op->fields; f->name; f++) {
        where[f - op->fields] = (extent){0, 0};
        if (adze_is_input(f))
            ADZE_CHECK(check_tensor(op, f, tensor_at(f, args), &where[f - op->fields]));
    }
    for (const adze_field *f = op->fields; f->name; f++)
        if (adze_is_inout(f))
            ADZE_CHECK(check_written(op, args, f, where));
    return ADZE_OK;
}

adze_status adze_dispatch_outputs(const adze_op *op, void *args)
{
    int changes = 0;
    for (const adze_field *f = op->fields; f->name; f++)
        changes |= adze_is_inout(f);
    ADZE_CHECK(check_inputs(op, args));
    if (changes)
        ADZE_CHECK(check_changed(op, args));
    op->outputs(args);
    return ADZE_OK;
}

/* Gives tensors that have no memory yet an address, each far from the others: nothing is read there. */
static void place_tensors(const adze_op *op, char *args, size_t size)
{
    for (const adze_field *f = op->fields; f->name; f++)
        if (adze_is_tensor(f) && f->offset + sizeof(adze_tensor) <= size) {
            adze_tensor *const t = (adze_tensor *)(void *)(args + f->offset);
            if (t->dtype != ADZE_NONE && !t->data)
                t->data = (void *)((uintptr_t)(f - op->fields + 1) << 52);
        }
}

adze_status adze_dispatch_scratch(const adze_op *op, adze_stream s, const void *caller, size_t *bytes)
{
    _Alignas(16) char args[ARGS_MAX], placed[ARGS_MAX];
    ADZE_REQUIRE(bytes, ADZE_BAD_ARG, "%s: bytes is NULL", op->name);
    const size_t size = caller ? ((const adze_call *)caller)->size : 0;
    if (caller && size >= op->first_size && size <= ARGS_MAX) {
        memcpy(placed, caller, size);
        place_tensors(op, placed, size);
        caller = placed;
    }
    ADZE_CHECK(take_args(op, caller, args));
    if (op->scratch && s.device != ADZE_CPU) /* it depends on the device */
        ADZE_CHECK(adze_check_device(op->name, s.device));
    ((adze_call *)(void *)args)->scratch_size = SIZE_MAX; /* what a call can use, which may be more than it needs */
    *bytes = op->scratch ? op->scratch(s, args) : 0;
    return ADZE_OK;
}
