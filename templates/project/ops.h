/* ops.h - the ops of this project. Every file is compiled with it (-include). */
#ifndef ADZE_PROJECT_OPS_H
#define ADZE_PROJECT_OPS_H

#include "{{name}}.h"
#define ADZE_OPS(X) X({{name}})

#endif
