/* overlap.c - whether two views share memory, at a cost that does not depend on their sizes. */
#include "kernel.h"

enum { DIMENSIONS = 10, SEARCH_MAX = 4096 };
__extension__ typedef __int128 wide;

/* Steps in bytes, each taken `low` to `high` times. The views share a byte when some choice of counts makes the sum
   of all steps fall into [first, last]. Largest step first. */
typedef struct steps {
    int n, left; /* left: of the search */
    int64_t step[DIMENSIONS], low[DIMENSIONS], high[DIMENSIONS];
    int64_t first, last;
} steps;

static int64_t floor_div(int64_t a, int64_t b)
{
    return a / b - (a % b < 0);
}

static void steps_add(steps *s, int64_t step, int64_t low, int64_t high)
{
    if (step == 0 || low == high)
        return; /* both are 0 then */
    if (step < 0) {
        const int64_t swap = -low;
        step = -step, low = -high, high = swap;
    }
    int at = 0;
    while (at < s->n && s->step[at] > step)
        at++;
    if (at < s->n && s->step[at] == step) {
        s->low[at] += low, s->high[at] += high;
        return;
    }
    for (int i = s->n++; i > at; i--)
        s->step[i] = s->step[i - 1], s->low[i] = s->low[i - 1], s->high[i] = s->high[i - 1];
    s->step[at] = step, s->low[at] = low, s->high[at] = high;
}

static void steps_drop(steps *s, int at)
{
    for (int i = at; i + 1 < s->n; i++)
        s->step[i] = s->step[i + 1], s->low[i] = s->low[i + 1], s->high[i] = s->high[i + 1];
    s->n--;
}

/* Removes redundant steps. The smallest step, if it is no longer than the interval, leaves no gap and extends the
   interval. A multiple of another step, if that one is taken often enough to fill the gaps, counts as more of the
   other. The views of models are left with one step, or none. */
static void steps_reduce(steps *s)
{
    for (int again = 1; again;) {
        again = 0;
        while (s->n && s->step[s->n - 1] <= s->last - s->first + 1) {
            s->n--;
            s->first -= s->step[s->n] * s->high[s->n];
            s->last -= s->step[s->n] * s->low[s->n];
        }
        for (int i = 0; i < s->n && !again; i++)
            for (int j = i + 1; j < s->n && !again; j++) {
                const int64_t times = s->step[i] / s->step[j];
                if (s->step[i] % s->step[j] != 0 || s->high[j] - s->low[j] + 1 < times)
                    continue;
                s->low[j] += times * s->low[i], s->high[j] += times * s->high[i];
                steps_drop(s, i);
                again = 1;
            }
    }
}

/* The smallest t >= 0 with low <= t * by mod m <= high, or -1; 0 <= low <= high < m, 0 <= by < m. If no multiple of
   `by` below m is in the interval, t * by passes multiples of m, whose residues modulo `by` pose the same problem
   with smaller numbers, as in Euclid's algorithm. */
static int64_t first_residue(int64_t by, int64_t m, int64_t low, int64_t high)
{
    if (low == 0)
        return 0;
    if (by == 0)
        return -1;
    if (by > m - by)
        return first_residue(m - by, m, m - high, m - low);
    const int64_t t = (low - 1) / by + 1;
    if (t <= high / by)
        return t;
    const int64_t laps = first_residue((by - m % by) % by, by, low % by, high % by);
    return laps < 0 ? -1 : (int64_t)((low - 1 + (wide)m * laps) / by) + 1;
}

/* Two steps, both longer than the interval. An index of the second that does not exist never changes the answer:
   where it would fit, the nearest one that exists fits too. */
static int two_steps_meet(const steps *s, int at, int64_t first, int64_t last)
{
    const int64_t step = s->step[at], by = s->step[at + 1];
    int64_t low = floor_div(first - 1 - by * s->high[at + 1], step) + 1;
    int64_t high = floor_div(last - by * s->low[at + 1], step);
    low = low < s->low[at] ? s->low[at] : low;
    high = high > s->high[at] ? s->high[at] : high;
    if (low > high)
        return 0;
    /* Taken `low` + t times, the first step leaves `rest` - t * step, which is to lie just above a multiple of `by`.
     */
    const wide rest = last - (wide)low * step;
    const int64_t above = (int64_t)((rest % by + by) % by), enough = last - first;
    if (above <= enough)
        return 1;
    const int64_t t = first_residue((by - step % by) % by, by, by - above, by - above + enough);
    return t >= 0 && t <= high - low;
}

static int64_t divisor(int64_t a, int64_t b)
{
    while (b) {
        const int64_t rest = a % b;
        a = b, b = rest;
    }
    return a;
}

/* Whether the steps from `at` on reach [first, last]. A search beyond its budget counts as yes. */
static int steps_meet(steps *s, int at, int64_t first, int64_t last)
{
    if (at == s->n)
        return first <= 0 && last >= 0;
    const int64_t step = s->step[at];
    int64_t rest_low = 0, rest_high = 0, common = step;
    for (int i = at + 1; i < s->n; i++) {
        rest_low += s->step[i] * s->low[i], rest_high += s->step[i] * s->high[i];
        common = divisor(common, s->step[i]);
    }
    if (floor_div(last, common) * common < first)
        return 0;
    if (at + 2 == s->n)
        return two_steps_meet(s, at, first, last);
    int64_t low = floor_div(first - 1 - rest_high, step) + 1, high = floor_div(last - rest_low, step);
    low = low < s->low[at] ? s->low[at] : low;
    high = high > s->high[at] ? s->high[at] : high;
    if (at + 1 == s->n)
        return low <= high;
    for (int64_t i = low; i <= high; i++)
        if (--s->left < 0 || steps_meet(s, at + 1, first - i * step, last - i * step))
            return 1;
    return 0;
}

int adze_overlap(const adze_tensor *a, const adze_tensor *b)
{
    const int64_t a_size = (int64_t)adze_dtype_size(a->dtype), b_size = (int64_t)adze_dtype_size(b->dtype);
    const int64_t apart = (int64_t)((uintptr_t)a->data - (uintptr_t)b->data);
    steps s = {.left = SEARCH_MAX, .first = 1 - a_size - apart, .last = b_size - 1 - apart};
    for (int d = 0; d < a->rank; d++)
        steps_add(&s, a->stride[d] * a_size, 0, a->shape[d] - 1);
    for (int d = 0; d < b->rank; d++)
        steps_add(&s, -b->stride[d] * b_size, 0, b->shape[d] - 1);
    steps_reduce(&s);
    return steps_meet(&s, 0, s.first, s.last);
}
