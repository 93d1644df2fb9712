/* self.c - the checker is checked: the first CPU kernel of every op, broken on purpose, must be caught by a case of
   the op, and the same kernel, not broken, must pass them all. */
#include "alias.h"
#include "check.h"
#include "self_waits.h"
#include "suite.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum fault_kind {
    CONTROL,    /* nothing is wrong */
    TAIL,       /* the last element of each row is not written */
    FIRST_ROW,  /* only the first row is */
    STRIDE,     /* rows are written as if they followed one another */
    PAST_END,   /* one element too many is written */
    INPUT,      /* an input is changed */
    RACE,       /* one bit differs from run to run */
    TRUNCATION, /* the result is rounded toward zero */
    NEXT_VALUE, /* the result is one unit of the last place too high */
    NO_NAN,     /* a NaN becomes zero */
    INFINITE,   /* the definition allows any value */
    UNDEFINED,  /* the definition's bound is a NaN */
    SPILL,      /* an element that the call must leave as it was is changed */
    LESS,       /* a bit of .rounding is dropped */
    MORE,       /* a bit of .rounding is added */
    IGNORED,    /* a number is taken as zero */
    DOUBLED,    /* a number is taken twice */
    UNREAD,     /* an input of whole numbers is taken as zeros */
    IN_PLACE,   /* an input is read again after an output that is the same memory was written */
    ABSENT,     /* an optional input is not read */
    SHIFTED,    /* an input is read from its second element on */
    ZEROED,     /* an integer is taken as zero */
    ONE_MORE    /* an integer is taken one too high */
} fault_kind;

typedef struct fault {
    fault_kind kind;
    char name[48];
    int field;   /* LESS and what follows it: of the op */
    int input;   /* IN_PLACE: the field that the output is */
    int32_t bit; /* of .rounding */
    int tried;   /* cases it could have been caught by */
    int caught;
} fault;

enum { FAULTS_MAX = 128 };

/* The call that is being judged: a kernel has no other way to know. */
static struct {
    const adze_job *job;
    const adze_kernel *inner;
    const fault *fault;
    adze_value *const *want;
    int runs;
} now;

static adze_tensor *tensor_of(void *args, int field)
{
    return (adze_tensor *)(void *)((char *)args + now.job->line.op->fields[field].offset);
}

static int64_t row_length(const adze_tensor *t)
{
    return t->shape[t->rank - 1];
}

/* The elements of a tensor one after the other, and back; `from` on: only those that the fault left unwritten. */
static char *gather(const adze_tensor *t)
{
    const size_t size = adze_dtype_size(t->dtype);
    const int64_t count = adze_count(t);
    char *all = malloc((size_t)count * size + 1);
    for (adze_walk w = {0}; all && w.i < count; adze_walk_next(&w, t))
        memcpy(all + (size_t)w.i * size, (char *)t->data + w.at * (int64_t)size, size);
    return all;
}
static void put_back(const adze_tensor *t, const char *all, fault_kind kind)
{
    const size_t size = adze_dtype_size(t->dtype);
    const int64_t count = adze_count(t), n = row_length(t);
    for (adze_walk w = {0}; w.i < count; adze_walk_next(&w, t))
        if (kind == TAIL ? w.i % n == n - 1 : w.i >= n)
            memcpy((char *)t->data + w.at * (int64_t)size, all + (size_t)w.i * size, size);
}

static adze_status run_unwritten(adze_stream stream, void *args)
{
    const adze_field *fields = now.job->line.op->fields;
    char *before[ADZE_FIELDS_MAX] = {0};
    for (int f = 0; fields[f].name; f++)
        if (adze_is_output(&fields[f]) && tensor_of(args, f)->dtype)
            before[f] = gather(tensor_of(args, f));
    const adze_status status = now.inner->run(stream, args);
    for (int f = 0; fields[f].name; f++) {
        if (before[f])
            put_back(tensor_of(args, f), before[f], now.fault->kind);
        free(before[f]);
    }
    return status;
}

static adze_status run_contiguous(adze_stream stream, void *args)
{
    const adze_field *fields = now.job->line.op->fields;
    char *rows[ADZE_FIELDS_MAX] = {0};
    _Alignas(16) char inner[ADZE_ARGS_MAX];
    memcpy(inner, args, now.job->line.op->args_size);
    for (int f = 0; fields[f].name; f++) {
        adze_tensor *t = tensor_of(inner, f);
        if (!adze_is_output(&fields[f]) || !t->dtype)
            continue;
        t->data = rows[f] =
            adze_is_inout(&fields[f])
                ? gather(t)
                : aligned_alloc(64, ((size_t)adze_count(t) * adze_dtype_size(t->dtype) + 64) / 64 * 64);
        int64_t stride = 1;
        for (int d = t->rank - 1; d >= 0; d--) {
            t->stride[d] = stride;
            stride *= t->shape[d];
        }
    }
    const adze_status status = now.inner->run(stream, inner);
    for (int f = 0; fields[f].name; f++) {
        const adze_tensor *t = tensor_of(args, f);
        if (rows[f])
            memcpy(t->data, rows[f], (size_t)adze_count(t) * adze_dtype_size(t->dtype));
        free(rows[f]);
    }
    return status;
}

static double broken_value(int dtype, double got, double want)
{
    if (now.fault->kind == NO_NAN)
        return isnan(got) ? 0 : got;
    if (!isfinite(want))
        return got;
    const double ulp = adze_dtype_ulp(dtype, want);
    return now.fault->kind == TRUNCATION ? trunc(want / ulp) * ulp : adze_round_to(dtype, want) + ulp;
}

static void break_values(void *args)
{
    const adze_field *fields = now.job->line.op->fields;
    int n = 0;
    for (int f = 0; fields[f].name; f++) {
        if (!adze_is_output(&fields[f]))
            continue;
        const adze_value *want = now.want[n++];
        const adze_tensor *t = tensor_of(args, f);
        const int64_t count = t->dtype ? adze_count(t) : 0;
        for (adze_walk w = {0}; w.i < count; adze_walk_next(&w, t))
            adze_put(t, w.at, broken_value(t->dtype, adze_get(t, w.at), want[w.i].v));
    }
}

/* The byte that PAST_END, INPUT and RACE change; NULL where this call has none. */
static char *byte_to_flip(void *args)
{
    const adze_op *op = now.job->line.op;
    for (int f = 0; op->fields[f].name; f++) {
        const int out = adze_is_output(&op->fields[f]);
        if (!adze_is_tensor(&op->fields[f]) || out != (now.fault->kind != INPUT))
            continue;
        const adze_tensor *t = tensor_of(args, f);
        if (!t->dtype || adze_count(t) == 0)
            continue;
        int64_t at = 0;
        for (int d = 0; d < t->rank && now.fault->kind == PAST_END; d++)
            at += t->stride[d] > 0 ? (t->shape[d] - 1) * t->stride[d] : 0;
        at += now.fault->kind == PAST_END;
        char *byte = (char *)t->data + at * (int64_t)adze_dtype_size(t->dtype);
        const adze_memory *m = &now.job->memory[now.job->memory_of[f]];
        if (!m->outputs[byte - m->work] == (now.fault->kind != RACE))
            return byte;
    }
    return NULL;
}

/* An element of a tensor that is changed in place, which the definition leaves as it was: the last one. */
static char *byte_to_spill(void *args)
{
    const adze_field *fields = now.job->line.op->fields;
    char *found = NULL;
    for (int f = 0, n = 0; fields[f].name; f++) {
        if (!adze_is_output(&fields[f]))
            continue;
        const adze_value *want = now.want[n++];
        const adze_tensor *t = tensor_of(args, f);
        const int64_t count = adze_is_inout(&fields[f]) && t->dtype ? adze_count(t) : 0;
        for (adze_walk w = {0}; w.i < count; adze_walk_next(&w, t))
            if (want[w.i].e == ADZE_UNCHANGED)
                found = (char *)t->data + w.at * (int64_t)adze_dtype_size(t->dtype);
    }
    return found;
}

/* Runs with zeros in the place of an input. */
static adze_status run_unread(adze_stream stream, void *args)
{
    adze_tensor *t = tensor_of(args, now.fault->field);
    int64_t reach = 1;
    for (int d = 0; d < t->rank; d++)
        reach += (t->shape[d] - 1) * t->stride[d];
    void *zeros = calloc((size_t)reach, adze_dtype_size(t->dtype));
    t->data = zeros;
    const adze_status status = zeros ? now.inner->run(stream, args) : ADZE_OK;
    free(zeros);
    return status;
}

static void change_number(void *args)
{
    char *at = (char *)args + now.job->line.op->fields[now.fault->field].offset;
    int32_t bits;
    float number;
    memcpy(&bits, at, sizeof bits);
    memcpy(&number, at, sizeof number);
    number = now.fault->kind == DOUBLED ? 2 * number : 0;
    bits = now.fault->kind == MORE ? bits | now.fault->bit : bits & ~now.fault->bit;
    if (now.fault->bit)
        memcpy(at, &bits, sizeof bits);
    else
        memcpy(at, &number, sizeof number);
}

static void change_field(void *args)
{
    char *at = (char *)args + now.job->line.op->fields[now.fault->field].offset;
    adze_tensor *t = (adze_tensor *)(void *)at;
    int32_t *number = (int32_t *)(void *)at;
    switch (now.fault->kind) {
    case ABSENT: *t = (adze_tensor){0}; break;
    case SHIFTED: t->data = (char *)t->data + adze_dtype_size(t->dtype); break;
    case ZEROED: *number = 0; break;
    default: ++*number; break;
    }
}

/* Whether a call with such a field is one, and has the same outputs. */
static int still_fits(const void *args)
{
    const adze_op *op = now.job->line.op;
    _Alignas(16) char changed[ADZE_ARGS_MAX], due[ADZE_ARGS_MAX];
    memcpy(changed, args, op->args_size);
    change_field(changed);
    if (op->validate(changed) != ADZE_OK)
        return 0;
    memcpy(due, changed, op->args_size);
    for (int f = 0; op->fields[f].name; f++)
        if (adze_is_made(&op->fields[f]))
            tensor_of(due, f)->dtype = ADZE_NONE;
    op->outputs(due);
    for (int f = 0; op->fields[f].name; f++) {
        const adze_tensor *is = tensor_of(changed, f), *want = tensor_of(due, f);
        if (!adze_is_made(&op->fields[f]) || (!is->dtype && op->fields[f].kind == ADZE_OUT_OPTIONAL))
            continue;
        int same = is->dtype == want->dtype && (!is->dtype || is->rank == want->rank);
        for (int d = 0; same && is->dtype && d < is->rank; d++)
            same = is->shape[d] == want->shape[d];
        if (!same)
            return 0;
    }
    return 1;
}

static adze_status broken_run(adze_stream stream, const void *caller)
{
    _Alignas(16) char args[ADZE_ARGS_MAX];
    memcpy(args, caller, now.job->line.op->args_size);
    now.runs++;
    if (now.fault->kind == TAIL || now.fault->kind == FIRST_ROW)
        return run_unwritten(stream, args);
    if (now.fault->kind == STRIDE)
        return run_contiguous(stream, args);
    if (now.fault->kind == UNREAD)
        return run_unread(stream, args);
    if (now.fault->kind >= LESS && now.fault->kind <= DOUBLED)
        change_number(args);
    if (now.fault->kind >= ABSENT)
        change_field(args);
    adze_status status = now.inner->run(stream, args);
    if (now.fault->kind == IN_PLACE && status == ADZE_OK)
        status = now.inner->run(stream, args);
    if (now.fault->kind == TRUNCATION || now.fault->kind == NEXT_VALUE || now.fault->kind == NO_NAN)
        break_values(args);
    if (now.fault->kind == PAST_END || now.fault->kind == INPUT || (now.fault->kind == RACE && now.runs % 2 == 0))
        *byte_to_flip(args) ^= 1;
    if (now.fault->kind == SPILL)
        *byte_to_spill(args) ^= 1;
    return status;
}

/* Whether an output, taken as contiguous, stays in the memory it was given. */
static int fits_contiguous(void *args)
{
    const adze_field *fields = now.job->line.op->fields;
    for (int f = 0; fields[f].name; f++) {
        const adze_tensor *t = tensor_of(args, f);
        if (!adze_is_output(&fields[f]) || !t->dtype)
            continue;
        const adze_memory *m = &now.job->memory[now.job->memory_of[f]];
        const size_t bytes = (size_t)adze_count(t) * adze_dtype_size(t->dtype);
        if ((size_t)((char *)t->data - m->work) + bytes > m->bytes)
            return 0;
    }
    return 1;
}

/* The first value of the definition that a bound is asked of; NULL where there is none. */
static adze_value *finite_value(void)
{
    const adze_op *op = now.job->line.op;
    for (int f = 0, n = 0; op->fields[f].name; f++) {
        if (!adze_is_output(&op->fields[f]))
            continue;
        adze_value *want = now.want[n++];
        const int64_t count = want ? adze_count((const void *)(now.job->line.args + op->fields[f].offset)) : 0;
        for (int64_t i = 0; i < count; i++)
            if (isfinite(want[i].v))
                return &want[i];
    }
    return NULL;
}

/* Judges the broken kernel, or a right one by a broken definition. */
static void judge(adze_job *job, const adze_kernel *kernel, adze_verdict *v)
{
    adze_value *value = now.fault->kind == INFINITE || now.fault->kind == UNDEFINED ? finite_value() : NULL;
    const double bound = value ? value->e : 0;
    if (value)
        value->e = now.fault->kind == INFINITE ? INFINITY : NAN;
    adze_judge(job, kernel, now.want, v);
    if (value)
        value->e = bound;
}

/* Whether an output has the stored numbers of quantised weights: they are whole steps of a grid and have no NaN. */
static int has_stored(void *args)
{
    const adze_field *fields = now.job->line.op->fields;
    for (int f = 0; fields[f].name; f++) {
        const int dtype = tensor_of(args, f)->dtype;
        if (adze_is_output(&fields[f]) && (dtype == ADZE_I8 || dtype == ADZE_U8 || dtype == ADZE_F8E4M3))
            return 1;
    }
    return 0;
}

/* Whether an output has more than one row: only then can rows be left out, or lie elsewhere. */
static int has_rows(void *args)
{
    const adze_field *fields = now.job->line.op->fields;
    for (int f = 0; fields[f].name; f++) {
        const adze_tensor *t = tensor_of(args, f);
        if (adze_is_output(&fields[f]) && t->dtype && t->rank > 1)
            return 1;
    }
    return 0;
}

/* Whether the outputs are choices, one for each row: they are no rows themselves, and never a NaN. */
static int chooses(const adze_op *op)
{
    const adze_field *f = op->fields;
    while (f->name && !f->also)
        f++;
    return f->name != NULL;
}
static int changes(const adze_op *op)
{
    const adze_field *f = op->fields;
    while (f->name && !adze_is_inout(f))
        f++;
    return f->name != NULL;
}

/* Whether an input has whole numbers, not all of them zero, and no stride that goes back. */
static int is_read(void *args)
{
    const adze_tensor *t = tensor_of(args, now.fault->field);
    const int64_t count = t->dtype == ADZE_I32 || t->dtype == ADZE_I64 ? adze_count(t) : 0;
    for (int d = 0; d < t->rank; d++)
        if (t->stride[d] < 0)
            return 0;
    for (adze_walk w = {0}; w.i < count; adze_walk_next(&w, t))
        if (adze_get(t, w.at) != 0)
            return 1;
    return 0;
}

/* Whether the fault can show in this call at all. */
static int can_show(void *args)
{
    const adze_op *op = now.job->line.op;
    _Alignas(16) char changed[ADZE_ARGS_MAX];
    float number;
    int32_t bits;
    switch (now.fault->kind) {
    case FIRST_ROW: return has_rows(args);
    case STRIDE: return has_rows(args) && fits_contiguous(args);
    case SPILL: return byte_to_spill(args) != NULL;
    case UNREAD: return is_read(args);
    case PAST_END:
    case INPUT:
    case RACE: return byte_to_flip(args) != NULL;
    case LESS:
    case MORE:
        memcpy(changed, args, op->args_size);
        memcpy(&bits, (char *)args + op->fields[now.fault->field].offset, sizeof bits);
        change_number(changed);
        return !(bits & now.fault->bit) == (now.fault->kind == MORE) && op->validate(changed) == ADZE_OK;
    case IGNORED:
    case DOUBLED:
        memcpy(&number, (char *)args + op->fields[now.fault->field].offset, sizeof number);
        return number != 0;
    case IN_PLACE: return tensor_of(args, now.fault->field)->data == tensor_of(args, now.fault->input)->data;
    case ABSENT: return tensor_of(args, now.fault->field)->dtype && still_fits(args);
    case SHIFTED:
        return tensor_of(args, now.fault->field)->dtype && adze_count(tensor_of(args, now.fault->field)) > 0;
    case ZEROED:
    case ONE_MORE:
        memcpy(&bits, (char *)args + op->fields[now.fault->field].offset, sizeof bits);
        return bits != 0 && still_fits(args);
    case INFINITE:
    case UNDEFINED: return finite_value() != NULL;
    case TRUNCATION: return !has_stored(args);
    case NO_NAN: return !has_stored(args) && !chooses(op);
    default: return 1;
    }
}

/* Those of one field, whatever it means: of ops whose cases show each of them. */
static int list_fields(const adze_op *op, fault *faults, int n)
{
    if (op != &adze_op_attention && op != &adze_op_attention_merge)
        return n;
    static const char *const names[] = {"absent", "shifted", "zeroed", "one_more"};
    for (int f = 0; op->fields[f].name; f++) {
        const adze_kind kind = op->fields[f].kind;
        const int rounding = strcmp(op->fields[f].name, "rounding") == 0;
        for (int k = ABSENT; k <= ONE_MORE && n < FAULTS_MAX; k++) {
            if (k == ABSENT    ? kind != ADZE_OPTIONAL
                : k == SHIFTED ? kind > ADZE_OPTIONAL
                               : kind != ADZE_INT || rounding)
                continue;
            faults[n] = (fault){.kind = (fault_kind)k, .field = f};
            snprintf(faults[n++].name, sizeof faults->name, "%s_%s", op->fields[f].name, names[k - ABSENT]);
        }
    }
    return n;
}

static int list_faults(const adze_op *op, fault *faults)
{
    static const char *const names[] = {"control",        "tail",      "first_row",  "stride",     "past_end",
                                        "input",          "race",      "truncation", "next_value", "no_nan",
                                        "infinite_bound", "nan_bound", "spill"};
    int n = 0;
    for (int kind = CONTROL; kind < LESS; kind++) {
        faults[n] = (fault){.kind = (fault_kind)kind};
        snprintf(faults[n++].name, sizeof faults->name, "%s", names[kind]);
    }
    for (int f = 0; op->fields[f].name && n + 8 <= FAULTS_MAX; f++) {
        const int rounding = strcmp(op->fields[f].name, "rounding") == 0;
        for (int bit = 1; rounding && bit <= 8; bit *= 2)
            for (int more = 0; more < 2; more++) {
                faults[n] = (fault){.kind = more ? MORE : LESS, .field = f, .bit = bit};
                snprintf(faults[n++].name, sizeof faults->name, "rounding_%d_%s", bit, more ? "added" : "dropped");
            }
        if (adze_is_input(&op->fields[f]) && !adze_is_inout(&op->fields[f])) {
            faults[n] = (fault){.kind = UNREAD, .field = f};
            snprintf(faults[n++].name, sizeof faults->name, "%s_unread", op->fields[f].name);
        }
        if (strcmp(op->fields[f].name, "top_k") == 0) {
            faults[n] = (fault){.kind = IGNORED, .field = f};
            snprintf(faults[n++].name, sizeof faults->name, "%s_ignored", op->fields[f].name);
        }
        for (int twice = 0; op->fields[f].kind == ADZE_FLOAT && twice < 2; twice++) {
            faults[n] = (fault){.kind = twice ? DOUBLED : IGNORED, .field = f};
            snprintf(faults[n++].name, sizeof faults->name, "%s_%s", op->fields[f].name,
                     twice ? "doubled" : "ignored");
        }
        for (int g = 0; adze_is_output(&op->fields[f]) && op->fields[g].name; g++)
            if (adze_may_be(&op->fields[f], &op->fields[g])) {
                faults[n] = (fault){.kind = IN_PLACE, .field = f, .input = g};
                snprintf(faults[n++].name, sizeof faults->name, "%s_read_after_%s", op->fields[g].name,
                         op->fields[f].name);
            }
    }
    return list_fields(op, faults, n);
}

/* All faults that no earlier case caught, and the control, on one case. */
static void try_line(const adze_suite *suite, const char *text, fault *faults, int n, int verbose)
{
    static const adze_stream cpu = {ADZE_CPU, NULL};
    const adze_op *op = suite->op;
    char error[256];
    adze_job *job = adze_job_new(op, text, cpu, error, sizeof error);
    if (!job)
        return;
    adze_wanted wanted = {.job = job};
    for (now.inner = op->kernels; now.inner->run; now.inner++)
        if (adze_can_run(now.inner, cpu) && (!now.inner->accepts || now.inner->accepts(cpu, job->args)))
            break;
    adze_kernel broken = *now.inner;
    broken.run = broken_run;
    now.job = job;
    now.want = adze_wanted_of(&wanted, now.inner->run ? now.inner : NULL);
    for (int i = 0; i < n && now.inner->run; i++) {
        now.fault = &faults[i];
        now.runs = 0;
        if ((faults[i].caught && i > CONTROL) || !can_show(job->args))
            continue;
        adze_verdict v;
        judge(job, &broken, &v);
        faults[i].tried++;
        if (!v.why[0])
            continue;
        faults[i].caught = 1;
        if (verbose || i == CONTROL)
            printf("self: %s.%s caught by '%s': %s\n", op->name, faults[i].name, text, v.why);
    }
    adze_wanted_free(&wanted);
    adze_job_delete(job);
}

static int all_caught(const fault *faults, int n, fault_kind kind)
{
    for (int i = 0; i < n; i++)
        if (faults[i].kind == kind && !faults[i].caught)
            return 0;
    return 1;
}

static void check_suite(const adze_suite *suite, int verbose, adze_tally *tally)
{
    fault faults[FAULTS_MAX];
    const int n = list_faults(suite->op, faults);
    for (const char *const *good = suite->good; *good; good++)
        for (int d = 0; d < adze_line_variants(*good); d++) {
            char text[1024];
            adze_line_expand(text, sizeof text, *good, adze_line_dtypes[d]);
            try_line(suite, text, faults, n, verbose);
            char aliased[1200];
            for (int way = 0; !all_caught(faults, n, IN_PLACE); way++) {
                if (!adze_alias_line(suite->op, text, way, aliased, sizeof aliased))
                    break;
                try_line(suite, aliased, faults, n, verbose);
            }
        }
    for (int i = 0; i < n; i++) {
        /* A bit of .rounding that the op does not know cannot be added either. */
        if (faults[i].bit && !faults[i].tried && (faults[i].kind == MORE || !faults[i + 1].tried))
            continue;
        /* Not of stored numbers, of choices, of ops that change nothing in place, of inputs that are floats. */
        const fault_kind kind = faults[i].kind;
        const int choice = chooses(suite->op) && (kind == FIRST_ROW || kind == STRIDE);
        if (!faults[i].tried && (kind == TRUNCATION || kind == NO_NAN || kind == UNREAD || choice ||
                                 (kind == SPILL && !changes(suite->op))))
            continue;
        /* A field without which the call is another one. */
        if (faults[i].kind >= ABSENT && !faults[i].tried)
            continue;
        const int ok = faults[i].caught == (i != CONTROL) && faults[i].tried > 0;
        ok ? tally->passed++ : tally->failed++;
        if (!ok)
            printf("FAIL self: %s.%s is %s by %d cases\n", suite->op->name, faults[i].name,
                   i == CONTROL ? "caught" : "not caught", faults[i].tried);
    }
}

int adze_check_self(const adze_check_options *options)
{
    adze_tally tally = {0, 0, 0};
    if (!adze_check_options_hold(options))
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (const adze_suite *const *s = adze_suites; *s; s++)
        if (!options->op || strcmp(options->op, (*s)->op->name) == 0)
            check_suite(*s, options->verbose, &tally);
    if (!options->op || strcmp(options->op, "gated_add") == 0)
        adze_self_waits(options, &tally);
    return adze_tally_report(&tally);
}
