/* threads.c - calls from many threads, a fork in the middle of them, the host's own parallel loop, and two streams of
   a GPU where there is one: all give the bits that one thread alone gives. And how many threads there are, and wake.
 */
#include <adze.h>
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "expect.h"

/* The inputs, and what each op must make of them. A group of group_norm is large enough to be cut into parts. */
enum { ROWS = 96, DIM = 4099, COUNT = ROWS * DIM, OPS = 3, ROUNDS = UNDER_TSAN ? 6 : 40 };
typedef struct results {
    float out[OPS][COUNT];
} results;
static float x[COUNT], weight[DIM];
static results *expected;

/* All ops on tensors at these addresses; 0 when all are well. */
static int run_ops(adze_stream stream, void *in, void *w, float *const out[OPS], void *scratch, size_t scratch_size)
{
    const adze_tensor rows = {in, {ROWS, DIM}, {DIM, 1}, 2, ADZE_F32};
    const adze_tensor columns = {w, {DIM}, {1}, 1, ADZE_F32};
    adze_rms_norm_args rms = {.call = ADZE_CALL(rms_norm), .out = rows, .x = rows, .weight = columns, .eps = 1e-6f};
    adze_softmax_args softmax = {.call = ADZE_CALL(softmax), .out = rows, .x = rows};
    adze_group_norm_args group = {.call = ADZE_CALL(group_norm), .eps = 1e-5f, .groups = 4};
    group.x = (adze_tensor){in, {1, 4, COUNT / 4}, {COUNT, COUNT / 4, 1}, 3, ADZE_F32};
    group.out = group.x;
    rms.out.data = out[0], softmax.out.data = out[1], group.out.data = out[2];
    group.call.scratch = scratch, group.call.scratch_size = scratch_size;
    return adze_rms_norm(stream, &rms) || adze_softmax(stream, &softmax) || adze_group_norm(stream, &group);
}

static const adze_stream cpu = {ADZE_CPU, NULL};

static int run_cpu(results *r)
{
    memset(r, 0x55, sizeof *r);
    return run_ops(cpu, x, weight, (float *const[]){r->out[0], r->out[1], r->out[2]}, NULL, 0);
}
static int same_bits(void)
{
    results *r = malloc(sizeof *r);
    const int same = r && run_cpu(r) == 0 && memcmp(r, expected, sizeof *r) == 0;
    free(r);
    return same;
}

static void one_range(int64_t count, int64_t grain, adze_range_fn body, void *context)
{
    (void)grain;
    body(context, 0, count);
}

/* ---- Threads ---- */

static void *caller(void *bad)
{
    for (int i = 0; i < ROUNDS; i++)
        if (!same_bits())
            atomic_fetch_add((atomic_int *)bad, 1);
    return NULL;
}
static void check_threads(int threads, const char *what)
{
    pthread_t id[4];
    atomic_int bad = 0;
    for (int t = 0; t < threads; t++)
        pthread_create(&id[t], NULL, caller, &bad);
    for (int t = 0; t < threads; t++)
        pthread_join(id[t], NULL);
    expect(bad == 0, what);
}

/* The error of one thread is not seen by another. */
static void *fail_once(void *said)
{
    const adze_rms_norm_args args = {.call = ADZE_CALL(rms_norm)};
    *(int *)said = adze_rms_norm(cpu, &args) == ADZE_BAD_ARG && adze_last_error()[0] != '\0';
    return NULL;
}
static void check_errors(void)
{
    pthread_t id;
    int said = 0;
    char before[256];
    snprintf(before, sizeof before, "%s", adze_last_error());
    pthread_create(&id, NULL, fail_once, &said);
    pthread_join(id, NULL);
    expect(said && strcmp(before, adze_last_error()) == 0, "each thread has its own last error");
}

/* A caller with a stack as small as musl's: the rows are short enough for the stack, then long enough for the heap.
 */
enum { SMALL_STACK = 131072 };
static void *call_norms(void *done)
{
    for (int i = 0; i < 2; i++) {
        const int64_t dim = i ? COUNT / 4 : DIM, rows = COUNT / dim;
        float *out = malloc(sizeof x);
        const adze_tensor t = {x, {rows, dim}, {dim, 1}, 2, ADZE_F32};
        adze_rms_norm_args norm = {.call = ADZE_CALL(rms_norm), .out = t, .x = t, .residual = t, .eps = 1e-6f};
        adze_softmax_args softmax = {.call = ADZE_CALL(softmax), .out = t, .x = t};
        norm.out.data = softmax.out.data = out;
        *(int *)done += out && adze_rms_norm(cpu, &norm) == ADZE_OK && adze_softmax(cpu, &softmax) == ADZE_OK;
        free(out);
    }
    *(int *)done += same_bits();
    return NULL;
}
static void check_small_stack(void)
{
    pthread_t id;
    pthread_attr_t attributes;
    int done = 0;
    pthread_attr_init(&attributes);
    expect(pthread_attr_setstacksize(&attributes, SMALL_STACK) == 0, "a stack of 128 KiB");
    adze_set_parallel_for(one_range);
    if (pthread_create(&id, &attributes, call_norms, &done) == 0)
        pthread_join(id, NULL);
    adze_set_parallel_for(NULL);
    pthread_attr_destroy(&attributes);
    expect(done == 3, "a thread with a stack of 128 KiB can call");
}

/* ---- Fork ---- */

/* A child is made while two threads are in the middle of calls; it must be able to call, and so must its parent. */
static void check_fork(void)
{
    pthread_t id[2];
    atomic_int bad = 0;
    int good = 1;
    for (int t = 0; t < 2; t++)
        pthread_create(&id[t], NULL, caller, &bad);
    for (int i = 0; i < 8; i++) {
        const pid_t child = fork();
        if (child == 0) {
            static results r; /* the child's own; malloc may be locked by a thread that is not here */
            alarm(60);
            _exit(run_cpu(&r) == 0 && memcmp(&r, expected, sizeof r) == 0 ? 0 : 1);
        }
        int status = -1;
        good =
            good && child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    for (int t = 0; t < 2; t++)
        pthread_join(id[t], NULL);
    expect(good, "a child forked in the middle of calls can call");
    expect(bad == 0 && same_bits(), "and so can its parent");
}

/* ---- Their number ---- */

typedef struct tasks { /* of this process: how many threads, and how often each went to sleep */
    int count;
    long id[300], sleeps[300];
} tasks;

static void read_tasks(tasks *t)
{
    DIR *folder = opendir("/proc/self/task");
    t->count = 0;
    for (const struct dirent *d; folder && t->count < 300 && (d = readdir(folder));) {
        char path[300], line[128];
        snprintf(path, sizeof path, "/proc/self/task/%.20s/status", d->d_name);
        FILE *file = d->d_name[0] == '.' ? NULL : fopen(path, "r");
        if (!file)
            continue;
        t->id[t->count] = atol(d->d_name);
        t->sleeps[t->count] = 0;
        while (fgets(line, sizeof line, file))
            sscanf(line, "voluntary_ctxt_switches: %ld", &t->sleeps[t->count]);
        fclose(file);
        t->count++;
    }
    if (folder)
        closedir(folder);
}

static void rest(void)
{
    nanosleep(&(struct timespec){0, 100 * 1000 * 1000}, NULL);
}

/* A loop of as many pieces as there are rows. */
enum { LONG_ROW = COUNT / 4 };
static int run_rows(int rows)
{
    static float out[COUNT];
    adze_rms_norm_args args = {.call = ADZE_CALL(rms_norm), .eps = 1e-6f};
    args.x = args.out = (adze_tensor){x, {rows, LONG_ROW}, {LONG_ROW, 1}, 2, ADZE_F32};
    args.out.data = out;
    return adze_rms_norm(cpu, &args) == ADZE_OK;
}

/* In a process of its own, which has no threads yet. */
static void count_in_child(void)
{
    static tasks before, after;
    alarm(60);
    int good = adze_set_threads(8) == ADZE_OK && run_rows(2);
    read_tasks(&after);
    if (!good || after.count != 2) /* two pieces are the caller's and one worker's */
        _exit(1);
    static results r;
    if (run_cpu(&r) != 0 || memcmp(&r, expected, sizeof r) != 0)
        _exit(2);
    rest();
    read_tasks(&before);
    if (before.count != 8)
        _exit(3);
    for (int i = 0; i < 8; i++) {
        rest(), read_tasks(&before);
        if (!run_rows(2))
            _exit(4);
        rest(), read_tasks(&after);
        int woken = 0;
        for (int t = 0; t < before.count; t++)
            woken += after.id[t] == before.id[t] && after.id[t] != getpid() && after.sleeps[t] != before.sleeps[t];
        if (after.count != before.count || woken > 1)
            _exit(5);
    }
    /* Fewer: those that are there stay asleep. */
    if (adze_set_threads(1) != ADZE_OK)
        _exit(6);
    rest(), read_tasks(&before);
    if (run_cpu(&r) != 0 || memcmp(&r, expected, sizeof r) != 0)
        _exit(7);
    rest(), read_tasks(&after);
    for (int t = 0; t < before.count; t++)
        if (after.id[t] != getpid() && after.sleeps[t] != before.sleeps[t])
            _exit(8);
    _exit(adze_set_threads(0) == ADZE_OK && run_cpu(&r) == 0 && memcmp(&r, expected, sizeof r) == 0 ? 0 : 9);
}

static int child_status(const char *threads, void (*run)(void))
{
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        if (threads)
            setenv("ADZE_THREADS", threads, 1);
        run();
        _exit(99);
    }
    int status = -1;
    if (waitpid(child, &status, 0) != child || !WIFEXITED(status))
        return -1;
    return WEXITSTATUS(status);
}

/* All threads that a large call has. */
static void exit_with_threads(void)
{
    static results r;
    static tasks t;
    alarm(60);
    const int good = run_cpu(&r) == 0;
    read_tasks(&t);
    _exit(good ? t.count : 98);
}

/* Before this process reads its environment: the children have it from their own. */
static void check_environment(void)
{
    cpu_set_t set;
    const int cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    expect(child_status("5", exit_with_threads) == 5, "ADZE_THREADS");
    expect(child_status("1", exit_with_threads) == 1, "ADZE_THREADS=1");
    const int own = child_status("0", exit_with_threads);
    expect(own >= 1 && own <= cpus, "by default no more threads than CPUs");
    expect(child_status(NULL, exit_with_threads) == own, "which is what ADZE_THREADS=0 asks for");
}

static void check_number(void)
{
    expect(adze_set_threads(-1) == ADZE_BAD_ARG && strstr(adze_last_error(), "threads is -1, it must be 1 to 256"),
           "a negative number of threads");
    expect(adze_set_threads(257) == ADZE_BAD_ARG, "too many threads");
    const int status = child_status(NULL, count_in_child);
    if (status)
        printf("     step %d\n", status);
    expect(status == 0, "a loop has as many threads as it has pieces, and wakes no others");
}

/* ---- The host's own parallel loop ---- */

typedef struct range {
    adze_range_fn body;
    void *context;
    int64_t begin, end;
} range;
static atomic_int loops, too_short;

static void *run_range(void *arg)
{
    const range *r = arg;
    r->body(r->context, r->begin, r->end);
    return NULL;
}
/* Three threads and the caller, each with a range of its own; the ranges are uneven on purpose. */
static void host_loop(int64_t count, int64_t grain, adze_range_fn body, void *context)
{
    pthread_t id[4];
    range ranges[4];
    int n = 0;
    atomic_fetch_add(&loops, 1);
    if (grain < 1)
        atomic_fetch_add(&too_short, 1);
    for (int64_t begin = 0; begin < count; n++) {
        const int64_t most = grain * (n + 1) > count / 4 ? grain * (n + 1) : count / 4;
        const int64_t end = n == 3 || begin + most > count ? count : begin + most;
        ranges[n] = (range){body, context, begin, end};
        begin = end;
    }
    for (int i = 1; i < n; i++)
        pthread_create(&id[i], NULL, run_range, &ranges[i]);
    run_range(&ranges[0]);
    for (int i = 1; i < n; i++)
        pthread_join(id[i], NULL);
}

/* ---- Two streams ---- */

/* The few functions of CUDA's driver that a caller needs, found at run time: this program builds without CUDA. */
typedef struct driver {
    int (*init)(unsigned);
    int (*retain)(void **context, int device);
    int (*set_current)(void *context);
    int (*alloc)(uintptr_t *memory, size_t bytes);
    int (*to_device)(uintptr_t to, const void *from, size_t bytes);
    int (*to_host)(void *to, uintptr_t from, size_t bytes);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_wait)(void *stream);
} driver;
static driver cuda;

static int find_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    const struct {
        const char *name;
        void *function;
    } symbols[] = {{"cuInit", &cuda.init},
                   {"cuDevicePrimaryCtxRetain", &cuda.retain},
                   {"cuCtxSetCurrent", &cuda.set_current},
                   {"cuMemAlloc_v2", &cuda.alloc},
                   {"cuMemcpyHtoD_v2", &cuda.to_device},
                   {"cuMemcpyDtoH_v2", &cuda.to_host},
                   {"cuStreamCreate", &cuda.stream_create},
                   {"cuStreamSynchronize", &cuda.stream_wait}};
    for (size_t i = 0; library && i < sizeof symbols / sizeof *symbols; i++) {
        void *symbol = dlsym(library, symbols[i].name);
        if (!symbol)
            return 0;
        memcpy(symbols[i].function, &symbol, sizeof symbol);
    }
    return library && cuda.init(0) == 0;
}

static void *gpu_context;
static uintptr_t gpu_x, gpu_weight;

/* One thread with a stream and memory of its own; results of the last round are left in *r. */
static void *gpu_caller(void *r)
{
    adze_stream stream = {0, NULL};
    uintptr_t out[OPS], scratch;
    enum { SCRATCH = 1 << 20 };
    int bad = cuda.set_current(gpu_context) || cuda.stream_create(&stream.handle, 1) || cuda.alloc(&scratch, SCRATCH);
    for (int i = 0; i < OPS; i++)
        bad = bad || cuda.alloc(&out[i], sizeof x);
    float *const data[OPS] = {(float *)out[0], (float *)out[1], (float *)out[2]};
    for (int i = 0; i < ROUNDS && !bad; i++)
        bad = run_ops(stream, (void *)gpu_x, (void *)gpu_weight, data, (void *)scratch, SCRATCH);
    bad = bad || cuda.stream_wait(stream.handle);
    for (int i = 0; i < OPS; i++)
        bad = bad || cuda.to_host(((results *)r)->out[i], out[i], sizeof x);
    return bad ? NULL : r;
}

static void check_streams(void)
{
    if (!find_driver() || adze_prepare(0) != ADZE_OK) {
        expect_skipped("two streams skipped: no GPU");
        return;
    }
    results *r[3] = {calloc(1, sizeof **r), calloc(1, sizeof **r), calloc(1, sizeof **r)};
    pthread_t id[2];
    void *done[3];
    int bad = cuda.retain(&gpu_context, 0) || cuda.set_current(gpu_context) || cuda.alloc(&gpu_x, sizeof x) ||
              cuda.alloc(&gpu_weight, sizeof weight) || cuda.to_device(gpu_x, x, sizeof x) ||
              cuda.to_device(gpu_weight, weight, sizeof weight);
    expect(!bad, "memory of the GPU");
    if (!bad) {
        done[0] = gpu_caller(r[0]);
        for (int t = 0; t < 2; t++)
            pthread_create(&id[t], NULL, gpu_caller, r[t + 1]);
        for (int t = 0; t < 2; t++)
            pthread_join(id[t], &done[t + 1]);
        expect(done[0] && done[1] && done[2] && memcmp(r[0], r[1], sizeof *r[0]) == 0 &&
                   memcmp(r[0], r[2], sizeof *r[0]) == 0,
               "two threads on two streams give the bits of one");
    }
    for (int i = 0; i < 3; i++)
        free(r[i]);
}

int main(void)
{
    uint32_t state = 1;
    for (int i = 0; i < COUNT; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) * 0x1p-22f - 2;
    }
    for (int i = 0; i < DIM; i++)
        weight[i] = 1 + (float)(i % 7) / 8;
    expected = malloc(sizeof *expected);
    if (!UNDER_TSAN)
        check_environment();
    adze_set_parallel_for(one_range);
    expect(expected && run_cpu(expected) == 0, "one thread alone");
    adze_set_parallel_for(NULL);
    if (!UNDER_TSAN)
        check_number();
    expect(same_bits(), "the library's threads give the bits of one");
    check_threads(2, "two threads at once give the bits of one");
    check_threads(4, "four threads at once give the bits of one");
    check_errors();
    if (!UNDER_TSAN)
        check_small_stack();
    adze_set_threads(4);
    check_threads(3, "so do three where a call may have four threads");
    adze_set_threads(0);
    if (!UNDER_TSAN)
        check_fork();
    adze_set_parallel_for(host_loop);
    expect(same_bits() && loops >= OPS && too_short == 0, "the host's loop gives the bits of one");
    check_threads(2, "and so it does for two threads at once");
    adze_set_parallel_for(NULL);
    expect(same_bits(), "the library's threads are back");
    check_streams();
    free(expected);
    return expect_report();
}
