/* expect.h - expectations of a test program, counted, and the last line that the runner of the tests reads. A program
   that links the library may define EXPECT_DETAIL as adze_last_error() before it includes this. */
#ifndef ADZE_TESTS_EXPECT_H
#define ADZE_TESTS_EXPECT_H

#include <stdio.h>

#ifndef EXPECT_DETAIL
#    define EXPECT_DETAIL ""
#endif

static struct {
    int passed, failed, skipped;
} expectations;

static inline void expect(int ok, const char *what)
{
    ok ? expectations.passed++ : expectations.failed++;
    if (!ok) {
        const char *const detail = EXPECT_DETAIL;
        printf("FAIL %s%s%s%s\n", what, *detail ? " (" : "", detail, *detail ? ")" : "");
    }
}

static inline void expect_skipped(const char *what)
{
    printf("--   %s\n", what);
    expectations.skipped++;
}

/* Prints the counts; what main() returns. */
static inline int expect_report(void)
{
    printf("%d passed, %d failed, %d skipped\n", expectations.passed, expectations.failed, expectations.skipped);
    return expectations.failed != 0;
}

/* ThreadSanitizer has a thread of its own, which may start at any time, and it allows no threads after a fork. */
#ifdef __SANITIZE_THREAD__
enum { UNDER_TSAN = 1 };
#else
enum { UNDER_TSAN = 0 };
#endif

#endif
