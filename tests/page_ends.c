/* page_ends.c - kernels of the CPU read and write no byte beyond a tensor: each ends where a page ends, and then
   begins where one begins, with no memory next to it. Its lines are those of the check; the bits are those of tensors
   with memory around them. */
#include "kernel.h"

#include "judge.h"
#include "suite.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "expect.h"

static const adze_stream cpu = {ADZE_CPU, NULL};
static const double flops_most = 4e6;
static char now[1400]; /* what runs, for the signal's handler */
static size_t page;

static void stopped(int sig)
{
    static const char end[] = "\n0 passed, 1 failed, 0 skipped\n";
    (void)sig;
    _exit(write(1, "FAIL beyond a page: ", 20) < 0 || write(1, now, strlen(now)) < 0 ||
          write(1, end, sizeof end - 1) < 0 || 1);
}

typedef struct piece {
    int64_t low, high; /* the bytes of a memory that tensors have */
    char *map, *at;    /* at: where `low` is */
    size_t size;
} piece;

static void cover(piece *p, const adze_tensor *t, int64_t start)
{
    const int64_t size = (int64_t)adze_dtype_size(t->dtype);
    int64_t low = start, high = start + size;
    for (int d = 0; d < t->rank; d++) {
        const int64_t reach = (t->shape[d] - 1) * t->stride[d] * size;
        low += reach < 0 ? reach : 0, high += reach > 0 ? reach : 0;
    }
    if (p->high == p->low)
        p->low = low, p->high = high;
    p->low = low < p->low ? low : p->low, p->high = high > p->high ? high : p->high;
}

static int take(piece *p, int at_end)
{
    const size_t bytes = (size_t)(p->high - p->low), inner = (bytes + page - 1) / page * page;
    p->size = inner + 2 * page;
    p->map = mmap(NULL, p->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    p->at = p->map + page + (at_end ? inner - bytes : 0);
    return p->map != MAP_FAILED && (!inner || mprotect(p->map + page, inner, PROT_READ | PROT_WRITE) == 0);
}

/* Runs a kernel on a job that another run has left its results in. */
static int same_at_pages(adze_job *job, const adze_kernel *kernel, int at_end)
{
    const adze_op *op = job->line.op;
    piece pieces[ADZE_FIELDS_MAX] = {{0}};
    _Alignas(16) char args[ADZE_ARGS_MAX];
    int same = 1;
    memcpy(args, job->args, sizeof args);
    for (int f = 0; op->fields[f].name; f++)
        if (job->memory_of[f] >= 0 && adze_count(adze_line_tensor(&job->line, f)) > 0)
            cover(&pieces[job->memory_of[f]], adze_line_tensor(&job->line, f), (int64_t)job->place[f]);
    for (int m = 0; m < ADZE_FIELDS_MAX; m++) {
        char *image = job->memory[m].origin ? malloc(job->memory[m].bytes) : NULL;
        if (!image)
            continue;
        adze_job_image(&job->memory[m], ADZE_LAST_POISON, image);
        same = same && take(&pieces[m], at_end);
        if (same)
            memcpy(pieces[m].at, image + pieces[m].low, (size_t)(pieces[m].high - pieces[m].low));
        free(image);
    }
    for (int f = 0; op->fields[f].name; f++)
        if (job->memory_of[f] >= 0) {
            const piece *p = &pieces[job->memory_of[f]];
            ((adze_tensor *)(void *)(args + op->fields[f].offset))->data =
                p->at + (p->high > p->low ? (int64_t)job->place[f] - p->low : 0);
        }
    same = same && adze_dispatch_to(op, kernel, cpu, args) == ADZE_OK;
    for (int m = 0; m < ADZE_FIELDS_MAX; m++) {
        const piece *p = &pieces[m];
        if (!p->map)
            continue;
        same = same && memcmp(p->at, job->memory[m].result + p->low, (size_t)(p->high - p->low)) == 0;
        munmap(p->map, p->size);
    }
    return same;
}

static void check_line(const adze_suite *suite, const char *text)
{
    char error[256];
    adze_job *job = adze_job_new(suite->op, text, cpu, error, sizeof error);
    if (!job || suite->op->validate(job->line.args) != ADZE_OK ||
        (suite->flops && suite->flops(job->line.args) > flops_most)) {
        expect(job != NULL, text);
        adze_job_delete(job);
        return;
    }
    adze_wanted wanted = {.job = job};
    for (const adze_kernel *k = suite->op->kernels; k->run; k++) {
        adze_verdict v;
        if (k->on_cuda || !adze_can_run(k, cpu) || !adze_accepts(k, cpu, job->args))
            continue;
        snprintf(now, sizeof now, "%s %s %s", k->name, suite->op->name, text);
        adze_judge(job, k, adze_wanted_of(&wanted, k), &v);
        expect(!v.why[0] && same_at_pages(job, k, 1) && same_at_pages(job, k, 0), now);
    }
    adze_wanted_free(&wanted);
    adze_job_delete(job);
}

int main(void)
{
    page = (size_t)sysconf(_SC_PAGESIZE);
    signal(SIGSEGV, stopped);
    signal(SIGBUS, stopped);
    expect(adze_set_threads(1) == ADZE_OK, "one thread");
    for (const adze_suite *const *s = adze_suites; *s; s++)
        for (int i = 0; (*s)->good[i]; i++) {
            char text[1024];
            adze_line_expand(text, sizeof text, (*s)->good[i], adze_line_dtypes[i % 3]);
            check_line(*s, text);
        }
    return expect_report();
}
