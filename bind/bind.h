/* bind.h - what the bindings share: the args of a call, filled field by field from an op's table. */
#ifndef ADZE_BIND_H
#define ADZE_BIND_H

#include "kernel.h"

#include <string.h>

enum { BIND_ARGS = 4096, BIND_FIELDS = 32, BIND_ERROR = 256 };

/* The forms in which an op with outputs that may be absent is offered: without them, with all of them, and with the
   caller's own outputs. */
typedef enum bind_form { BIND_PLAIN, BIND_ALL, BIND_OUT } bind_form;

typedef struct bind_call {
    _Alignas(16) char args[BIND_ARGS];
    const adze_op *op;
    adze_stream stream;
    char error[BIND_ERROR]; /* empty: nothing has failed */
    adze_status status;     /* of the error */
} bind_call;

static inline void bind_begin(bind_call *call, const adze_op *op)
{
    memset(call->args, 0, op->args_size);
    call->op = op;
    call->stream = (adze_stream){ADZE_CPU, NULL};
    call->error[0] = 0;
    call->status = ADZE_OK;
    ((adze_call *)(void *)call->args)->size = (uint32_t)op->args_size;
}

static inline int bind_is_tensor(const adze_field *f)
{
    return f->kind <= ADZE_OUT_OPTIONAL;
}
static inline int bind_is_out(const adze_field *f)
{
    return f->kind >= ADZE_OUT && f->kind <= ADZE_OUT_OPTIONAL;
}
static inline adze_tensor *bind_tensor(bind_call *call, const adze_field *f)
{
    return (void *)(call->args + f->offset);
}

/* Whether the op has outputs that may be absent, and so a form of its own with all of them. */
static inline const adze_field *bind_last_optional(const adze_op *op)
{
    const adze_field *last = NULL;
    for (const adze_field *f = op->fields; f->name; f++)
        if (f->kind == ADZE_OUT_IF || f->kind == ADZE_OUT_OPTIONAL)
            last = f;
    return last;
}
static inline int bind_returns(const adze_field *f, bind_form form)
{
    return f->kind == ADZE_OUT || (bind_is_out(f) && form == BIND_ALL);
}

__attribute__((format(printf, 2, 3), cold)) void bind_fail(bind_call *call, const char *format, ...);
void bind_number(bind_call *call, const adze_field *f, double value);
void bind_shape(bind_call *call, const adze_field *f, int64_t rank, const int64_t *shape, const int64_t *stride);
void bind_check(bind_call *call, const adze_field *f); /* an input, for bind_outputs() */
/* torch.c: NULL, or a sentence; a second call does nothing. torch must have been imported. */
ADZE_API const char *adze_torch_register(void);
/* One line per op: name and fields, as `kind name` with the words of an int in brackets. For the Python package. */
const char *bind_describe(int index);
/* The table's tensor or number of that name, or NULL. */
const adze_field *bind_find(const adze_op *op, const char *name, size_t length);
/* Loads the kernels of the stream's device at its first call: a later capture finds them there. */
int bind_prepare(bind_call *call);
/* For who allocates before the call: given the table's tensors in order, without data, and its numbers in order,
   writes dtype and shape of the outputs, NONE where there is none, and the bytes of scratch on CUDA. NULL, or why the
   call is refused. */
const char *bind_describe_outputs(int index, adze_tensor *tensors, const double *numbers, size_t *scratch);
/* Writes dtype and shape of the outputs, once the inputs are there and have been checked. */
int bind_outputs(bind_call *call);
/* Whether the form returns that output: it then has dense strides, and waits for its memory. What the form does not
   return is absent. */
int bind_output(bind_call *call, bind_form form, const adze_field *f);
/* The op's call, once every tensor has its memory; `scratch` is asked only when the op needs some. */
int bind_scratch(bind_call *call, size_t *bytes);
int bind_run(bind_call *call, bind_form form, void *scratch, size_t bytes); /* outputs of BIND_OUT are checked */

#endif
