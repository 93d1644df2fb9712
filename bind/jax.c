/* jax.c - every op as an XLA FFI handler, from its table of fields: adze_xla_<op> for the CPU, adze_xla_<op>_cuda.
   Plain C over XLA's C interface, whose few structs are declared here as of version 0.1; any later XLA takes that.
   The string attributes `inputs` and `outputs` name the buffers in their order; scratch is an output of that name.
   Numbers are attributes with the names of their fields. Buffers are dense, row by row. */
#include "bind.h"

#include <dlfcn.h>
#include <math.h>

typedef struct xla_error xla_error;
typedef struct xla_context xla_context;

typedef struct xla_extension {
    size_t size;
    int type;
    struct xla_extension *next;
} xla_extension;

typedef struct xla_version {
    size_t size;
    xla_extension *extensions;
    int major, minor;
} xla_version;

typedef struct xla_metadata { /* an extension of the call that asks what a handler is */
    xla_extension head;
    struct {
        size_t size;
        xla_version version;
        uint32_t traits;
    } * answer;
} xla_metadata;

typedef struct xla_buffer {
    size_t size;
    xla_extension *extensions;
    int dtype;
    void *data;
    int64_t rank, *shape;
} xla_buffer;

typedef struct xla_buffers {
    size_t size;
    xla_extension *extensions;
    int64_t count;
    int *types;
    xla_buffer **at;
} xla_buffers;

typedef struct xla_text {
    const char *at;
    size_t length;
} xla_text;

typedef struct xla_scalar {
    int dtype;
    const void *at;
} xla_scalar;

typedef struct xla_attributes {
    size_t size;
    xla_extension *extensions;
    int64_t count;
    int *types;
    xla_text **names;
    const void **at;
} xla_attributes;

typedef struct xla_new_error {
    size_t size;
    xla_extension *extensions;
    const char *message;
    int code;
} xla_new_error;

typedef struct xla_old_error {
    size_t size;
    xla_extension *extensions;
    xla_error *error;
} xla_old_error;

typedef struct xla_stream {
    size_t size;
    xla_extension *extensions;
    xla_context *context;
    void *stream;
} xla_stream;

typedef struct xla_api { /* more follows */
    size_t size;
    xla_extension *extensions;
    xla_version version;
    const void *internal;
    xla_error *(*error_create)(xla_new_error *);
    void (*error_message)(void *);
    void (*error_destroy)(xla_old_error *);
    xla_error *(*handler_register)(void *);
    xla_error *(*stream_get)(xla_stream *);
} xla_api;

typedef struct xla_frame {
    size_t size;
    xla_extension *extensions;
    const xla_api *api;
    xla_context *context;
    int stage;
    xla_buffers inputs, outputs;
    xla_attributes attributes;
} xla_frame;

enum { METADATA = 1, STAGE_INITIALIZE = 2, BUFFER = 1, SCALAR = 3, STRING = 4 };
enum { COMMAND_BUFFER_COMPATIBLE = 1 };
enum { INVALID_ARGUMENT = 3, UNIMPLEMENTED = 12, INTERNAL = 13 };
enum { PRED = 1, S8 = 2, S32 = 4, S64 = 5, U8 = 6, F16 = 10, F32 = 11, F64 = 12, BF16 = 16, F8E4M3FN = 20 };

static int dtype_of(int xla)
{
    switch (xla) {
    case F32: return ADZE_F32;
    case F16: return ADZE_F16;
    case BF16: return ADZE_BF16;
    case F8E4M3FN: return ADZE_F8E4M3;
    case S8: return ADZE_I8;
    case S32: return ADZE_I32;
    case S64: return ADZE_I64;
    case U8: return ADZE_U8;
    case PRED: return ADZE_BOOL;
    case F64: return ADZE_F64;
    default: return ADZE_NONE;
    }
}

typedef struct xla_call {
    bind_call call;
    xla_text inputs, outputs;
    void *scratch;
    size_t scratch_size;
} xla_call;

static int is(xla_text text, const char *word)
{
    return text.length == strlen(word) && memcmp(text.at, word, text.length) == 0;
}

static double scalar_value(const xla_scalar *s)
{
    switch (s->dtype) {
    case PRED: return *(const uint8_t *)s->at;
    case S32: return *(const int32_t *)s->at;
    case S64: return (double)*(const int64_t *)s->at;
    case F32: return (double)*(const float *)s->at;
    case F64: return *(const double *)s->at;
    default: return NAN;
    }
}

static void take_attribute(xla_call *c, xla_text name, int type, const void *at)
{
    const char *op = c->call.op->name;
    const adze_field *f = bind_find(c->call.op, name.at, name.length);
    if (is(name, "inputs") && type == STRING)
        c->inputs = *(const xla_text *)at;
    else if (is(name, "outputs") && type == STRING)
        c->outputs = *(const xla_text *)at;
    else if (!f || adze_is_tensor(f) || type != SCALAR)
        bind_fail(&c->call, "%s: the attribute %.*s is not one of its numbers", op, (int)name.length, name.at);
    else {
        const double value = scalar_value(at);
        if (isnan(value) || (f->kind == ADZE_INT && value != floor(value)))
            bind_fail(&c->call, "%s: the attribute %s is not %s", op, f->name,
                      f->kind == ADZE_INT ? "an integer" : "a number");
        else
            bind_number(&c->call, f, value);
    }
}

static void take_buffer(xla_call *c, int is_out, xla_text name, const xla_buffer *b)
{
    const char *op = c->call.op->name;
    if (is_out && is(name, "scratch")) {
        c->scratch = b->data;
        c->scratch_size = 1;
        for (int64_t d = 0; d < b->rank; d++)
            c->scratch_size *= (size_t)b->shape[d];
        return;
    }
    const adze_field *f = bind_find(c->call.op, name.at, name.length);
    if (!f || !adze_is_tensor(f) || adze_is_made(f) != is_out) {
        bind_fail(&c->call, "%s: %.*s is not one of its %s", op, (int)name.length, name.at,
                  is_out ? "outputs" : "inputs");
        return;
    }
    if (adze_is_inout(f))
        bind_fail(&c->call, "%s: %s is changed in place, and XLA's arrays are immutable", op, f->name);
    adze_tensor *t = bind_tensor(&c->call, f);
    bind_dense_shape(&c->call, f, b->rank, b->shape);
    t->data = b->data;
    t->dtype = dtype_of(b->dtype);
    if (t->dtype == ADZE_NONE)
        bind_fail(&c->call, "%s: %s has a dtype that adze does not have", op, f->name);
}

/* `names` has one word for each buffer, separated by a space. */
static void take_buffers(xla_call *c, int is_out, xla_text names, const xla_buffers *buffers)
{
    int64_t count = 0;
    for (size_t begin = 0, end; begin < names.length; begin = end + 1) {
        for (end = begin; end < names.length && names.at[end] != ' ';)
            end++;
        if (count < buffers->count && buffers->types[count] == BUFFER)
            take_buffer(c, is_out, (xla_text){names.at + begin, end - begin}, buffers->at[count]);
        count++;
    }
    if (count != buffers->count)
        bind_fail(&c->call, "%s: %s names %lld buffers, there are %lld", c->call.op->name,
                  is_out ? "outputs" : "inputs", (long long)count, (long long)buffers->count);
}

/* XLA has the stream's device current; its driver, which is loaded then, says which one that is. */
static int current_device(void)
{
    static int (*_Atomic context_device)(int *);
    int (*ask)(int *) = context_device, device;
    if (!ask) {
        void *const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        *(void **)&ask = driver ? dlsym(driver, "cuCtxGetDevice") : NULL;
        context_device = ask;
    }
    return ask && ask(&device) == 0 ? device : -1;
}

static void take_stream(xla_call *c, const xla_frame *frame)
{
    xla_stream get = {.size = sizeof get, .context = frame->context};
    const int device = current_device();
    xla_error *const refused = frame->api->stream_get(&get);
    if (refused)
        frame->api->error_destroy(&(xla_old_error){.size = sizeof(xla_old_error), .error = refused});
    if (device < 0 || refused) {
        bind_fail(&c->call, "%s: XLA has no CUDA stream for its buffers", c->call.op->name);
        c->call.status = ADZE_DEVICE;
        return;
    }
    c->call.stream = (adze_stream){device, get.stream};
    bind_prepare(&c->call);
}

static xla_error *call_op(const adze_op *op, int on_cuda, xla_frame *frame)
{
    for (xla_extension *e = frame->extensions; e; e = e->next)
        if (e->type == METADATA) {
            xla_metadata *asked = (void *)e;
            asked->answer->version = (xla_version){.size = sizeof(xla_version), .major = 0, .minor = 1};
            asked->answer->traits = on_cuda ? COMMAND_BUFFER_COMPATIBLE : 0;
            return NULL;
        }
    xla_call c = {.scratch = NULL};
    bind_begin(&c.call, op);
    if (on_cuda)
        take_stream(&c, frame);
    if (frame->stage != STAGE_INITIALIZE) {
        const xla_attributes *a = &frame->attributes;
        for (int64_t i = 0; i < a->count; i++)
            take_attribute(&c, *a->names[i], a->types[i], a->at[i]);
        take_buffers(&c, 0, c.inputs, &frame->inputs);
        take_buffers(&c, 1, c.outputs, &frame->outputs);
        if (c.call.status == ADZE_OK)
            bind_run(&c.call, BIND_OUT, c.scratch, c.scratch_size);
    }
    if (c.call.status == ADZE_OK)
        return NULL;
    const int code = c.call.status == ADZE_DEVICE      ? INTERNAL
                     : c.call.status == ADZE_NO_KERNEL ? UNIMPLEMENTED
                                                       : INVALID_ARGUMENT;
    xla_new_error e = {.size = offsetof(xla_new_error, code) + sizeof e.code, .message = c.call.error, .code = code};
    xla_error *const made = frame->api->error_create(&e);
    return made; // cppcheck-suppress returnDanglingLifetime ; XLA copies the message
}

#define X(name)                                                                                                      \
    ADZE_API xla_error *adze_xla_##name(xla_frame *frame);                                                           \
    xla_error *adze_xla_##name(xla_frame *frame)                                                                     \
    {                                                                                                                \
        return call_op(&adze_op_##name, 0, frame);                                                                   \
    }                                                                                                                \
    ADZE_API xla_error *adze_xla_##name##_cuda(xla_frame *frame);                                                    \
    xla_error *adze_xla_##name##_cuda(xla_frame *frame)                                                              \
    {                                                                                                                \
        return call_op(&adze_op_##name, 1, frame);                                                                   \
    }
ADZE_OPS(X)
#undef X

/* The caller of a handler allocates its outputs first: see bind_describe_outputs(). */
ADZE_API const char *adze_xla_outputs(int index, adze_tensor *tensors, const double *numbers, size_t *scratch);
const char *adze_xla_outputs(int index, adze_tensor *tensors, const double *numbers, size_t *scratch)
{
    return bind_describe_outputs(index, tensors, numbers, scratch);
}
