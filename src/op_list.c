/* op_list.c - the table of all ops. Nothing else is in this file: a project that links the static library and has ops
   of its own brings its own table, and the linker then leaves this one out. */
#include "kernel.h"

#include <stddef.h>

#define X(name) &adze_op_##name,
const adze_op *const adze_ops[] = {ADZE_OPS(X) NULL};
#undef X
