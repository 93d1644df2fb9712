/* judge.h - the comparison of a kernel with the definition of its op. */
#ifndef ADZE_CHECK_JUDGE_H
#define ADZE_CHECK_JUDGE_H

#include "data.h"

typedef struct adze_verdict {
    double worst;  /* error as a share of what is allowed */
    double ulps;   /* the largest error, in units of the output's last place */
    char why[512]; /* empty: passed */
} adze_verdict;
/* Runs one kernel on one job, twice, and judges it. A failure is described in `why`. */
void adze_judge(adze_job *job, const adze_kernel *kernel, adze_value *const *want, adze_verdict *verdict);
#define ADZE_LAST_POISON 0x5757575757575757u /* of adze_judge(): `result` is what the run that began with it left */
/* What memory holds before a run: its inputs, and poison where it belongs to outputs alone. */
void adze_job_image(const adze_memory *memory, uint64_t poison, char *image);
/* The error of a stored value as a share of what is allowed, and in units of the last place. */
double adze_error_share(int dtype, double got, adze_value want, double *ulps);
void adze_reference_make(const adze_job *job, adze_value **want); /* want[ADZE_FIELDS_MAX], by output */
void adze_reference_free(adze_value **want);

typedef struct adze_tally { /* of verdicts */
    int passed, failed, skipped;
} adze_tally;
/* Prints the counts; an exit status. */
int adze_tally_report(const adze_tally *tally);

#endif
