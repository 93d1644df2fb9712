/* overlap.c - an output that shares memory with an input is refused, and no other one: against a brute force over
   small random views, and in little time for large ones. Calls are made for a device that is not there, so that what
   is not refused for its views is refused for that, and no memory is touched. */
#include <adze.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPECT_DETAIL adze_last_error()
#include "expect.h"

static const adze_stream nowhere = {4096, NULL};
enum { OVERLAP = 1, APART = 0, OTHER = -1 };

static int answer(adze_status status)
{
    return status == ADZE_DEVICE                                                 ? APART
           : status == ADZE_BAD_ARG && strstr(adze_last_error(), "out overlaps") ? OVERLAP
                                                                                 : OTHER;
}

static uint64_t state = 1;
static int64_t below(int64_t n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((state >> 33) % (uint64_t)n);
}

enum { SPACE = 4096 };
static int64_t size_of(const adze_tensor *t)
{
    return t->dtype == ADZE_F32 ? 4 : 2;
}
/* Marks the bytes of a view, or counts those that are marked; -1 when one is outside. */
static int64_t walk(const adze_tensor *t, const char *base, unsigned char *space, int mark)
{
    int64_t index[5] = {0}, met = 0;
    for (;;) {
        int64_t at = (const char *)t->data - base;
        for (int d = 0; d < t->rank; d++)
            at += index[d] * t->stride[d] * size_of(t);
        if (at < 0 || at + size_of(t) > SPACE)
            return -1;
        for (int64_t b = 0; b < size_of(t); b++) {
            met += space[at + b] == 1;
            if (mark)
                space[at + b] = 1;
        }
        int d = t->rank - 1;
        while (d >= 0 && ++index[d] == t->shape[d])
            index[d--] = 0;
        if (d < 0)
            return met;
    }
}

/* Strides that leave each element of an output its own memory, in any order of dimensions, or any strides at all. */
static void random_strides(adze_tensor *t, int nested)
{
    t->stride[t->rank - 1] = 1;
    int order[5] = {0, 1, 2, 3, 4};
    for (int d = t->rank - 2; d > 0; d--) {
        const int other = (int)below(d + 1), swap = order[d];
        order[d] = order[other], order[other] = swap;
    }
    int64_t reach = t->shape[t->rank - 1];
    for (int i = 0; i < t->rank - 1; i++) {
        const int d = order[i];
        if (nested) {
            t->stride[d] = reach + (below(2) ? below(9) : 0);
            reach = t->stride[d] * t->shape[d];
            if (below(6) == 0)
                t->stride[d] = -t->stride[d];
        } else {
            t->stride[d] = below(5) == 0 ? 0 : below(60) - (below(5) == 0 ? 30 : 0);
        }
    }
}

/* out is f32; x is of either dtype, and scale, broadcast to x, is f32. */
static void check_random(void)
{
    static unsigned char space[SPACE], clean[SPACE];
    char *const base = (char *)(uintptr_t)0x100000;
    int views = 0, overlaps = 0, wrong = 0;
    for (int tries = 0; tries < 400000 && views < 60000; tries++) {
        adze_rms_norm_args a = {.call = ADZE_CALL(rms_norm), .eps = 1e-6f, .out_dtype = ADZE_F32};
        a.x.rank = 1 + (int)below(5);
        a.x.dtype = below(2) ? ADZE_BF16 : ADZE_F32;
        for (int d = 0; d < a.x.rank; d++)
            a.x.shape[d] = 1 + below(d == a.x.rank - 1 ? 6 : 4);
        a.out = a.x;
        a.out.dtype = ADZE_F32;
        random_strides(&a.x, below(3) != 0);
        random_strides(&a.out, 1);
        if (below(3) == 0) /* the strides of a sibling in one tensor */
            memcpy(a.x.stride, a.out.stride, sizeof a.x.stride);
        a.x.data = base + below(300) * size_of(&a.x);
        a.out.data = base + below(150) * 4;
        adze_tensor *other = &a.x;
        if (below(2)) {
            a.scale = a.x;
            a.scale.dtype = ADZE_F32;
            for (int d = 0; d < a.scale.rank - 1; d++)
                if (below(3) == 0)
                    a.scale.shape[d] = 1;
            a.scale.data = base + below(150) * 4;
            a.x.data = base + 16 * SPACE; /* out of the way */
            other = &a.scale;
        }
        memcpy(space, clean, SPACE);
        if (walk(&a.out, base, space, 1) < 0)
            continue;
        const int64_t met = walk(other, base, space, 0);
        if (met < 0)
            continue;
        int same = other == &a.x && a.x.dtype == a.out.dtype && a.x.data == a.out.data;
        for (int d = 0; d < a.x.rank; d++)
            same = same && (a.x.stride[d] == a.out.stride[d] || a.x.shape[d] == 1);
        const int due = met > 0 && !same, got = answer(adze_rms_norm(nowhere, &a));
        views++;
        overlaps += due;
        if (got != due && wrong++ < 3)
            printf("FAIL %d instead of %d: %s\n", got, due, adze_last_error());
    }
    expect(wrong == 0, "the answer of a brute force over all elements");
    expect(views >= 20000 && overlaps >= views / 10 && overlaps <= views * 9 / 10, "enough views of both kinds");
    printf("     %d views, %d of them overlap\n", views, overlaps);
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Views of 2^30 rows and more, interleaved in the same memory; the best time of several, for the machine is shared.
 */
static void check_large(void)
{
    char *const base = (char *)((uintptr_t)1 << 40);
    static const struct {
        const char *what;
        int64_t rows, out_stride, x_stride, x_at;
        int due;
    } cases[] = {
        {"rows next to rows of the same stride", (int64_t)1 << 30, 16, 16, 8, APART},
        {"rows between rows of twice the stride", (int64_t)1 << 30, 32, 16, 8, APART},
        {"the same, the other way round", (int64_t)1 << 30, 16, 32, 8, APART},
        {"strides with a common part that leaves them room", (int64_t)1 << 30, 48, 64, 8, APART},
        {"strides with a common part that does not", (int64_t)1 << 30, 48, 36, 8, OVERLAP},
        {"a last row that meets", (int64_t)1 << 30, 16, 17, 8, OVERLAP},
        {"primes", (int64_t)1 << 34, 1000003, 999983, 500001, OVERLAP},
        {"odd strides whose rows meet late", (int64_t)1 << 20, 4194319, 4194301, 2097152, OVERLAP},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        adze_activation_args a = {.call = ADZE_CALL(activation), .act = ADZE_ACT_SILU};
        a.x = (adze_tensor){base + 2 * cases[i].x_at, {cases[i].rows, 8}, {cases[i].x_stride, 1}, 2, ADZE_BF16};
        a.out = (adze_tensor){base, {cases[i].rows, 8}, {cases[i].out_stride, 1}, 2, ADZE_BF16};
        double best = 1;
        int got = OTHER;
        for (int k = 0; k < 20; k++) {
            const double start = seconds();
            got = answer(adze_activation(nowhere, &a));
            best = seconds() - start < best ? seconds() - start : best;
        }
        /* By brute force over the first four million rows: some pair is less than 8 apart. */
        int due = APART;
        for (int64_t r = 0; r < cases[i].rows && r < 4000000 && due == APART; r++) {
            const int64_t at = r * cases[i].out_stride - cases[i].x_at, near = at / cases[i].x_stride;
            for (int64_t k = near - 1; k <= near + 1; k++)
                if (k >= 0 && k < cases[i].rows && llabs(at - k * cases[i].x_stride) < 8)
                    due = OVERLAP;
        }
        expect(got == due && due == cases[i].due, cases[i].what);
        expect(best < 1e-4, "in less than 100 us");
    }
}

/* Three strides of each tensor without a common divisor: the search is bounded in any case. */
static void check_bounded(void)
{
    adze_activation_args a = {.call = ADZE_CALL(activation), .act = ADZE_ACT_SILU};
    char *const base = (char *)((uintptr_t)1 << 40);
    a.x = (adze_tensor){base, {1000, 1000, 1000, 2}, {1000000007, 1000003, 1009, 1}, 4, ADZE_BF16};
    a.out = (adze_tensor){base + 2 * 331, {1000, 1000, 1000, 2}, {2000000011, 2000029, 2003, 1}, 4, ADZE_BF16};
    double best = 1;
    for (int k = 0; k < 5; k++) {
        const double start = seconds();
        adze_activation(nowhere, &a);
        best = seconds() - start < best ? seconds() - start : best;
    }
    expect(best < 0.02, "strides of no common kind, in less than 20 ms");
}

int main(void)
{
    check_random();
    check_large();
    check_bounded();
    return expect_report();
}
