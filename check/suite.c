/* suite.c - the suites of all ops, in the order of ADZE_OPS, and the program's name. */
#include "suite.h"

#include <stddef.h>

#define X(name) &adze_suite_##name,
const adze_suite *const adze_suites[] = {ADZE_OPS(X) NULL};
#undef X

#ifndef ADZE_PROGRAM /* a project names its own */
#    define ADZE_PROGRAM "adze"
#endif
const char adze_program[] = ADZE_PROGRAM;

const adze_suite *adze_suite_of(const adze_op *op)
{
    const adze_suite *const *s = adze_suites;
    while ((*s)->op != op)
        s++;
    return *s;
}
