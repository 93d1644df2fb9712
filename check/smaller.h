/* smaller.h - the call that is verified in the place of a large one. */
#ifndef ADZE_CHECK_SMALLER_H
#define ADZE_CHECK_SMALLER_H

#include "judge.h"

/* Makes a job of the call of `whole` with fewer rows. period, by field: bytes after which the memory of the whole
   call repeats that of the small one; 0: never. `many`: it is verified with many variants, and must be smaller. 0
   when the call is too large to be verified, or cannot be made: then error holds a sentence. */
int adze_smaller_make(adze_job *small, adze_job *whole, size_t *period, int many, char *error, size_t error_size);

#endif
