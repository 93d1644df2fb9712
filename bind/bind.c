/* bind.c - what the bindings share: numbers, shapes, outputs, scratch and the call itself, for any op. */
#include "bind.h"

#include <stdarg.h>
#include <stdio.h>

_Thread_local uint32_t bind_flags;

void bind_fail(bind_call *call, const char *format, ...)
{
    if (call->status != ADZE_OK)
        return;
    call->status = ADZE_BAD_ARG;
    va_list ap;
    va_start(ap, format);
    vsnprintf(call->error, sizeof call->error, format, ap);
    va_end(ap);
}

void bind_refused(bind_call *call, adze_status status)
{
    if (call->status != ADZE_OK)
        return;
    bind_fail(call, "%s", adze_last_error());
    call->status = status;
}

void bind_number(bind_call *call, const adze_field *f, double value)
{
    if (f->kind == ADZE_FLOAT)
        *(float *)(void *)(call->args + f->offset) = (float)value;
    else if (value >= INT32_MIN && value <= INT32_MAX)
        *(int32_t *)(void *)(call->args + f->offset) = (int32_t)value;
    else
        bind_fail(call, "%s: %s is %.0f, it must fit in 32 bits", call->op->name, f->name, value);
}

void bind_bad_rank(bind_call *call, const adze_field *f, int64_t rank)
{
    bind_fail(call, "%s: %s has rank %lld, at most 5 is possible", call->op->name, f->name, (long long)rank);
}

void bind_dense_shape(bind_call *call, const adze_field *f, int64_t rank, const int64_t *shape)
{
    adze_tensor *t = bind_tensor(call, f);
    bind_shape(call, f, t, rank, shape, shape);
    if (rank <= 5)
        bind_make_dense(t);
}

void bind_other_output(bind_call *call, bind_form form, const adze_field *f)
{
    if (bind_returns(call->op, f, form) &&
        !(f->kind == ADZE_OUT_OPTIONAL && f != bind_last_optional(call->op, form))) /* that one is empty */
        bind_fail(call, "%s: the arguments give %s no value", call->op->name, f->name);
    else if (bind_returns(call->op, f, form))
        return;
    else if (f->kind == ADZE_OUT_IF)
        bind_fail(call, "%s: the arguments give %s too; take the form that returns it", call->op->name, f->name);
    else
        *bind_tensor(call, f) = (adze_tensor){.dtype = ADZE_NONE};
}

int bind_scratch(bind_call *call, size_t *bytes)
{
    *bytes = 0;
    return !call->op->scratch || bind_took(call, adze_dispatch_scratch(call->op, call->stream, call->args, bytes));
}

const adze_field *bind_find(const adze_op *op, const char *name, size_t length)
{
    const adze_field *f = op->fields;
    while (f->name && (strlen(f->name) != length || memcmp(f->name, name, length) != 0))
        f++;
    return f->name ? f : NULL;
}

int bind_prepare(bind_call *call)
{
    static _Atomic int prepared[64];
    const int device = call->stream.device;
    if (device < 0 || device >= 64 || prepared[device])
        return 1;
    prepared[device] = bind_took(call, adze_prepare(device));
    return prepared[device];
}

/* Data is never read here; it lies far apart, so that nothing overlaps. */
const char *bind_describe_outputs(int index, adze_tensor *tensors, const double *numbers, size_t *scratch)
{
    static _Thread_local bind_call call;
    bind_begin(&call, adze_ops[index]);
    call.stream.device = adze_cuda_count() > 0 ? 0 : ADZE_CPU; /* scratch is asked of a device that exists */
    const adze_tensor *in = tensors;
    for (const adze_field *f = call.op->fields; f->name; f++) {
        if (!adze_is_tensor(f)) {
            bind_number(&call, f, *numbers++);
            continue;
        }
        adze_tensor *t = bind_tensor(&call, f);
        const adze_tensor *from = in++;
        t->data = (void *)(uintptr_t)((uint64_t)(in - tensors) << 52);
        if (adze_is_made(f))
            continue;
        bind_dense_shape(&call, f, from->rank, from->shape);
        t->dtype = from->dtype;
        bind_check(&call, f);
    }
    if (!bind_outputs(&call))
        return call.error;
    for (const adze_field *f = call.op->fields; f->name; f++)
        if (adze_is_made(f))
            bind_make_dense(bind_tensor(&call, f));
    if (!bind_scratch(&call, scratch))
        return call.error;
    for (const adze_field *f = call.op->fields; f->name; f++)
        if (adze_is_tensor(f))
            *tensors++ = *bind_tensor(&call, f);
    return NULL;
}

const char *bind_describe(int index)
{
    static _Thread_local char text[4096];
    static const char *const kinds[] = {"",    "in",     "optional",     "inout", "inout_optional",
                                        "out", "out_if", "out_optional", "float", "int"};
    for (int i = 0; i <= index; i++)
        if (!adze_ops[i])
            return NULL;
    const adze_op *op = adze_ops[index];
    int n = snprintf(text, sizeof text, "%s", op->name);
    for (const adze_field *f = op->fields; f->name; f++) {
        n += snprintf(text + n, sizeof text - (size_t)n, ";%s %s", kinds[f->kind], f->name);
        for (const adze_word *w = f->words; w && w->name; w++)
            n += snprintf(text + n, sizeof text - (size_t)n, " %s=%d", w->name, w->value);
    }
    return text;
}

int bind_has_kernel(int index, int32_t device)
{
    if (device < ADZE_CPU || device >= adze_cuda_count())
        return 0;
    for (const adze_kernel *k = adze_ops[index]->kernels; k->run; k++)
        if (adze_can_run(k, (adze_stream){device, NULL}))
            return 1;
    return 0;
}
