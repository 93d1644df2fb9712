/* rms_norm: what is checked and what is timed. */
#include "norm.h"

static const char *const good[] = {NORM_GOOD, NULL};
static const adze_bad_case bad[] = {NORM_BAD, {NULL, ADZE_OK, NULL}};
static const char *const bench[] = {NORM_BENCH, NULL};
static const char *const huge[] = {"x=$[600000,4096] weight=$[4096] eps=1e-6", NULL};

const adze_suite adze_suite_rms_norm = {&adze_op_rms_norm, good, bad, bench, huge, NULL};
