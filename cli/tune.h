/* tune.h - calls timed with every variant, and the table that is made of their times. */
#ifndef ADZE_CLI_TUNE_H
#define ADZE_CLI_TUNE_H

#include "cli.h"
#include "kernel.h"

enum { ADZE_TIMES_VARIANTS = 96 };
typedef struct adze_timed_call {
    char line[ADZE_LINE_TEXT];
    int form;
    int64_t size[ADZE_SIZES];
    char before[32]; /* the variant that the kernel chooses by itself */
    int count;
    struct {
        char name[32];
        double us, spread; /* spread: as a share of us */
    } variant[ADZE_TIMES_VARIANTS];
} adze_timed_call;

typedef struct adze_times { /* of an op, on a card */
    char op[32], card[128], date[32], driver[64], commit[64];
    int sm_count;
    adze_timed_call *calls;
    int count;
} adze_times;

/* times.c: each returns 0 when a file cannot be read or written, or is damaged: then a sentence has been printed. */
int adze_times_write(const adze_times *times, const char *path);
int adze_times_read(adze_times *times, const char *path);
/* A zeroed call at the end of the list; NULL without memory. */
adze_timed_call *adze_times_add(adze_times *times);
void adze_times_free(adze_times *times);
/* Prints a line per call: what is chosen, and what is fastest. */
void adze_times_report(const adze_times *times);
/* Puts the rows of this op and card into a table (src/tuned.h), in the place of those that it has. */
int adze_table_write(const adze_times *times, const char *path);

#endif
