/* tuned.c - which variant is the fastest for a call, as `adze tune` found it on a card (tuned.h). */
#include "kernel.h"

#include <pthread.h>
#include <string.h>

/* clang-format off */
#define CARD(card, sm_count, op, date, driver, commit) {card, date, driver, commit, NULL, sm_count, 0, 0, 0, {0}, NULL, NULL, 0, 0},
#define TUNED(op, form, least, most, size1, size2, size3, variant, before, us, us_before) \
    {NULL, NULL, NULL, NULL, #op, 0, form, least, most, {size1, size2, size3}, variant, before, us, us_before},
static const adze_tuned_row tuned_rows[] = {
#include "tuned.h"
    {NULL, NULL, NULL, NULL, NULL, 0, 0, 0, 0, {0}, NULL, NULL, 0, 0},
};
/* clang-format on */

/* Whether a row is for a problem: form and sizes are those of the row; the first size has a range. */
static int fits(const adze_tuned_row *row, const adze_choice *problem)
{
    return row->form == problem->form && problem->size[0] >= row->least && problem->size[0] <= row->most &&
           memcmp(row->size, problem->size + 1, sizeof row->size) == 0;
}

/* The CUDA kernel of an op is the one that has variants. */
static int variant_of(const adze_op *op, const char *name)
{
    for (const adze_kernel *k = op->kernels; k->run; k++)
        if (k->variants)
            return adze_variant_find(k, name);
    return -1;
}

/* The rows that change a choice, of the cards of this machine, in buckets. A device is in the slot of its card. */
enum { DEVICES_MAX = 64, BUCKETS = 64, ROWS = sizeof tuned_rows / sizeof *tuned_rows };
typedef struct tuned_entry {
    const adze_op *op;
    const adze_tuned_row *row;
    int variant, next; /* the next entry of the bucket, counted from 1 */
} tuned_entry;
static struct {
    _Atomic int loaded;
    int slot[DEVICES_MAX];
    int first[DEVICES_MAX][BUCKETS]; /* by slot: an entry, counted from 1 */
    int count;
    tuned_entry entries[ROWS < 16 ? 16 : ROWS];
} table;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static unsigned bucket_of(int form, int64_t size)
{
    return ((unsigned)form * 2654435761u ^ (unsigned)size * 2246822519u) >> 26;
}

static void add_entry(int slot, const adze_tuned_row *row)
{
    const adze_op *op = adze_find_op(row->op, strlen(row->op));
    const int variant = op && strcmp(row->variant, row->before) != 0 ? variant_of(op, row->variant) : -1;
    if (variant < 0 || table.count == sizeof table.entries / sizeof *table.entries)
        return;
    int *first = &table.first[slot][bucket_of(row->form, row->size[0])];
    table.entries[table.count] = (tuned_entry){op, row, variant, *first};
    *first = ++table.count;
}

void adze_tuned_load(const adze_tuned_row *rows, int devices, const char *const *cards, const int *sm_counts)
{
    memset(&table, 0, sizeof table);
    for (int d = 0; d < devices && d < DEVICES_MAX; d++) {
        int same = 0, here = 0;
        while (strcmp(cards[same], cards[d]) != 0 || sm_counts[same] != sm_counts[d])
            same++;
        table.slot[d] = same;
        for (const adze_tuned_row *row = rows; (row->card || row->op) && same == d; row++) {
            if (row->card)
                here = strcmp(row->card, cards[d]) == 0 && row->sm_count == sm_counts[d];
            else if (here)
                add_entry(d, row);
        }
    }
    for (int d = devices; d < DEVICES_MAX; d++)
        table.slot[d] = d;
    table.loaded = 1;
}

static void load(void)
{
    char names[DEVICES_MAX][128];
    const char *cards[DEVICES_MAX] = {NULL};
    int sm_counts[DEVICES_MAX] = {0}, devices = ROWS > 1 ? adze_cuda_count() : 0;
    devices = devices < DEVICES_MAX ? devices : DEVICES_MAX;
    for (int d = 0; d < devices; d++) {
        adze_cuda_name(d, names[d], sizeof names[d]);
        cards[d] = names[d];
        sm_counts[d] = adze_cuda_sm_count(d);
    }
    if (!table.loaded)
        adze_tuned_load(tuned_rows, devices, cards, sm_counts);
}

int adze_tuned(const adze_op *op, int device, const adze_choice *problem)
{
    if (!table.loaded)
        pthread_once(&once, load);
    if (table.count == 0 || device < 0 || device >= DEVICES_MAX)
        return -1;
    int i = table.first[table.slot[device]][bucket_of(problem->form, problem->size[1])];
    while (i && !(table.entries[i - 1].op == op && fits(table.entries[i - 1].row, problem)))
        i = table.entries[i - 1].next;
    return i ? table.entries[i - 1].variant : -1;
}
