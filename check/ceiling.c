/* ceiling.c - plain passes over memory on the CPU, and the ceiling for a mix of reads and writes. */
#include "ceiling.h"

#include "gpu.h"
#include "kernel.h"
#include "timing.h"

#include <string.h>
#if defined(__x86_64__)
#    include <emmintrin.h>
#endif

enum { LINE = 64, PIECE = 1 << 16, PLACES = 4, AHEAD = 8 * LINE, CPU_TRIES = 3, GPU_TRIES = 5, GPU_PASSES = 8 };
typedef uint64_t vec __attribute__((vector_size(16)));
/* A line in registers: without it gcc at -O2 sends each through the stack. */
#define UNROLL _Pragma("GCC unroll 4")

typedef struct pass_call {
    adze_pass pass;
    int stream; /* stores go past the cache */
    int places; /* lines at PLACES places in turn, prefetched */
    char *out;
    const char *a, *b;
    int64_t pieces;
    _Atomic uint64_t sink;
} pass_call;

static inline void stream_line(char *to, const vec *v)
{
#if defined(__x86_64__)
    for (int i = 0; i < 4; i++)
        _mm_stream_si128((__m128i *)(void *)(to + 16 * i), (__m128i)v[i]);
#elif defined(__aarch64__)
    __asm__ volatile("stnp %q1, %q2, [%0]\n\tstnp %q3, %q4, [%0, #32]"
                     :
                     : "r"(to), "w"(v[0]), "w"(v[1]), "w"(v[2]), "w"(v[3])
                     : "memory");
#else
    memcpy(to, v, LINE);
#endif
}

static uint64_t read_piece(const char *from, int64_t bytes)
{
    vec sum[4] = {{0}};
    for (int64_t at = 0; at < bytes; at += LINE) {
        UNROLL
        for (int i = 0; i < 4; i++)
            sum[i] |= *(const vec *)(const void *)(from + at + 16 * i);
    }
    const vec all = (sum[0] | sum[1]) | (sum[2] | sum[3]);
    return all[0] | all[1];
}

/* The same of lines at several places. One load brings a line: with few instructions a processor has more lines under
   way. */
static uint64_t read_places(const char *from, int64_t apart)
{
    vec all = {0};
    for (int64_t at = 0; at < PIECE / PLACES; at += LINE)
        for (int i = 0; i < PLACES; i++) {
            __builtin_prefetch(from + i * apart + at + AHEAD);
            all |= *(const vec *)(const void *)(from + i * apart + at);
        }
    return all[0] | all[1];
}

static inline void write_line(const pass_call *c, int64_t at)
{
    vec v[4] = {{0}};
    UNROLL
    for (int i = 0; i < 4; i++) {
        if (c->pass != ADZE_WRITE)
            v[i] = *(const vec *)(const void *)(c->a + at + 16 * i);
        if (c->pass == ADZE_TWO_READS)
            v[i] ^= *(const vec *)(const void *)(c->b + at + 16 * i);
        if (!c->stream)
            *(vec *)(void *)(c->out + at + 16 * i) = v[i];
    }
    if (c->stream)
        stream_line(c->out + at, v);
}
static void write_piece(const pass_call *c, int64_t piece)
{
    for (int64_t at = 0; at < PIECE; at += LINE)
        write_line(c, piece * PIECE + at);
}
static void write_places(const pass_call *c, int64_t piece)
{
    const int64_t apart = c->pieces * (PIECE / PLACES);
    for (int64_t at = piece * (PIECE / PLACES); at < (piece + 1) * (PIECE / PLACES); at += LINE)
        for (int64_t i = at; i < PLACES * apart; i += apart) {
            if (c->pass != ADZE_WRITE)
                __builtin_prefetch(c->a + i + AHEAD);
            if (c->pass == ADZE_TWO_READS)
                __builtin_prefetch(c->b + i + AHEAD);
            write_line(c, i);
        }
}

static void pass_body(void *context, int64_t begin, int64_t end)
{
    pass_call *c = context;
    for (int64_t piece = begin; piece < end; piece++)
        if (c->pass != ADZE_READ)
            (c->places ? write_places : write_piece)(c, piece);
        else if (c->places)
            c->sink |= read_places(c->a + piece * (PIECE / PLACES), c->pieces * (PIECE / PLACES));
        else
            c->sink |= read_piece(c->a + piece * PIECE, PIECE);
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

#if !ADZE_CUDA
const char *adze_gpu_pass(adze_stream stream, adze_pass pass, int variant, void *out, const void *a, const void *b,
                          size_t bytes)
{
    (void)stream, (void)pass, (void)variant, (void)out, (void)a, (void)b, (void)bytes;
    return "this build has no CUDA";
}
#endif

static const int arrays_of[ADZE_PASSES] = {1, 3, 2, 1};

static void better(double *rate, double bytes, double us)
{
    const double seen = bytes / us / 1000;
    if (us > 0 && seen > *rate)
        *rate = seen;
}

/* The arrays together are as large as the sets that calls rotate through. */
static void raise_on_cpu(adze_ceilings *ceilings, char *memory, size_t bytes)
{
    for (int try = 0; try < CPU_TRIES; try++)
        for (int pass = 0; pass < ADZE_PASSES; pass++)
            for (int way = 0; way < (pass == ADZE_READ ? 2 : 4); way++) {
                const int64_t pieces = (int64_t)(bytes / PIECE) / arrays_of[pass];
                pass_call c = {(adze_pass)pass, way / 2, way % 2, memory, NULL, NULL, pieces, 0};
                c.a = memory + (pass == ADZE_READ ? 0 : pieces * PIECE);
                c.b = memory + 2 * pieces * PIECE;
                const double begin = adze_now_us();
                adze_parallel_for(pieces, 1, pass_body, &c);
                better(&ceilings->rate[pass], (double)(pieces * PIECE * arrays_of[pass]), adze_now_us() - begin);
            }
}

static void raise_flops_on_cpu(adze_ceilings *ceilings)
{
    for (int try = 0; try < CPU_TRIES; try++)
        for (int unit = 0; unit < ADZE_UNITS; unit++)
            for (int way = 0; way < (unit == ADZE_UNIT_FLOAT ? 1 : ADZE_MATRIX_WAYS); way++) {
                const double begin = adze_now_us();
                const double flops = adze_cpu_flops((adze_unit)unit, way);
                better(&ceilings->flops[unit], flops, adze_now_us() - begin);
            }
}

/* The shortest of several, too. */
static const char *raise_flops_on_gpu(adze_ceilings *ceilings, adze_stream stream, char *memory)
{
    const char *message = NULL;
    for (int unit = 0; unit <= ADZE_UNITS && !message; unit++) { /* the last round is for the floor */
        void *graph = NULL;
        double flops = 0;
        message = adze_graph_begin(stream);
        for (int i = 0; i < GPU_PASSES && !message; i++)
            message = unit < ADZE_UNITS ? adze_gpu_flops(stream, (adze_unit)unit, memory, &flops)
                                        : adze_gpu_pass(stream, ADZE_WRITE, 0, memory, NULL, NULL, 4096);
        if (!message)
            message = adze_graph_end(stream, &graph);
        for (int try = 0; try < GPU_TRIES && !message; try++) {
            double us = 0;
            message = adze_graph_time(stream, graph, &us);
            if (unit < ADZE_UNITS)
                better(&ceilings->flops[unit], GPU_PASSES * flops, us);
            else if (us > 0 && (ceilings->floor_us == 0 || us / GPU_PASSES < ceilings->floor_us))
                ceilings->floor_us = us / GPU_PASSES;
        }
        adze_graph_free(graph);
    }
    return message;
}

static const char *raise_on_gpu(adze_ceilings *ceilings, adze_stream stream, char *memory, size_t bytes)
{
    for (int pass = 0; pass < ADZE_PASSES; pass++)
        for (int variant = 0; variant < ADZE_GPU_VARIANTS; variant++) {
            const size_t each = bytes / (size_t)arrays_of[pass] / 4096 * 4096;
            char *const a = memory + (pass == ADZE_READ ? 0 : each), *const b = memory + 2 * each;
            void *graph = NULL;
            const char *message = adze_graph_begin(stream);
            for (int i = 0; i < GPU_PASSES && !message; i++)
                message = adze_gpu_pass(stream, (adze_pass)pass, variant, memory, a, b, each);
            if (!message)
                message = adze_graph_end(stream, &graph);
            for (int try = 0; try < GPU_TRIES && !message; try++) {
                double us = 0;
                message = adze_gpu_pass(stream, ADZE_COPY, 4, memory, memory + bytes / 2, NULL, bytes / 2);
                if (!message)
                    message = adze_graph_time(stream, graph, &us);
                better(&ceilings->rate[pass], GPU_PASSES * (double)(each * (size_t)arrays_of[pass]), us);
            }
            adze_graph_free(graph);
            if (message)
                return message;
        }
    return NULL;
}

const char *adze_ceilings_raise(adze_ceilings *ceilings, adze_stream stream)
{
    const int cpu = stream.device == ADZE_CPU;
    const size_t bytes = (cpu ? 1 : 4) * adze_cold_bytes(stream) / PIECE * PIECE;
    char *memory = adze_memory_take(stream, bytes);
    if (!memory)
        return "no memory to measure the ceilings";
    const char *message = NULL;
    if (cpu) {
        memset(memory, 0, bytes);
        raise_on_cpu(ceilings, memory, bytes);
        raise_flops_on_cpu(ceilings);
    } else {
        message = adze_gpu_pass(stream, ADZE_WRITE, 4, memory, NULL, NULL, bytes);
        if (!message)
            message = raise_on_gpu(ceilings, stream, memory, bytes);
        if (!message)
            message = raise_flops_on_gpu(ceilings, stream, memory);
    }
    adze_memory_give(stream, memory);
    return message;
}

/* Between the measured mixes the rate is interpolated by the share of bytes that are written. */
double adze_ceiling_of(const adze_ceilings *c, int64_t read, int64_t written)
{
    static const double at[ADZE_PASSES] = {0, 1.0 / 3, 0.5, 1};
    const double share = (double)written / (double)(read + written);
    int i = 0;
    while (i + 2 < ADZE_PASSES && share > at[i + 1])
        i++;
    return c->rate[i] + (c->rate[i + 1] - c->rate[i]) * (share - at[i]) / (at[i + 1] - at[i]);
}

double adze_flops_of(const adze_ceilings *c, int dtype)
{
    return dtype != ADZE_F32 && c->flops[ADZE_UNIT_MATRIX] > 0 ? c->flops[ADZE_UNIT_MATRIX]
                                                               : c->flops[ADZE_UNIT_FLOAT];
}
