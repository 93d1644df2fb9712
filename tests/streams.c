/* streams.c - outputs that are larger than the cache, on the CPU: the lines of the check, on a machine whose cache is
   said to have one byte, and lines of group_norm whose groups are written in several waves. */
#include "kernel.h"

#include "judge.h"
#include "suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "expect.h"

long __sysconf(int name);
long sysconf(int name)
{
    return name == _SC_LEVEL3_CACHE_SIZE ? 1 : __sysconf(name);
}

static const adze_stream cpu = {ADZE_CPU, NULL};
static const double flops_most = 4e6;

/* Waves that begin at any channel, and at a multiple of 16. */
static const char *const waves[] = {"x=$[1,3200,320] eps=1e-6 groups=64 channels_last=1",
                                    "x=$[1,3200,176] eps=1e-6 groups=176 channels_last=1 act=silu",
                                    "x=$[2,3200,1024] eps=1e-6 groups=64 channels_last=1", NULL};

static void check_line(const adze_op *op, double (*flops)(const void *args), const char *line, const char *dtype)
{
    char text[1024], what[1800], error[256];
    adze_line_expand(text, sizeof text, line, dtype);
    adze_job *job = adze_job_new(op, text, cpu, error, sizeof error);
    expect(job && op->validate(job->line.args) == ADZE_OK, text);
    adze_wanted wanted = {.job = job};
    for (const adze_kernel *k = op->kernels; job && k->run; k++) {
        adze_verdict v;
        if (k->on_cuda || !adze_can_run(k, cpu) || !adze_accepts(k, cpu, job->args) ||
            (flops && flops(job->line.args) > flops_most))
            continue;
        adze_judge(job, k, adze_wanted_of(&wanted, k), &v);
        snprintf(what, sizeof what, "%s.%s %s: %s", op->name, k->name, text, v.why);
        expect(!v.why[0], what);
    }
    adze_wanted_free(&wanted);
    adze_job_delete(job);
}

int main(void)
{
    expect(adze_cpu_cache() == 1, "a cache of one byte");
    for (const adze_suite *const *s = adze_suites; *s; s++)
        for (int i = 0; (*s)->good[i]; i++)
            check_line((*s)->op, (*s)->flops, (*s)->good[i], adze_line_dtypes[i % 3]);
    for (int i = 0; waves[i]; i++)
        for (int d = 0; d < 3; d++)
            check_line(&adze_op_group_norm, NULL, waves[i], adze_line_dtypes[d]);
    return expect_report();
}
