/* self_waits.c - the checker is checked: CUDA kernels that wait too late for the kernel before them must be caught.
 */
#include "self_waits.h"

#include "dependency.h"
#include "producer.h"

static adze_wait wait; /* of the kernel that is judged: it has no other way to know */

static adze_status run_gated_add(adze_stream stream, const void *args)
{
    return adze_gpu_gated_add(stream, wait, args);
}

static void try_waits(adze_dependency *d, int verbose, adze_tally *tally)
{
    static const char *const names[ADZE_WAITS] = {"waits", "table_before_wait", "input_before_wait", "waits_last",
                                                  "never_waits"};
    static const char text[] = "x=f32[64,96] residual=f32[64,96] gate=f32[64,96] gate_table=f32[64,96]";
    const adze_kernel kernel = {"broken", 1, 0, ADZE_ANY_SM, NULL, run_gated_add, NULL, 0};
    char error[256];
    adze_job *job = adze_job_new(&adze_op_gated_add, text, d->stream, error, sizeof error);
    adze_wanted wanted = {.job = job};
    if (!job) {
        printf("FAIL self: gated_add %s: %s\n", text, error);
        tally->failed++;
        return;
    }
    for (wait = ADZE_WAIT_FIRST; wait < ADZE_WAITS; wait++) {
        adze_verdict v;
        adze_judge(job, &kernel, adze_wanted_of(&wanted, &kernel), &v); /* on an idle GPU all of them are right */
        for (int i = 0; i < 4; i++) {
            const uint32_t flags = i / 2 ? ADZE_CONST_WEIGHTS : 0;
            const int right = wait == ADZE_WAIT_FIRST || (wait == ADZE_WAIT_AFTER_TABLE && flags);
            char why[256] = "";
            adze_dependency_run(d, job, &kernel, flags, i % 2, why, sizeof why);
            const int ok = !v.why[0] && (why[0] == 0) == right;
            ok ? tally->passed++ : tally->failed++;
            if (!ok || verbose)
                printf("%sself: gated_add.%s in a %s%s is %s: %s\n", ok ? "" : "FAIL ", names[wait],
                       i % 2 ? "graph" : "stream", flags ? ", flags=const_weights" : "",
                       why[0] ? "caught" : "not caught", v.why[0] ? v.why : why);
        }
    }
    adze_wanted_free(&wanted);
    adze_job_delete(job);
}

void adze_self_waits(const adze_check_options *options, adze_tally *tally)
{
    adze_dependency d = {0};
    const int device = options->device == ADZE_ALL_DEVICES ? 0 : options->device;
    const char *message = device == ADZE_CPU          ? "the CPU is asked for"
                          : adze_cuda_count() == 0    ? "no CUDA device"
                          : adze_prepare(device) != 0 ? adze_last_error()
                                                      : adze_dependency_open(&d, device);
    const int required = options->require || options->device >= 0;
    if (!message) {
        try_waits(&d, options->verbose, tally);
    } else {
        printf("%s   self: kernels that wait too late %s: %s\n", required ? "FAIL" : "--",
               required ? "are required" : "skipped", message);
        required ? tally->failed++ : tally->skipped++;
    }
    adze_dependency_close(&d);
}
