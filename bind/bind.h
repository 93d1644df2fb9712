/* bind.h - what the bindings share: the args of a call, filled field by field from an op's table. */
#ifndef ADZE_BIND_H
#define ADZE_BIND_H

#include "kernel.h"

#include <string.h>

enum { BIND_ARGS = 4096, BIND_FIELDS = 40, BIND_ERROR = 256 };

/* The forms in which an op with outputs that may be absent is offered: without them, with the first, with the first
   two, and with the caller's own outputs. */
typedef enum bind_form { BIND_PLAIN, BIND_ONE_MORE, BIND_TWO_MORE, BIND_OUT, BIND_FORMS } bind_form;

typedef struct bind_call { /* the fields that every call uses come first */
    const adze_op *op;
    adze_stream stream;
    adze_status status; /* ADZE_OK: nothing has failed, and error says nothing */
    _Alignas(16) char args[BIND_ARGS];
    char error[BIND_ERROR];
} bind_call;

/* Flags of the calls of this thread: see adze_call_flags(). */
extern _Thread_local uint32_t bind_flags;

static inline void bind_begin(bind_call *call, const adze_op *op)
{
    memset(call->args, 0, op->args_size);
    call->op = op;
    call->stream = (adze_stream){ADZE_CPU, NULL};
    call->status = ADZE_OK;
    ((adze_call *)(void *)call->args)->size = (uint32_t)op->args_size;
    ((adze_call *)(void *)call->args)->flags = bind_flags;
}

static inline adze_tensor *bind_tensor(bind_call *call, const adze_field *f)
{
    return (void *)(call->args + f->offset);
}

/* The last of the outputs that may be absent and that the form returns; NULL: the op has no such form. */
static inline const adze_field *bind_last_optional(const adze_op *op, bind_form form)
{
    int n = 0;
    for (const adze_field *f = op->fields; f->name; f++)
        if ((f->kind == ADZE_OUT_IF || f->kind == ADZE_OUT_OPTIONAL) && ++n == (int)form)
            return f;
    return NULL;
}
static inline int bind_returns(const adze_op *op, const adze_field *f, bind_form form)
{
    return f->kind == ADZE_OUT ||
           (adze_is_made(f) && form != BIND_PLAIN && form != BIND_OUT && f <= bind_last_optional(op, form));
}

__attribute__((format(printf, 2, 3), cold)) void bind_fail(bind_call *call, const char *format, ...);
/* A status of the library, as this call's error. */
__attribute__((cold)) void bind_refused(bind_call *call, adze_status status);
static inline int bind_took(bind_call *call, adze_status status)
{
    if (status != ADZE_OK)
        bind_refused(call, status);
    return call->status == ADZE_OK;
}
void bind_number(bind_call *call, const adze_field *f, double value);

static inline void bind_make_dense(adze_tensor *t)
{
    int64_t stride = 1;
    for (int d = t->rank - 1; d >= 0; d--) {
        t->stride[d] = stride;
        stride *= t->shape[d] > 1 ? t->shape[d] : 1;
    }
}
__attribute__((cold)) void bind_bad_rank(bind_call *call, const adze_field *f, int64_t rank);
/* Shape and strides of a tensor. One without elements may have any strides, and needs none. */
static inline void bind_shape(bind_call *call, const adze_field *f, adze_tensor *t, int64_t rank,
                              const int64_t *shape, const int64_t *stride)
{
    if (rank > 5) {
        bind_bad_rank(call, f, rank);
        return;
    }
    t->rank = (int32_t)rank;
    int empty = 0;
    for (int d = 0; d < (int)rank; d++) {
        const int64_t size = shape[d];
        t->stride[d] = stride[d];
        t->shape[d] = size;
        empty |= size == 0;
    }
    if (empty)
        bind_make_dense(t);
}
/* The shape of a dense tensor. */
void bind_dense_shape(bind_call *call, const adze_field *f, int64_t rank, const int64_t *shape);
/* An input, for bind_outputs(). */
static inline void bind_check(bind_call *call, const adze_field *f)
{
    if (call->status == ADZE_OK)
        bind_took(call, adze_check_tensor(call->op, f, bind_tensor(call, f)));
}
/* torch.c: NULL, or a sentence; a second call does nothing. torch must have been imported. */
ADZE_API const char *adze_torch_register(void);
/* One line per op: name and fields, as `kind name` with the words of an int in brackets. For the Python package. */
const char *bind_describe(int index);
/* Whether the op at an index has a kernel for a device: ADZE_CPU, or the number of one of CUDA. */
int bind_has_kernel(int index, int32_t device);
/* The table's tensor or number of that name, or NULL. */
const adze_field *bind_find(const adze_op *op, const char *name, size_t length);
/* Loads the kernels of the stream's device at its first call, so that a later capture need not. */
int bind_prepare(bind_call *call);
/* For callers that allocate before the call: given the table's tensors in order, without data, and its numbers in
   order, writes dtype and shape of the outputs, NONE where there is none, and the bytes of scratch on CUDA. NULL, or
   why the call is refused. */
const char *bind_describe_outputs(int index, adze_tensor *tensors, const double *numbers, size_t *scratch);
/* Writes dtype and shape of the outputs, once the inputs are there and have been checked. */
static inline int bind_outputs(bind_call *call)
{
    return call->status == ADZE_OK && bind_took(call, adze_dispatch_outputs(call->op, call->args));
}
/* An output that the form returns and the arguments do not give, or the other way round. */
__attribute__((cold)) void bind_other_output(bind_call *call, bind_form form, const adze_field *f);
/* Whether the form returns that output: it then has dense strides, and waits for its memory. What the form does not
   return is absent. */
static inline int bind_output(bind_call *call, bind_form form, const adze_field *f)
{
    adze_tensor *t = bind_tensor(call, f);
    const int returned = bind_returns(call->op, f, form);
    if (returned != (t->dtype != ADZE_NONE))
        bind_other_output(call, form, f);
    bind_make_dense(t);
    return returned && call->status == ADZE_OK;
}
/* The op's call, once every tensor has its memory; `scratch` is asked only when the op needs some. */
int bind_scratch(bind_call *call, size_t *bytes);
static inline int bind_run(bind_call *call, bind_form form, void *scratch, size_t bytes)
{
    adze_call *head = (void *)call->args;
    head->scratch = scratch;
    head->scratch_size = bytes;
    return bind_took(call, form == BIND_OUT ? adze_dispatch(call->op, call->stream, call->args) /* checks outputs */
                                            : adze_dispatch_made(call->op, call->stream, call->args));
}

#endif
