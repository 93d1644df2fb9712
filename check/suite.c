/* suite.c - the suites of all ops, in the order of ADZE_OPS. */
#include "suite.h"

#include <stddef.h>

#define X(name) &adze_suite_##name,
const adze_suite *const adze_suites[] = {ADZE_OPS(X) NULL};
#undef X
