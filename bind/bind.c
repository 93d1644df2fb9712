/* bind.c - what the bindings share: numbers, shapes, outputs, scratch and the call itself, for any op. */
#include "bind.h"

#include <stdarg.h>
#include <stdio.h>

void bind_fail(bind_call *call, const char *format, ...)
{
    if (call->error[0])
        return;
    call->status = ADZE_BAD_ARG;
    va_list ap;
    va_start(ap, format);
    vsnprintf(call->error, sizeof call->error, format, ap);
    va_end(ap);
}

/* A status of the library, as this call's error. */
static int took(bind_call *call, adze_status status)
{
    if (status != ADZE_OK && !call->error[0]) {
        bind_fail(call, "%s", adze_last_error());
        call->status = status;
    }
    return call->error[0] == 0;
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

static void make_dense(adze_tensor *t)
{
    int64_t stride = 1;
    for (int d = t->rank - 1; d >= 0; d--) {
        t->stride[d] = stride;
        stride *= t->shape[d] > 1 ? t->shape[d] : 1;
    }
}

void bind_shape(bind_call *call, const adze_field *f, int64_t rank, const int64_t *shape, const int64_t *stride)
{
    adze_tensor *t = bind_tensor(call, f);
    if (rank > 5) {
        bind_fail(call, "%s: %s has rank %lld, at most 5 is possible", call->op->name, f->name, (long long)rank);
        return;
    }
    t->rank = (int32_t)rank;
    int dense = !stride;
    for (int d = 0; d < t->rank; d++) {
        t->shape[d] = shape[d];
        t->stride[d] = stride ? stride[d] : 1;
        dense |= shape[d] == 0; /* an empty tensor may have any strides, and needs none */
    }
    if (dense)
        make_dense(t);
}

void bind_check(bind_call *call, const adze_field *f)
{
    if (!call->error[0])
        took(call, adze_check_tensor(call->op, f, bind_tensor(call, f)));
}

int bind_outputs(bind_call *call)
{
    return !call->error[0] && took(call, adze_dispatch_outputs(call->op, call->args));
}

int bind_output(bind_call *call, bind_form form, const adze_field *f)
{
    adze_tensor *t = bind_tensor(call, f);
    const int returned = bind_returns(f, form);
    if (returned && t->dtype == ADZE_NONE)
        bind_fail(call, "%s: the arguments give %s no value", call->op->name, f->name);
    if (!returned && t->dtype != ADZE_NONE) {
        if (f->kind == ADZE_OUT_IF)
            bind_fail(call, "%s: the arguments give %s too; take the form that returns it", call->op->name, f->name);
        *t = (adze_tensor){.dtype = ADZE_NONE};
    }
    make_dense(t);
    return returned && !call->error[0];
}

int bind_scratch(bind_call *call, size_t *bytes)
{
    *bytes = 0;
    return !call->op->scratch || took(call, adze_dispatch_scratch(call->op, call->stream, call->args, bytes));
}

int bind_run(bind_call *call, bind_form form, void *scratch, size_t bytes)
{
    adze_call *head = (void *)call->args;
    head->scratch = scratch;
    head->scratch_size = bytes;
    return took(call, (form == BIND_OUT ? adze_dispatch : adze_dispatch_made)(call->op, call->stream, call->args));
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
    prepared[device] = took(call, adze_prepare(device));
    return prepared[device];
}

/* Data is never read here; it lies far apart, so that nothing overlaps. */
const char *bind_describe_outputs(int index, adze_tensor *tensors, const double *numbers, size_t *scratch)
{
    static _Thread_local bind_call call;
    bind_begin(&call, adze_ops[index]);
    call.stream.device = 0;
    const adze_tensor *in = tensors;
    for (const adze_field *f = call.op->fields; f->name; f++) {
        if (!bind_is_tensor(f)) {
            bind_number(&call, f, *numbers++);
            continue;
        }
        adze_tensor *t = bind_tensor(&call, f);
        const adze_tensor *from = in++;
        t->data = (void *)(uintptr_t)((uint64_t)(in - tensors) << 52);
        if (bind_is_out(f))
            continue;
        bind_shape(&call, f, from->rank, from->shape, NULL);
        t->dtype = from->dtype;
        bind_check(&call, f);
    }
    if (!bind_outputs(&call))
        return call.error;
    for (const adze_field *f = call.op->fields; f->name; f++)
        if (bind_is_out(f))
            make_dense(bind_tensor(&call, f));
    if (!bind_scratch(&call, scratch))
        return call.error;
    for (const adze_field *f = call.op->fields; f->name; f++)
        if (bind_is_tensor(f))
            *tensors++ = *bind_tensor(&call, f);
    return NULL;
}

const char *bind_describe(int index)
{
    static _Thread_local char text[4096];
    static const char *const kinds[] = {"", "in", "optional", "out", "out_if", "out_optional", "float", "int"};
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
