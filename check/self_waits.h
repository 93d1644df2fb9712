/* self_waits.h - CUDA kernels that are broken on purpose, for the dependency check. */
#ifndef ADZE_CHECK_SELF_WAITS_H
#define ADZE_CHECK_SELF_WAITS_H

#include "judge.h"
#include "options.h"

void adze_self_waits(const adze_check_options *options, adze_tally *tally);

#endif
