/* record.h - a recorded run of the benchmark: written as JSON, and read back to compare with. */
#ifndef ADZE_CLI_RECORD_H
#define ADZE_CLI_RECORD_H

#include "report.h"

typedef struct adze_recorded { /* one kernel on one line */
    char line[ADZE_LINE_TEXT], kernel[32];
    double us, spread;
} adze_recorded;

typedef struct adze_record {
    adze_recorded *rows;
    int count;
} adze_record;

/* 0 when the file cannot be written. */
int adze_record_write(const adze_report *report, const char *path);
/* 0 when the file is not a whole record of this machine; then a sentence has been printed. */
int adze_record_read(adze_record *record, const char *path, const adze_machine *machine);
int adze_record_has(const adze_record *record, const char *line);
/* Prints each loss that is not noise; the number of losses, or -1 when no row is in both. */
int adze_record_compare(const adze_record *record, const adze_report *report);
void adze_record_free(adze_record *record);

#endif
