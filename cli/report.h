/* report.h - what a benchmark found: rows, what was left out, and the page made of them. */
#ifndef ADZE_CLI_REPORT_H
#define ADZE_CLI_REPORT_H

#include "ceiling.h"
#include "cli.h"

#include <stdio.h>

enum { ADZE_PEERS_MAX = 8 };
typedef struct adze_peer { /* another implementation, on the same call */
    char name[24];
    double us;
} adze_peer;

typedef struct adze_bench_row { /* one kernel on one line */
    char op[32], kernel[32], dtype[8];
    char shape[96];            /* of the first input, and what else the call has */
    char line[ADZE_LINE_TEXT]; /* `adze run` takes it */
    int64_t rows, dim, read, written;
    double us, us_alone, spread; /* us_alone 0: there is no such thing on the CPU */
    double gbps, gflops;         /* gflops 0: its arithmetic does not count */
    double share;                /* of the ceiling for this mix of reads and writes, or of arithmetic: what binds */
    int warm;           /* a call moves so few rows of its tensors that a cache may hold them between calls */
    int code;           /* of the dtype */
    double ulps, error; /* the largest error: in units in the last place, and as a share of the limit */
    adze_peer peers[ADZE_PEERS_MAX];
    int peer_count;
} adze_bench_row;

typedef struct adze_left_out { /* a call that has no row, or lacks a kernel's */
    char line[ADZE_LINE_TEXT], why[256];
} adze_left_out;

typedef struct adze_report {
    adze_machine machine;
    adze_ceilings ceilings;
    char date[32], device[16]; /* device: as --device takes it */
    const char *dtype;         /* of the lines that leave it open */
    int one_kernel;            /* only the kernel that the library takes was timed */
    char peers[512];           /* where the times of peers were recorded; empty: nowhere */
    adze_bench_row *rows;
    int count, room;
    adze_left_out *left_out;
    int left_out_count;
} adze_report;

/* html.c: 0 when the file cannot be written. */
int adze_html_write(const adze_report *report, const char *path);
void adze_html_time(FILE *f, double us); /* with its unit */

/* chart.c: the two pictures of the op whose first row this is, and the colour of a row's kernel in them. */
void adze_chart_write(FILE *f, const adze_report *report, int first);
int adze_chart_colour(const adze_report *report, int row);

/* peers.c: the times that bench/compare_torch.py recorded on this machine, for the rows of the same calls. 0 when the
   file is no such record: then a sentence has been printed. */
int adze_peers_read(adze_report *report, const char *path);

#endif
