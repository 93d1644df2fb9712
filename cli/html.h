/* html.h - what a benchmark found, and the page made of it. */
#ifndef ADZE_CLI_HTML_H
#define ADZE_CLI_HTML_H

#include "ceiling.h"
#include "cli.h"

typedef struct adze_bench_row { /* one kernel on one line */
    char op[32], kernel[32], dtype[8];
    char shape[96]; /* of the first input, and what else the call has */
    char line[512]; /* `adze run` takes it */
    int64_t rows, dim, read, written;
    double us, us_alone, spread; /* us_alone 0: there is no such thing on the CPU */
    double gbps, share;          /* of the ceiling for this mix of reads and writes */
} adze_bench_row;

typedef struct adze_report {
    adze_machine machine;
    adze_ceilings ceilings;
    char date[32];
    adze_bench_row *rows;
    int count, room;
} adze_report;

/* 0 when the file cannot be written. */
int adze_html_write(const adze_report *report, const char *path);

#endif
