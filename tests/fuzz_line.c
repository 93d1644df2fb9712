/* fuzz_line.c - any text as a line: it is refused with a sentence, or made into a call, which is refused with a
   sentence or run. A target for libFuzzer. With -DADZE_FUZZ_MAIN a program of its own, which feeds the lines of all
   ops, and lines made from them by small changes. */
#include "data.h"
#include "suite.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Small enough to be worth the time: few elements, and none far away. */
static int is_small(const adze_tensor *t)
{
    int64_t count = 1, reach = 0;
    for (int d = 0; d < t->rank; d++) {
        const int64_t n = t->shape[d], stride = t->stride[d];
        if (n < 0 || n > 4096 || stride > 1 << 20 || stride < -(1 << 20))
            return 0;
        count *= n;
        reach += n * (stride < 0 ? -stride : stride);
        if (count > 1 << 16)
            return 0;
    }
    return reach < 1 << 20;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static adze_line line;
    static adze_job job;
    const adze_stream cpu = {ADZE_CPU, NULL};
    char text[512], error[256] = "";
    if (size >= sizeof text)
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    if (!adze_line_parse(&line, NULL, text, error, sizeof error)) {
        if (!error[0])
            abort();
        return 0;
    }
    for (int f = 0; line.op->fields[f].name; f++)
        if (adze_is_tensor(&line.op->fields[f]) &&
            (!is_small(adze_line_tensor(&line, f)) || llabs(line.offset[f]) > 1 << 20))
            return 0;
    if (!adze_job_make(&job, &line, cpu, 1, error, sizeof error)) {
        if (!error[0])
            abort();
        return 0;
    }
    int big = 0;
    for (int f = 0; line.op->fields[f].name; f++)
        big |= adze_is_tensor(&line.op->fields[f]) && !is_small(adze_line_tensor(&job.line, f));
    for (int f = 0; f < ADZE_FIELDS_MAX && !big; f++)
        if (job.memory[f].origin)
            memcpy(job.memory[f].work, job.memory[f].origin, job.memory[f].bytes);
    if (!big && adze_dispatch(line.op, cpu, job.args) != ADZE_OK && !adze_last_error()[0])
        abort();
    adze_job_free(&job);
    return 0;
}

/* One small change: a character replaced, dropped or doubled, or a number made extreme. */
static void change(char *text, size_t size, uint64_t *state)
{
    static const char *const numbers[] = {"0", "-1", "1", "7", "65", "4096", "9223372036854775807", "1e38", "nan"};
    const size_t n = strlen(text), at = (size_t)(adze_random_uniform(state) * (double)n);
    const char *number = numbers[(int)(adze_random_uniform(state) * 9)];
    const size_t digits = strspn(text + at, "0123456789"), length = strlen(number);
    switch ((int)(adze_random_uniform(state) * 4)) {
    case 0: text[at] = (char)(32 + adze_random_uniform(state) * 95); break;
    case 1: memmove(text + at, text + at + 1, n - at); break;
    case 2:
        if (n + 2 < size)
            memmove(text + at + 1, text + at, n - at + 1);
        break;
    default:
        if (digits && n + length - digits + 1 < size) {
            memmove(text + at + length, text + at + digits, n - at - digits + 1);
            memcpy(text + at, number, length);
        }
    }
}

#ifdef ADZE_FUZZ_MAIN
static int feed(const adze_op *op, const char *line, uint64_t *state)
{
    int fed = 0;
    for (int i = 0; i < 24; i++) {
        char text[512], full[512];
        adze_line_expand(text, sizeof text, line, adze_line_dtypes[i % 3]);
        if (snprintf(full, sizeof full, "%s %s", op->name, text) >= (int)sizeof full)
            return fed;
        for (int k = 0; k < i / 3 && full[0]; k++)
            change(full, sizeof full, state);
        LLVMFuzzerTestOneInput((const uint8_t *)full, strlen(full));
        fed++;
    }
    return fed;
}

int main(void)
{
    uint64_t state = 1;
    int fed = 0;
    for (const adze_suite *const *s = adze_suites; *s; s++) {
        for (const char *const *good = (*s)->good; *good; good++)
            fed += feed((*s)->op, *good, &state);
        for (const adze_bad_case *bad = (*s)->bad; bad && bad->line; bad++)
            fed += feed((*s)->op, bad->line, &state);
    }
    printf("%d passed, 0 failed\n", fed);
    return 0;
}
#else
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);

/* A line of some op to begin with, then small changes of it, or libFuzzer's own. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    uint64_t state = seed;
    char text[512] = "", line[512];
    if (size >= sizeof text || max_size >= sizeof text)
        return LLVMFuzzerMutate(data, size, max_size);
    memcpy(text, data, size);
    if (size < 8 || adze_random_uniform(&state) < 0.1) {
        int suites = 0, lines = 0;
        while (adze_suites[suites])
            suites++;
        const adze_suite *suite = adze_suites[(int)(adze_random_uniform(&state) * suites)];
        while (suite->good[lines])
            lines++;
        adze_line_expand(line, sizeof line, suite->good[(int)(adze_random_uniform(&state) * lines)], "bf16");
        const int length = snprintf(text, max_size + 1, "%s %s", suite->op->name, line);
        if (length > (int)max_size)
            return LLVMFuzzerMutate(data, size, max_size);
    } else if (adze_random_uniform(&state) < 0.6 && text[0]) {
        change(text, max_size + 1, &state);
    } else {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    memcpy(data, text, strlen(text));
    return strlen(text);
}
#endif
