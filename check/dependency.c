/* dependency.c - each CUDA kernel between a slow producer of all it reads and a consumer of what it writes.

   At first the call's inputs hold other values. The producer lets the kernel start at once, and writes the true
   inputs much later, over outputs and scratch as well: a kernel that did not wait has read the wrong values, or
   written too early. */
#include "dependency.h"

#include "gpu.h"
#include "producer.h"

#include <stdlib.h>
#include <string.h>

enum {
    NAN_BYTES = 0xff,    /* a NaN in every float type */
    FINITE_BYTES = 0x40, /* 2 to 33 in every float type */
};

#if ADZE_CUDA
int adze_cuda_pdl(int device); /* src/cuda/device.cu */
#else
static int adze_cuda_pdl(int device)
{
    (void)device;
    return 0;
}
#endif

const char *adze_dependency_open(adze_dependency *d, int device)
{
    memset(d, 0, sizeof *d);
    d->stream.device = device;
    return adze_cuda_pdl(device) ? adze_gpu_open(&d->stream) : "kernels do not overlap on this device";
}

void adze_dependency_close(adze_dependency *d)
{
    if (d->memory)
        adze_memory_give(d->stream, d->memory);
    if (d->stream.handle)
        adze_gpu_close(d->stream);
    memset(d, 0, sizeof *d);
}

/* The inputs that ADZE_CONST_CACHE calls constant, but for the last keys. */
static int is_cache(const char *name)
{
    static const char *const names[] = {"k", "v", "k_scale", "v_scale", "lengths", "block_table"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0)
            return 1;
    return 0;
}
/* The inputs that ADZE_CONST_WEIGHTS calls constant. */
static int is_constant(const char *name)
{
    static const char *const names[] = {"weight", "q_weight", "k_weight",    "bias",      "cos",   "sin",   "w",
                                        "w2",     "w3",       "norm_weight", "norm_bias", "bias2", "bias3", "sinks"};
    static const char *const others[] = {"block_table", "k_scale", "v_scale"}; /* of a cache */
    const size_t n = strlen(name);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strcmp(name, others[i]) == 0)
            return 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0)
            return 1;
    return (n > 6 && strcmp(name + n - 6, "_table") == 0) || strstr(name, "_scale") || strstr(name, "_zero");
}

static const adze_tensor *tensor_of(const adze_job *job, int f)
{
    return (const void *)(job->line.args + job->line.op->fields[f].offset);
}

/* Whether a weight or table lies in the memory of another input: then it cannot stay while that one is written. */
static int shares_memory(const adze_job *job)
{
    const adze_field *fields = job->line.op->fields;
    for (int f = 0; fields[f].name; f++)
        for (int g = 0; fields[g].name; g++)
            if (adze_is_input(&fields[f]) && adze_is_input(&fields[g]) && job->memory_of[f] >= 0 &&
                job->memory_of[f] == job->memory_of[g] && is_constant(fields[f].name) && !is_constant(fields[g].name))
                return 1;
    return 0;
}

/* The memory of a call before the producer has written: its inputs are others. Whole numbers, which may be indices,
   are 0. */
static void spoil(const adze_job *job, int memory, uint32_t flags, int byte, char *image)
{
    const adze_field *fields = job->line.op->fields;
    for (int f = 0; fields[f].name; f++) {
        const adze_tensor *t = tensor_of(job, f);
        if (!adze_is_input(&fields[f]) || job->memory_of[f] != memory ||
            ((flags & ADZE_CONST_WEIGHTS) && is_constant(fields[f].name)) ||
            ((flags & ADZE_CONST_CACHE) && is_cache(fields[f].name)))
            continue;
        adze_tensor_fill(image + job->place[f], t, t->dtype == ADZE_I32 || t->dtype == ADZE_I64 ? 0 : byte);
    }
}

static size_t aligned(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* The bytes that are judged of a call, and those of its scratch. */
static size_t total(const adze_job *job, size_t *scratch)
{
    size_t bytes = 0;
    for (int m = 0; m < ADZE_FIELDS_MAX; m++)
        bytes += aligned(job->memory[m].bytes);
    *scratch = job->scratch ? ((const adze_call *)(const void *)job->args)->scratch_size : 0;
    return bytes;
}

static const char *make_room(adze_dependency *d, size_t bytes)
{
    if (bytes <= d->bytes)
        return NULL;
    if (d->memory)
        adze_memory_give(d->stream, d->memory);
    d->bytes = 0;
    d->memory = adze_memory_take(d->stream, bytes);
    if (!d->memory)
        return "no memory for the producer";
    d->bytes = bytes;
    return NULL;
}

/* Writes what the memory holds at first, and what the producer will write, and says from where to where. Of the room,
   the first half is for the producer and the second for the consumer. */
static const char *prepare(const adze_dependency *d, const adze_job *job, uint32_t flags, int byte,
                           adze_copies *produced, adze_copies *consumed)
{
    size_t scratch, at = 0;
    const size_t half = total(job, &scratch) + aligned(scratch);
    const char *message = NULL;
    char *image = malloc(half);
    if (!image)
        return "no memory for the producer";
    produced->count = consumed->count = 0;
    for (int m = 0; m < ADZE_FIELDS_MAX && !message; m++) {
        const adze_memory *memory = &job->memory[m];
        if (!memory->origin)
            continue;
        adze_job_image(memory, ADZE_LAST_POISON, image);
        message = adze_memory_write(d->stream, d->memory + at, image, memory->bytes);
        spoil(job, m, flags, byte, image);
        if (!message)
            message = adze_memory_write(d->stream, memory->work, image, memory->bytes);
        produced->part[produced->count].to = memory->work;
        produced->part[produced->count].from = d->memory + at;
        produced->part[produced->count++].bytes = memory->bytes;
        consumed->part[consumed->count].to = d->memory + half + at;
        consumed->part[consumed->count].from = memory->work;
        consumed->part[consumed->count++].bytes = memory->bytes;
        at += aligned(memory->bytes);
    }
    if (scratch && !message) { /* it still holds the last run's values, which may be right */
        memset(image, NAN_BYTES, scratch);
        message = adze_memory_write(d->stream, job->scratch, image, scratch);
        memset(image, FINITE_BYTES, scratch);
        if (!message)
            message = adze_memory_write(d->stream, d->memory + at, image, scratch);
        produced->part[produced->count].to = job->scratch;
        produced->part[produced->count].from = d->memory + at;
        produced->part[produced->count++].bytes = scratch / 16 * 16;
    }
    free(image);
    return message;
}

/* Enqueues the three kernels. */
static const char *enqueue(const adze_dependency *d, const adze_job *job, const adze_kernel *kernel, uint32_t flags,
                           const adze_copies *produced, const adze_copies *consumed)
{
    _Alignas(16) char args[ADZE_ARGS_MAX];
    memcpy(args, job->args, sizeof args);
    ((adze_call *)(void *)args)->flags = flags;
    const char *message = adze_gpu_produce(d->stream, produced);
    if (!message && adze_dispatch_to(job->line.op, kernel, d->stream, args) != ADZE_OK)
        message = adze_last_error();
    return message ? message : adze_gpu_consume(d->stream, consumed);
}

static const char *run_in_graph(const adze_dependency *d, const adze_job *job, const adze_kernel *kernel,
                                uint32_t flags, const adze_copies *produced, const adze_copies *consumed)
{
    void *graph = NULL;
    double us;
    const char *message = adze_graph_begin(d->stream);
    if (message)
        return message;
    message = enqueue(d, job, kernel, flags, produced, consumed);
    const char *ended = adze_graph_end(d->stream, &graph);
    message = message ? message : ended;
    if (!message)
        message = adze_graph_time(d->stream, graph, &us);
    adze_graph_free(graph);
    return message;
}

/* Compares with the result of adze_judge(), and names the tensor of the first byte that differs. */
static const char *compare(const adze_job *job, const adze_copies *consumed, adze_stream stream, char *why,
                           size_t size)
{
    for (int m = 0, part = 0; m < ADZE_FIELDS_MAX; m++) {
        const adze_memory *memory = &job->memory[m];
        if (!memory->origin)
            continue;
        char *got = malloc(memory->bytes);
        const char *message =
            !got ? "no memory to compare" : adze_memory_read(stream, got, consumed->part[part++].to, memory->bytes);
        size_t i = 0;
        while (!message && i < memory->bytes && got[i] == memory->result[i])
            i++;
        free(got);
        if (message)
            return message;
        if (i < memory->bytes) {
            snprintf(why, size, "the memory of %s differs %lld bytes from its start", job->line.op->fields[m].name,
                     (long long)i - (long long)memory->data_at);
            return NULL;
        }
    }
    return NULL;
}

void adze_dependency_run(adze_dependency *d, const adze_job *job, const adze_kernel *kernel, uint32_t flags,
                         int in_graph, char *why, size_t size)
{
    adze_copies produced, consumed;
    size_t scratch;
    /* NaN and finite values in turn: a maximum may hide a NaN, and a clamp a finite value. */
    const int byte = in_graph == !(flags & ADZE_CONST_WEIGHTS) ? FINITE_BYTES : NAN_BYTES;
    char differs[128] = "";
    const size_t bytes = total(job, &scratch);
    const char *message = make_room(d, 2 * bytes + 2 * aligned(scratch));
    if (!message)
        message = prepare(d, job, flags, byte, &produced, &consumed);
    if (!message && in_graph)
        message = run_in_graph(d, job, kernel, flags, &produced, &consumed);
    else if (!message)
        message = enqueue(d, job, kernel, flags, &produced, &consumed);
    const char *ended = adze_memory_sync(d->stream);
    message = message ? message : ended;
    if (!message)
        message = compare(job, &consumed, d->stream, differs, sizeof differs);
    d->calls++;
    if (!message && !differs[0])
        return;
    snprintf(why, size, "behind a producer in a %s%s: %s", in_graph ? "graph" : "stream",
             flags & ADZE_CONST_WEIGHTS ? ", flags=const_weights" : "", message ? message : differs);
}

void adze_dependency_judge(adze_dependency *d, const adze_job *job, const adze_kernel *kernel, adze_verdict *v)
{
    const uint32_t flags = ((const adze_call *)(const void *)job->args)->flags;
    for (int constant = 0; constant < 2; constant++)
        for (int in_graph = 0; in_graph < 2 && !v->why[0]; in_graph++) {
            if (constant ? shares_memory(job) : (flags & ADZE_CONST_WEIGHTS) != 0)
                continue;
            adze_dependency_run(d, job, kernel, constant ? flags | ADZE_CONST_WEIGHTS : flags, in_graph, v->why,
                                sizeof v->why);
        }
}
