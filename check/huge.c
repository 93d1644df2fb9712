/* huge.c - calls above 2^31 elements, on a GPU: rows that repeat a proven call's, and a sample of what comes out. */
#include "bench.h"

#include <stdlib.h>

void adze_check_huge(const adze_suite *suite, int device, adze_tally *tally)
{
    const adze_effort once = {1, 0};
    for (const char *const *text = suite->huge; text && *text; text++) {
        char line_text[1024], error[256] = "";
        adze_line line;
        adze_stream stream = {device, NULL};
        adze_trial *trial = calloc(1, sizeof *trial);
        adze_line_expand(line_text, sizeof line_text, *text, "bf16");
        const char *message = adze_gpu_open(&stream);
        int ok = !message && adze_line_parse(&line, suite->op, line_text, error, sizeof error) &&
                 adze_trial_make(trial, &line, stream, 1, error, sizeof error) &&
                 adze_trial_time(trial, &once, error, sizeof error) && trial->attempts > 0;
        for (int k = 0; k < trial->attempts && ok; k++)
            if (trial->attempt[k].verdict.why[0]) {
                snprintf(error, sizeof error, "%.255s", trial->attempt[k].verdict.why);
                ok = 0;
            }
        printf("%s %s %s%s%s\n", ok ? "     huge:" : "FAIL huge:", suite->op->name, line_text, ok ? "" : ": ",
               ok        ? ""
               : message ? message
                         : error);
        ok ? tally->passed++ : tally->failed++;
        adze_trial_free(trial);
        free(trial);
        adze_gpu_close(stream);
    }
}
