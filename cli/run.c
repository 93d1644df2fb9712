/* run.c - `adze run`: one call, from the line that ADZE_TRACE printed. */
#include "cli.h"
#include "gpu.h"
#include "trial.h"

static const char help[] =
    "adze run 'LINE' [--device cpu|cuda|N]\n\n"
    "Makes the call that the line describes, with random inputs. Every kernel that takes it is\n"
    "verified against the definition, and timed when it is right. A line is what ADZE_TRACE=1\n"
    "prints:\n\n"
    "  adze run 'rms_norm x=bf16[128,4096] weight=bf16[4096] eps=1e-6'\n\n"
    "  --device D      where (default: a GPU, if there is one)\n\n"
    "Each kernel's largest error is printed in units in the last place (ulp), and as a share of\n"
    "the limit. The limit is half a unit, for the rounding of the stored result, and what float\n"
    "arithmetic may add: a right kernel reaches up to 100% of it.\n\n"
    "The exit status is 1 when a kernel is wrong, 2 when there is no such call.\n";

static int report(const adze_trial *t)
{
    int wrong = 0;
    const double bytes = (double)(t->read + t->written);
    const int64_t verified = adze_count(adze_line_tensor(&t->small->line, 0));
    if (verified < adze_count(adze_line_tensor(&t->whole->line, 0)))
        printf("verified on fewer rows, then on a sample of the whole call\n");
    for (int k = 0; k < t->attempts; k++) {
        const adze_attempt *a = &t->attempt[k];
        printf("%-16s ", a->kernel->name);
        if (a->verdict.why[0]) {
            printf("WRONG: %s\n", a->verdict.why);
            wrong++;
            continue;
        }
        printf("right: %.3f ulp, %.0f%% of the limit", a->verdict.ulps, 100 * a->verdict.worst);
        if (a->us > 0)
            printf("; %.3f us, %.1f GB/s", a->us, bytes / a->us / 1000);
        if (a->us > 0 && t->flops > 0)
            printf(", %.1f GFLOP/s", t->flops / a->us / 1000);
        if (a->us_alone > 0)
            printf("; alone %.3f us", a->us_alone);
        printf("\n");
    }
    return wrong;
}

int adze_cli_run(int argc, char **argv)
{
    const char *text = NULL;
    adze_stream stream = {adze_cuda_count() > 0 ? 0 : ADZE_CPU, NULL};
    const adze_option list[] = {{.name = "--device", .device = &stream.device}, {.name = NULL}};
    int status = 2;
    if (!adze_cli_options("run", help, list, &text, argc, argv, &status))
        return status;
    if (!text) {
        fprintf(stderr, "adze run: a line is missing\n\n%s", help);
        return 2;
    }
    adze_line line;
    char error[512];
    if (!adze_line_parse(&line, NULL, text, error, sizeof error)) {
        fprintf(stderr, "adze run: %s\n", error);
        return 2;
    }
    if (adze_prepare(stream.device) != ADZE_OK) {
        fprintf(stderr, "adze run: %s\n", adze_last_error());
        return 2;
    }
    const char *message = stream.device == ADZE_CPU ? NULL : adze_gpu_open(&stream);
    const adze_effort effort = {9, 20000, 0};
    adze_trial trial;
    status = 2;
    if (message)
        fprintf(stderr, "adze run: %s\n", message);
    else if (!adze_trial_make(&trial, &line, stream, ADZE_KERNELS_ALL, error, sizeof error) ||
             !adze_trial_time(&trial, &effort, error, sizeof error))
        fprintf(stderr, "adze run: %s\n", error);
    else
        status = report(&trial) > 0;
    if (!message)
        adze_trial_free(&trial);
    if (stream.handle)
        adze_gpu_close(stream);
    return status;
}
