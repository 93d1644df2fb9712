/* alias.h - calls whose outputs are inputs, from the table of fields. */
#ifndef ADZE_CHECK_ALIAS_H
#define ADZE_CHECK_ALIAS_H

#include "data.h"

/* The text with outputs placed so in the n-th way that the table of fields allows; 0: there is none. */
int adze_alias_line(const adze_op *op, const char *text, int n, char *to, size_t size);
int adze_may_be(const adze_field *out, const adze_field *in);
/* The call with `out` as the very view of `other`, in the n-th way that must be refused; 0: there is none. */
int adze_alias_refused(const adze_job *job, int n, void *args, const adze_field **out, const adze_field **other);

#endif
