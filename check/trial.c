/* trial.c - one call verified, then timed: with cold caches, kernels in turn, as a median. */
#include "trial.h"

#include "ceiling.h"
#include "gpu.h"
#include "smaller.h"
#include "suite.h"
#include "timing.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SLOW 1.3 /* times the fastest: a variant that is not timed again in a race */

enum {
    SAMPLED = 200000, /* elements of an output of the whole call that are compared with the definition, */
    SAMPLED_AT = 600, /* and those of an op with samples, for which the definition is computed */
    SHIFT = 24,       /* bytes by which repeated data moves, so that no two rows are the same */
    NODES_MIN = 20,   /* calls in a graph */
    NODES_MAX = 4096,
};

/* ---- Verifying ---- */

static void attempt(adze_trial *t, const adze_kernel *k, int accepts)
{
    adze_attempt *a = &t->attempt[t->attempts++];
    a->kernel = k;
    if (accepts)
        adze_judge(t->small, k, adze_wanted_of(&t->wanted, k), &a->verdict);
}

/* The variants of a kernel that take the call. */
static void attempt_variants(adze_trial *t, const adze_kernel *k)
{
    const int count = adze_variant_count(k);
    if (!count || t->variants)
        return;
    t->variants = calloc((size_t)count, sizeof *t->variants);
    for (int i = 0; t->variants && i < count && t->attempts < ADZE_TRIAL_KERNELS; i++) {
        const adze_kernel *variant = adze_variant_kernel(&t->variants[i], k, i);
        if (adze_accepts(variant, t->small->stream, t->small->args))
            attempt(t, variant, 1);
    }
}

static void judge(adze_trial *t, adze_which which)
{
    const adze_op *op = t->small->line.op;
    for (const adze_kernel *k = op->kernels; k->run && t->attempts < ADZE_TRIAL_KERNELS; k++) {
        const int accepts = adze_accepts(k, t->small->stream, t->small->args);
        if (!adze_can_run(k, t->small->stream) || (which == ADZE_CHOSEN && (!accepts || t->attempts)))
            continue;
        attempt(t, k, accepts);
        if (which == ADZE_VARIANTS_ALL)
            attempt_variants(t, k);
    }
}

/* Whether the call is one at all; inputs first, since some are indices. */
static const char *try_small(adze_job *job)
{
    const char *message = NULL;
    for (int m = 0; m < ADZE_FIELDS_MAX && !message; m++)
        if (job->memory[m].origin)
            message =
                adze_memory_write(job->stream, job->memory[m].work, job->memory[m].origin, job->memory[m].bytes);
    if (!message && adze_dispatch(job->line.op, job->stream, job->args) != ADZE_OK)
        message = adze_last_error();
    return message ? message : adze_memory_sync(job->stream);
}

int adze_trial_make(adze_trial *t, const adze_line *line, adze_stream stream, adze_which which, char *error,
                    size_t error_size)
{
    memset(t, 0, sizeof *t);
    t->whole = calloc(1, sizeof *t->whole);
    t->small = calloc(1, sizeof *t->small);
    const adze_op *op = line->op;
    if (!adze_job_layout(t->whole, line, stream, error, error_size))
        return 0;
    if (op->validate(t->whole->line.args) != ADZE_OK) {
        snprintf(error, error_size, "%s", adze_last_error());
        return 0;
    }
    const adze_tensor *x = adze_line_tensor(&t->whole->line, adze_first_input(op));
    t->dim = x->rank ? x->shape[x->rank - 1] : 1;
    t->rows = t->dim ? adze_count(x) / t->dim : 0;
    adze_job_bytes(t->whole, &t->read, &t->written);
    t->flops = adze_suite_of(op)->flops ? adze_suite_of(op)->flops(t->whole->line.args) : 0;
    if (!adze_smaller_make(t->small, t->whole, t->period, which == ADZE_VARIANTS_ALL, error, error_size))
        return 0;
    const char *message = try_small(t->small);
    if (message) {
        snprintf(error, error_size, "%s", message);
        return 0;
    }
    t->wanted.job = t->small;
    judge(t, which);
    return 1;
}

/* ---- Buffer sets ---- */

/* The memory of the small call again and again, but for its last bytes. */
static void fill_shifted(const adze_trial *t, char *image)
{
    for (int m = 0; m < ADZE_FIELDS_MAX; m++) {
        const adze_memory *from = &t->small->memory[m], *to = &t->whole->memory[m];
        if (!to->bytes)
            continue;
        const size_t held = from->bytes - 2 * ADZE_GUARD, body = held > 64 * SHIFT ? held - SHIFT : held;
        memset(image + t->set_at[m], 0xAA, to->bytes);
        for (size_t at = ADZE_GUARD; at < to->bytes - ADZE_GUARD && body; at += body) {
            const size_t left = to->bytes - ADZE_GUARD - at;
            memcpy(image + t->set_at[m] + at, from->origin + ADZE_GUARD, left < body ? left : body);
        }
    }
}

/* The memory of the small call, repeated to the size of the whole call's. */
static void fill_set(const adze_trial *t, char *image)
{
    if (t->whole->line.op->samples) {
        fill_shifted(t, image);
        return;
    }
    for (int m = 0; m < ADZE_FIELDS_MAX; m++) {
        const adze_memory *from = &t->small->memory[m], *to = &t->whole->memory[m];
        if (!to->bytes)
            continue;
        const size_t held = from->bytes - from->data_at, body = t->period[m] ? t->period[m] : held;
        memcpy(image + t->set_at[m], from->origin, from->data_at);
        for (size_t at = to->data_at; at < to->bytes; at += body) {
            const size_t left = to->bytes - at, n = body < held ? body : held;
            memcpy(image + t->set_at[m] + at, from->origin + from->data_at, left < n ? left : n);
        }
    }
}

/* Enough for a cache line to be evicted before it is used again, in at most twice the memory that this takes: the
   guards around the tensors of a small call are far larger than the tensors. */
static int64_t count_sets(const adze_trial *t)
{
    const adze_stream stream = t->whole->stream;
    const int64_t cold = (int64_t)adze_cold_bytes(stream);
    const int64_t enough = cold / (t->read + t->written) + 1, room = 2 * cold / (int64_t)t->set_bytes + 1;
    const int64_t count = enough < room ? enough : room;
    return stream.device != ADZE_CPU && count > NODES_MAX ? NODES_MAX : count;
}

static const char *make_sets(adze_trial *t)
{
    const adze_stream stream = t->whole->stream;
    const int cpu = stream.device == ADZE_CPU;
    for (int m = 0; m < ADZE_FIELDS_MAX; m++) {
        t->set_at[m] = t->set_bytes;
        t->set_bytes += (t->whole->memory[m].bytes + 255) / 256 * 256;
    }
    t->set_count = count_sets(t);
    if (cpu && t->set_bytes > adze_physical_memory() / 2) /* there are two copies: one is timed, one is compared */
        return "the call is larger than half the memory of this machine";
    t->sets = adze_memory_take(stream, t->set_bytes * (size_t)t->set_count);
    char *image = cpu ? t->sets : malloc(t->set_bytes);
    const char *message = t->sets && image ? NULL : "no memory for the buffer sets";
    if (!message) {
        fill_set(t, image);
        for (int64_t i = 1; i < t->set_count && cpu; i++)
            memcpy(t->sets + (size_t)i * t->set_bytes, image, t->set_bytes);
        if (!cpu)
            message = adze_memory_write(stream, t->sets, image, t->set_bytes);
        if (!cpu && !message)
            message = adze_gpu_repeat(t->sets, t->set_bytes, t->set_bytes * (size_t)t->set_count);
    }
    if (!cpu)
        free(image);
    memcpy(t->whole->args, t->whole->line.args, sizeof t->whole->args);
    return message;
}

static const char *make_scratch(adze_trial *t)
{
    adze_job *job = t->whole;
    adze_call *call = (adze_call *)(void *)job->args;
    call->scratch_size = SIZE_MAX; /* as adze_dispatch_scratch() asks */
    const size_t bytes = job->line.op->scratch ? job->line.op->scratch(job->stream, job->args) : 0;
    call->scratch_size = 0;
    if (!bytes)
        return NULL;
    call->scratch = job->scratch = adze_memory_take(job->stream, bytes);
    call->scratch_size = bytes;
    return call->scratch ? NULL : "no memory for scratch";
}

static void use_set(adze_trial *t, int64_t set)
{
    const adze_field *fields = t->whole->line.op->fields;
    for (int f = 0; fields[f].name; f++)
        if (t->whole->memory_of[f] >= 0)
            ((adze_tensor *)(void *)(t->whole->args + fields[f].offset))->data =
                t->sets + (size_t)set * t->set_bytes + t->set_at[t->whole->memory_of[f]] + t->whole->place[f];
}

static adze_status call_next(adze_trial *t, const adze_kernel *kernel)
{
    use_set(t, t->next);
    t->next = t->next + 1 < t->set_count ? t->next + 1 : 0;
    return adze_dispatch_to(t->whole->line.op, kernel, t->whole->stream, t->whole->args);
}

/* ---- The whole call ---- */

static int64_t offset_of(const adze_tensor *t, int64_t index)
{
    int64_t at = 0;
    for (int d = t->rank - 1; d >= 0; d--) {
        at += index % t->shape[d] * t->stride[d];
        index /= t->shape[d];
    }
    return at;
}

/* Some indices of an output, with the first and the last one, and what the definition gives there. */
typedef struct sample {
    int64_t n, index[SAMPLED_AT];
    adze_value want[SAMPLED_AT];
} sample;

/* `image` is the host's copy of a set, before the call. */
static void take_samples(adze_trial *t, const char *image, const adze_kernel *kernel, sample *samples)
{
    const adze_op *op = t->whole->line.op;
    adze_line line = t->whole->line;
    uint64_t state = 1;
    for (int f = 0; op->fields[f].name; f++)
        if (t->whole->memory_of[f] >= 0)
            adze_line_tensor(&line, f)->data =
                (char *)(uintptr_t)image + t->set_at[t->whole->memory_of[f]] + t->whole->place[f];
    for (int f = 0, out = 0; op->fields[f].name; f++) {
        const adze_tensor *to = adze_line_tensor(&line, f);
        if (!adze_is_output(&op->fields[f]))
            continue;
        const int64_t count = to->dtype ? adze_count(to) : 0;
        sample *s = &samples[out];
        for (s->n = 0; s->n < SAMPLED_AT && s->n < count; s->n++)
            s->index[s->n] = count <= SAMPLED_AT     ? s->n
                             : s->n == 0             ? 0
                             : s->n + 1 < SAMPLED_AT ? (int64_t)(adze_random_uniform(&state) * (double)count)
                                                     : count - 1;
        op->samples->reference_at(line.args, op->samples->sums(kernel), out, s->n, s->index, s->want);
        out++;
    }
}

static void judge_taken(adze_trial *t, char *host, int f, const sample *s, adze_verdict *v)
{
    adze_tensor out = *adze_line_tensor(&t->whole->line, f);
    out.data = host + t->whole->place[f];
    for (int64_t i = 0; i < s->n && !v->why[0]; i++) {
        double ulps;
        const double got = adze_get(&out, offset_of(&out, s->index[i]));
        const double share = adze_error_share(out.dtype, got, s->want[i], &ulps);
        v->worst = share > v->worst ? share : v->worst;
        v->ulps = ulps > v->ulps ? ulps : v->ulps;
        if (share > 1)
            snprintf(v->why, sizeof v->why, "element %lld of %s, in the whole call, is %.9g, must be %.9g",
                     (long long)s->index[i], t->whole->line.op->fields[f].name, got, s->want[i].v);
    }
}

static void judge_sample(adze_trial *t, char *host, int f, const adze_value *want, adze_verdict *v)
{
    adze_tensor out = *adze_line_tensor(&t->whole->line, f);
    const int64_t count = adze_count(&out), verified = adze_count(adze_line_tensor(&t->small->line, f));
    const int64_t step = count / SAMPLED * 2 + 1, samples = count / step + 1; /* an odd step meets every column */
    out.data = host + t->whole->place[f];
    for (int64_t n = 0; n < samples && !v->why[0]; n++) {
        const int64_t i = n + 1 < samples ? n * step : count - 1;
        double ulps;
        if (want[i % verified].e == ADZE_UNCHANGED)
            continue;
        const double got = adze_get(&out, offset_of(&out, i));
        const double share = adze_error_share(out.dtype, got, want[i % verified], &ulps);
        v->worst = share > v->worst ? share : v->worst;
        v->ulps = ulps > v->ulps ? ulps : v->ulps;
        if (share > 1)
            snprintf(v->why, sizeof v->why, "element %lld of %s, in a call of %lld rows, is %.9g, must be %.9g",
                     (long long)i, t->whole->line.op->fields[f].name, (long long)t->rows, got, want[i % verified].v);
    }
}

/* Runs one kernel on the first set again, and compares a sample of each output with the definition. */
static const char *judge_whole(adze_trial *t, adze_attempt *a)
{
    const adze_op *op = t->whole->line.op;
    const adze_stream stream = t->whole->stream;
    char *image = malloc(t->set_bytes);
    if (!image)
        return "no memory to judge the whole call";
    fill_set(t, image);
    sample *samples = op->samples ? calloc(ADZE_FIELDS_MAX, sizeof *samples) : NULL;
    if (samples)
        take_samples(t, image, a->kernel, samples);
    const char *message = adze_memory_write(stream, t->sets, image, t->set_bytes);
    use_set(t, 0);
    if (!message && adze_dispatch_to(op, a->kernel, stream, t->whole->args) != ADZE_OK)
        snprintf(a->verdict.why, sizeof a->verdict.why, "%s", adze_last_error());
    if (!message)
        message = adze_memory_sync(stream);
    if (!message)
        message = adze_memory_read(stream, image, t->sets, t->set_bytes);
    for (int f = 0, out = 0; op->fields[f].name && !message; f++)
        if (adze_is_output(&op->fields[f])) {
            char *host = image + t->set_at[t->whole->memory_of[f] < 0 ? 0 : t->whole->memory_of[f]];
            if (samples && t->wanted.values[out])
                judge_taken(t, host, f, &samples[out], &a->verdict);
            else if (t->wanted.values[out])
                judge_sample(t, host, f, adze_wanted_of(&t->wanted, a->kernel)[out], &a->verdict);
            out++;
        }
    free(samples);
    free(image);
    return message;
}

/* ---- Timing ---- */

static double time_on_cpu(adze_trial *t, const adze_kernel *kernel, double least_us)
{
    int64_t calls = 0, batch = 1;
    double us = 0;
    const double begin = adze_now_us();
    while (us < least_us) {
        for (int64_t i = 0; i < batch; i++)
            call_next(t, kernel);
        calls += batch;
        us = adze_now_us() - begin;
        batch = us < least_us / 8 ? calls : 1 + (int64_t)((least_us - us) / us * (double)calls / 2);
    }
    return us / (double)calls;
}

/* Fewer samples, but three, of calls that are so long that they would take more than a second. */
static int time_in_turn(adze_trial *t, const adze_effort *effort, double *samples)
{
    const double begin = adze_now_us();
    int s = 0;
    while (s < effort->samples && (s < 3 || adze_now_us() - begin < 1e6)) {
        for (int k = 0; k < t->attempts; k++)
            if (!t->attempt[k].verdict.why[0])
                samples[(2 * k + 1) * effort->samples + s] = time_on_cpu(t, t->attempt[k].kernel, effort->sample_us);
        s++;
    }
    return s;
}

static int graph_nodes(const adze_trial *t, const adze_effort *effort)
{
    const double us = (double)(t->read + t->written) / 4.0e6 + 1; /* of a call, at best */
    const int64_t nodes = (int64_t)(effort->sample_us / us);
    const int64_t least = t->set_count > NODES_MIN ? t->set_count : NODES_MIN;
    return (int)(nodes < least ? least : nodes > NODES_MAX ? NODES_MAX : nodes);
}

static const char *record(adze_trial *t, adze_attempt *a, int pdl, int nodes)
{
    adze_gpu_pdl(pdl);
    const char *message = adze_graph_begin(t->whole->stream);
    adze_status status = ADZE_OK;
    t->next = 0;
    for (int i = 0; i < nodes && !message && status == ADZE_OK; i++)
        status = call_next(t, a->kernel);
    if (!message)
        message = adze_graph_end(t->whole->stream, &a->graph[pdl]);
    adze_gpu_pdl(1);
    return status != ADZE_OK ? adze_last_error() : message;
}

/* Before each graph the cache is filled with other memory; that also keeps the device busy until the graph is
   enqueued. */
static const char *time_on_gpu(adze_trial *t, const adze_effort *effort, double *samples)
{
    const adze_stream stream = t->whole->stream;
    const int nodes = graph_nodes(t, effort);
    char *other = adze_memory_take(stream, ADZE_GPU_COLD);
    const char *message = other ? NULL : "no memory to clear the cache with";
    for (int k = 0; k < t->attempts && !message; k++)
        for (int pdl = effort->race; pdl < 2 && !message && !t->attempt[k].verdict.why[0]; pdl++)
            message = record(t, &t->attempt[k], pdl, nodes);
    double best = INFINITY;
    for (int s = -1; s < effort->samples && !message; s++) /* the first round is not counted */
        for (int k = 0; k < 2 * t->attempts && !message; k++) {
            double us = 0;
            void *graph = t->attempt[k / 2].graph[k % 2];
            if (!graph || (t->attempt[k / 2].slow && s > 0))
                continue;
            message = adze_gpu_pass(stream, ADZE_READ, 4, other, other, NULL, ADZE_GPU_COLD);
            if (!message)
                message = adze_graph_time(stream, graph, &us);
            best = us < best ? us : best;
            t->attempt[k / 2].slow = effort->race && s == 0 && us > SLOW * best;
            if (s >= 0)
                samples[k * effort->samples + s] = us / nodes;
        }
    for (int k = 0; k < 2 * t->attempts; k++)
        adze_graph_free(t->attempt[k / 2].graph[k % 2]);
    if (other)
        adze_memory_give(stream, other);
    return message;
}

/* The winner of a race runs the whole call; if it is wrong there, the next one does. */
static const char *judge_winner(adze_trial *t)
{
    for (;;) {
        adze_attempt *winner = NULL;
        for (int k = 0; k < t->attempts; k++)
            if (!t->attempt[k].verdict.why[0] && (!winner || t->attempt[k].us < winner->us))
                winner = &t->attempt[k];
        const char *message = winner ? judge_whole(t, winner) : NULL;
        if (message || !winner || !winner->verdict.why[0])
            return message;
    }
}

int adze_trial_time(adze_trial *t, const adze_effort *effort, char *error, size_t error_size)
{
    const int cpu = t->whole->stream.device == ADZE_CPU;
    if (t->read + t->written == 0 || t->rows == 0)
        return 1;
    const char *message = make_sets(t);
    if (!message)
        message = make_scratch(t);
    use_set(t, 0);
    int n = 0;
    /* A kernel that takes the small call may refuse the whole one. */
    for (int k = 0; k < t->attempts && !message; k++) {
        adze_attempt *a = &t->attempt[k];
        if (!adze_accepts(a->kernel, t->whole->stream, t->whole->args))
            continue;
        if (!a->verdict.why[0] && !effort->race)
            message = judge_whole(t, a);
        t->attempt[n++] = *a;
    }
    t->attempts = n;
    double *samples = calloc((size_t)effort->samples * 2 * (size_t)(n + 1), sizeof *samples);
    int taken = effort->samples;
    if (!message && !cpu)
        message = time_on_gpu(t, effort, samples);
    if (!message && cpu)
        taken = time_in_turn(t, effort, samples);
    for (int k = 0; k < n && !message; k++) {
        adze_attempt *a = &t->attempt[k];
        double unused;
        a->us_alone = adze_median(samples + 2 * k * effort->samples, a->slow ? 1 : taken, &unused);
        a->us = adze_median(samples + (2 * k + 1) * effort->samples, a->slow ? 1 : taken, &a->spread);
    }
    free(samples);
    if (!message && effort->race)
        message = judge_winner(t);
    if (message)
        snprintf(error, error_size, "%s", message);
    return message == NULL;
}

void adze_trial_free(adze_trial *t)
{
    if (t->sets)
        adze_memory_give(t->whole->stream, t->sets);
    adze_wanted_free(&t->wanted);
    free(t->variants);
    for (int i = 0; i < 2; i++) {
        adze_job *job = i ? t->whole : t->small;
        if (job)
            adze_job_free(job);
        free(job);
    }
    memset(t, 0, sizeof *t);
}
