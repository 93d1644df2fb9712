/* choices.c - which variant the CUDA kernels choose on GPUs that are not here: for every case of the checks, aligned
   as its line says, with and without scratch. Nothing is launched. What device.cu says of a GPU is this file's.

   With files of `adze tune --record`, of an H200: what the choices of this build cost against the fastest variants.
 */
#include "kernel.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data.h"
#include "expect.h"
#include "suite.h"

struct cuda_limits { /* as launch.cuh has it */
    int sm, sm_count, sm_threads;
    int64_t block_shared;
};
static const struct cuda_limits gpus[] = {
    {90, 132, 2048, 232448},  {80, 108, 2048, 166912}, {75, 40, 1024, 65536},
    {120, 170, 1536, 101376}, {90, 16, 2048, 232448}, /* a part of one */
};
static struct cuda_limits gpu;

#define OURS __attribute__((weak)) /* a build without CUDA has some of these */
const struct cuda_limits *adze_cuda_limits(int device);
int adze_cuda_clusters(int device), adze_cuda_clustered(int device, int size), adze_cuda_tensor_cores(int device);
int adze_cuda_pdl(int device);
void adze_cuda_set_pdl(int on);
__attribute__((weak)) int adze_gemm_cuda_lt_accepts(adze_stream stream, const void *args);
const void *adze_cuda_modules;

const struct cuda_limits *adze_cuda_limits(int device)
{
    return device == 0 ? &gpu : NULL;
}
int adze_cuda_clusters(int device)
{
    return device == 0 && gpu.sm >= 90;
}
/* Clusters lie within a GPC, and leave some of its multiprocessors empty: on an H200 there are at most 31 of 4 blocks
   and 15 of 8, by what group_norm chose there (2026-11-19). */
int adze_cuda_clustered(int device, int size)
{
    return adze_cuda_clusters(device) ? gpu.sm_count * 15 / 16 / size : 0;
}
int adze_cuda_tensor_cores(int device)
{
    return device == 0 && gpu.sm >= 80;
}
int adze_cuda_pdl(int device)
{
    return adze_cuda_clusters(device);
}
OURS int adze_cuda_sm(int device)
{
    return device == 0 ? gpu.sm : 0;
}
OURS int adze_cuda_sm_count(int device)
{
    return device == 0 ? gpu.sm_count : 0;
}
OURS int adze_cuda_count(void)
{
    return 1;
}
OURS void adze_cuda_name(int device, char *to, size_t size)
{
    snprintf(to, size, "GPU %d", device);
}
void adze_cuda_set_pdl(int on)
{
    (void)on;
}
OURS adze_status adze_cuda_call(adze_run_fn run, adze_stream stream, const void *args)
{
    (void)run, (void)stream, (void)args;
    return ADZE_NO_KERNEL;
}
OURS adze_status adze_cuda_prepare(int device)
{
    return device == 0 ? ADZE_OK : ADZE_DEVICE;
}

/* Maps of tensors are made of no memory: the kernels that need them are chosen as on a GPU. */
static int encode_map(void *map, int type, unsigned rank, void *data, const uint64_t *sizes, const uint64_t *strides,
                      const uint32_t *box, const uint32_t *each, int interleave, int swizzle, int promotion, int fill)
{
    (void)map, (void)type, (void)rank, (void)data, (void)sizes, (void)strides, (void)box, (void)each;
    (void)interleave, (void)swizzle, (void)promotion, (void)fill;
    return 0;
}
void *adze_cuda_map_encoder(void);
void *adze_cuda_map_encoder(void)
{
    void *entry;
    int (*const encode)(void *, int, unsigned, void *, const uint64_t *, const uint64_t *, const uint32_t *,
                        const uint32_t *, int, int, int, int) = encode_map;
    memcpy(&entry, &encode, sizeof entry);
    return entry;
}

static char now[8192];
static long choices, none;

static void crashed(int number)
{
    printf("FAIL signal %d: sm_%d, %d SMs: %s\n0 passed, 1 failed, 0 skipped\n", number, gpu.sm, gpu.sm_count, now);
    fflush(stdout);
    _exit(1);
}

/* Gives the tensors of a line addresses, of no memory, that are aligned as it says. */
static void place(const adze_line *line, void *args)
{
    for (int f = 0; line->op->fields[f].name; f++) {
        adze_line copy = *line;
        const adze_tensor *const t = adze_line_tensor(&copy, f);
        if (!t || !t->dtype)
            continue;
        adze_tensor *const own = (adze_tensor *)(void *)((char *)args + ((const char *)t - copy.args));
        const uint64_t base = (uint64_t)(line->base[f] >= 0 ? line->base[f] : f) + 1;
        own->data = (void *)(uintptr_t)((base << 40) + (uint64_t)line->offset[f] * adze_dtype_size(t->dtype));
    }
}

/* All choices of a call: the kernel's own, and each variant by name. */
static void choose(const adze_op *op, const void *args)
{
    const adze_stream stream = {0, NULL};
    for (const adze_kernel *k = op->kernels; k->name; k++) {
        if (!k->on_cuda || !k->variants)
            continue;
        for (int want = -1; want < 0 || k->variants->list[want].name; want++) {
            adze_choice choice = {.want = want, .dry = 1, .ran = -1};
            const adze_status status = k->variants->run(stream, args, &choice);
            choices++;
            none += want < 0 && status != ADZE_OK;
        }
    }
    if (op == &adze_op_gemm && adze_gemm_cuda_lt_accepts)
        adze_gemm_cuda_lt_accepts(stream, args);
}

/* The args of a line, placed; NULL, and why in `error`, if it is not one. */
static void *args_of(const adze_op *op, const char *text, adze_line *line, char *error, size_t error_size)
{
    static adze_job job;
    static _Alignas(16) char args[ADZE_ARGS_MAX];
    memset(&job, 0, sizeof job);
    if (!adze_line_parse(line, op, text, error, error_size) ||
        !adze_job_layout(&job, line, (adze_stream){ADZE_CPU, NULL}, error, error_size))
        return NULL;
    memcpy(args, job.line.args, sizeof args);
    place(&job.line, args);
    return args;
}

static void try_line(const adze_op *op, const char *text)
{
    static adze_line line;
    char error[512];
    snprintf(now, sizeof now, "%s %s", op->name, text);
    void *const args = args_of(op, text, &line, error, sizeof error);
    if (!args) {
        expect(0, error);
        return;
    }
    adze_call *const call = args;
    for (int with = 0; with < 2; with++) {
        call->scratch = (void *)(uintptr_t)4096;
        call->scratch_size = with ? (size_t)1 << 34 : 0;
        choose(op, args);
    }
}

/* ---- Times of variants ---- */

/* The variant that a call takes, with as much scratch as it wants; NULL: none, or none that can be told here. */
static const char *chosen(const char *text)
{
    static adze_line line;
    char error[512];
    void *const args = args_of(NULL, text, &line, error, sizeof error);
    for (const adze_kernel *k = args ? line.op->kernels : NULL; k && k->name; k++) {
        if (!k->on_cuda || !k->variants)
            continue;
        adze_choice choice = {.want = -1, .dry = 1, .untuned = 1, .ran = -1};
        adze_call *const call = args;
        call->scratch = (void *)(uintptr_t)4096, call->scratch_size = (size_t)1 << 34;
        if (k->variants->run((adze_stream){0, NULL}, args, &choice) == ADZE_OK && choice.ran >= 0)
            return k->variants->list[choice.ran].name;
    }
    return NULL;
}

static void weigh(const char *path)
{
    static char text[8192], call[8192];
    FILE *const file = fopen(path, "r");
    char name[64], best[64] = "", own[64] = "";
    double us, least = 0, taken = 0, loss = 0;
    int calls = 0, unknown = 0;
    for (int more = file != NULL; more;) {
        more = fgets(text, sizeof text, file) != NULL;
        text[strcspn(text, "\n")] = '\0';
        if (more && sscanf(text, "time %63s %lf", name, &us) == 2) {
            if (!least || us < least)
                least = us, snprintf(best, sizeof best, "%s", name);
            if (strcmp(name, own) == 0)
                taken = us;
            continue;
        }
        if (least && taken) {
            calls++, loss += log(taken / least);
            if (taken > 1.1 * least)
                printf("%.2f  %s %.2f us, %s %.2f us  %s\n", taken / least, own, taken, best, least, call);
        }
        unknown += least && !taken;
        least = taken = 0;
        int at = 0;
        if (more && sscanf(text, "call %*s %*s %*s %*s %*s %*s %n", &at) == 0 && at) {
            snprintf(call, sizeof call, "%s", text + at);
            const char *const variant = chosen(call);
            snprintf(own, sizeof own, "%s", variant ? variant : "");
        }
    }
    if (file)
        fclose(file);
    expect(calls > 0, path);
    printf("%s: %d calls, mean of log(chosen / fastest) %.4f; %d whose choice was not timed\n", path, calls,
           calls ? loss / calls : 0, unknown);
}

int main(int argc, char **argv)
{
    int cuda = 0;
    for (const adze_kernel *k = adze_suites[0]->op->kernels; k->name; k++)
        cuda |= k->on_cuda;
    if (!cuda) {
        expect_skipped("this build has no CUDA");
        return expect_report();
    }
    signal(SIGFPE, crashed), signal(SIGSEGV, crashed), signal(SIGABRT, crashed);
    gpu = gpus[0];
    for (int i = 1; i < argc; i++)
        weigh(argv[i]);
    for (size_t g = 0; g < sizeof gpus / sizeof *gpus && argc == 1; g++) {
        gpu = gpus[g], choices = none = 0;
        for (int i = 0; adze_suites[i]; i++) {
            const adze_suite *const suite = adze_suites[i];
            const char *const *const lists[] = {suite->good, suite->bench, suite->gpu, suite->huge};
            for (int l = 0; l < 4; l++)
                for (const char *const *text = lists[l]; text && *text; text++)
                    for (int d = 0; d < adze_line_variants(*text); d++) {
                        char line[4096];
                        adze_line_expand(line, sizeof line, *text, adze_line_dtypes[d]);
                        try_line(suite->op, line);
                    }
        }
        printf("sm_%d, %d SMs: %ld choices, %ld calls without a kernel\n", gpu.sm, gpu.sm_count, choices, none);
        expect(choices > 10000 && none == 0, "a kernel for every call");
    }
    return expect_report();
}
