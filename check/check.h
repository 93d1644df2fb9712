/* check.h - the commands of the harness: every kernel against the definitions, and the checker against itself. Each
   returns an exit status. */
#ifndef ADZE_CHECK_H
#define ADZE_CHECK_H

#include "options.h"

int adze_check(const adze_check_options *options);      /* check.c */
int adze_check_self(const adze_check_options *options); /* self.c */

#endif
