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
/* What the definition gives for a job, and how the kernels sum whose bounds it has. */
typedef struct adze_wanted {
    const adze_job *job;
    int sums, made;
    adze_value *values[ADZE_FIELDS_MAX]; /* by output */
} adze_wanted;
/* The values for a kernel, computed anew where it sums in another way than the one before; NULL: for any kernel. */
adze_value *const *adze_wanted_of(adze_wanted *wanted, const adze_kernel *kernel);
void adze_wanted_free(adze_wanted *wanted);

typedef struct adze_tally { /* of verdicts */
    int passed, failed, skipped;
} adze_tally;
/* Prints the counts; an exit status. */
int adze_tally_report(const adze_tally *tally);

#endif
