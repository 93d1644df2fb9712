/* tvm_ffi.c - every op as __tvm_ffi_<op>, a function of TVM FFI's C interface, from its table of fields.
   The arguments are the fields in the order of adze.h. None stands for what is
   absent, and arguments may end early. The few structs are declared here; functions of libtvm_ffi are found by dlsym,
   so that nothing of it is needed where it is not used. */
#include "bind.h"

#include <dlfcn.h>
#include <math.h>

typedef struct device { /* DLPack's, as the two below */
    int32_t type, index;
} device;

typedef struct element {
    uint8_t code, bits;
    uint16_t lanes;
} element;

typedef struct dense_tensor {
    void *data;
    device device;
    int32_t rank;
    element element;
    int64_t *shape, *stride; /* stride NULL: dense */
    uint64_t byte_offset;
} dense_tensor;

typedef struct object {
    uint64_t references;
    int32_t type;
    uint32_t reserved;
    void (*deleter)(void *, int);
} object;

typedef struct tensor_object {
    object head;
    dense_tensor tensor;
} tensor_object;

typedef struct any {
    int32_t type;
    uint32_t reserved;
    union {
        int64_t integer;
        double real;
        dense_tensor *tensor;
        tensor_object *object;
    };
} any;

enum { NONE = 0, INT = 1, BOOL = 2, FLOAT = 3, TENSOR_POINTER = 7, TENSOR_OBJECT = 70 };
enum { DEVICE_CPU = 1, DEVICE_CUDA = 2, DEVICE_CUDA_HOST = 3, DEVICE_CUDA_MANAGED = 13 };
enum { CODE_INT = 0, CODE_UINT = 1, CODE_FLOAT = 2, CODE_BFLOAT = 4, CODE_BOOL = 6, CODE_F8E4M3FN = 10 };

/* A function of the libtvm_ffi that calls us. */
static void *find(const char *name)
{
    void *function = dlsym(RTLD_DEFAULT, name);
    void *const library = function ? NULL : dlopen("libtvm_ffi.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? dlsym(library, name) : function;
}

static int dtype_of(element e)
{
    static const struct {
        uint8_t code, bits;
        int dtype;
    } known[] = {
        {CODE_FLOAT, 32, ADZE_F32}, {CODE_FLOAT, 16, ADZE_F16},      {CODE_BFLOAT, 16, ADZE_BF16},
        {CODE_FLOAT, 64, ADZE_F64}, {CODE_F8E4M3FN, 8, ADZE_F8E4M3}, {CODE_INT, 8, ADZE_I8},
        {CODE_INT, 32, ADZE_I32},   {CODE_INT, 64, ADZE_I64},        {CODE_BOOL, 8, ADZE_BOOL},
        {CODE_UINT, 8, ADZE_U8},
    };
    for (size_t i = 0; e.lanes == 1 && i < sizeof known / sizeof *known; i++)
        if (known[i].code == e.code && known[i].bits == e.bits)
            return known[i].dtype;
    return ADZE_NONE;
}

typedef struct tvm_call {
    bind_call call;
    const adze_field *first; /* the tensor that says where the call runs; NULL before it */
} tvm_call;

/* Memory that the CPU owns and CUDA reads is the CPU's; memory that moves is CUDA's. -2: neither. */
static int32_t place(device d)
{
    return d.type == DEVICE_CPU || d.type == DEVICE_CUDA_HOST       ? ADZE_CPU
           : d.type == DEVICE_CUDA || d.type == DEVICE_CUDA_MANAGED ? d.index
                                                                    : -2;
}

static void take_tensor(tvm_call *c, const adze_field *f, const any *a)
{
    const char *op = c->call.op->name;
    if (a->type == NONE)
        return;
    if (a->type != TENSOR_POINTER && a->type != TENSOR_OBJECT) {
        bind_fail(&c->call, "%s: %s is not a tensor", op, f->name);
        return;
    }
    const dense_tensor *from = a->type == TENSOR_OBJECT ? &a->object->tensor : a->tensor;
    const int32_t where = place(from->device);
    if (where < ADZE_CPU)
        bind_fail(&c->call, "%s: %s is on a device of another kind (%d)", op, f->name, from->device.type);
    if (!c->first) {
        c->first = f;
        c->call.stream.device = where;
    } else if (where != c->call.stream.device)
        bind_fail(&c->call, "%s: %s and %s are on different devices", op, f->name, c->first->name);
    adze_tensor *t = bind_tensor(&c->call, f);
    if (from->stride)
        bind_shape(&c->call, f, t, from->rank, from->shape, from->stride);
    else
        bind_dense_shape(&c->call, f, from->rank, from->shape);
    t->data = from->data ? (char *)from->data + from->byte_offset : NULL;
    t->dtype = dtype_of(from->element);
    if (t->dtype == ADZE_NONE)
        bind_fail(&c->call, "%s: %s has a dtype that adze does not have", op, f->name);
}

static void take_number(tvm_call *c, const adze_field *f, const any *a)
{
    const double value = a->type == FLOAT                    ? a->real
                         : a->type == INT || a->type == BOOL ? (double)a->integer
                         : a->type == NONE                   ? 0
                                                             : NAN;
    if (isnan(value) || (f->kind == ADZE_INT && value != floor(value)))
        bind_fail(&c->call, "%s: %s is not %s", c->call.op->name, f->name,
                  f->kind == ADZE_INT ? "an integer" : "a number");
    else
        bind_number(&c->call, f, value);
}

static void take_stream(tvm_call *c)
{
    void *(*current)(int32_t, int32_t);
    if (c->call.status != ADZE_OK || c->call.stream.device == ADZE_CPU)
        return;
    *(void **)&current = find("TVMFFIEnvGetStream");
    if (current)
        c->call.stream.handle = current(DEVICE_CUDA, c->call.stream.device);
    else
        bind_fail(&c->call, "%s: TVM FFI does not say which stream is current", c->call.op->name);
    bind_prepare(&c->call);
}

/* Scratch is a tensor of the allocator that the caller has set in TVM FFI; it is freed when the kernels are on the
   stream, which orders whatever that allocator does with it next. */
static void run(tvm_call *c)
{
    size_t bytes = 0;
    tensor_object *scratch = NULL;
    if (c->call.status != ADZE_OK || !bind_scratch(&c->call, &bytes))
        return;
    if (bytes) {
        int (*allocate)(dense_tensor *, tensor_object **);
        int64_t size = (int64_t)bytes;
        dense_tensor like = {
            .device = {DEVICE_CUDA, c->call.stream.device}, .rank = 1, .element = {CODE_UINT, 8, 1}, .shape = &size};
        *(void **)&allocate = find("TVMFFIEnvTensorAlloc");
        if (!allocate || allocate(&like, &scratch) != 0) {
            bind_fail(&c->call, "%s: %zu bytes of scratch are needed, and TVM FFI has no allocator for them",
                      c->call.op->name, bytes);
            c->call.status = ADZE_SCRATCH;
            return;
        }
    }
    bind_run(&c->call, BIND_OUT, scratch ? (char *)scratch->tensor.data + scratch->tensor.byte_offset : NULL, bytes);
    if (scratch) {
        int (*release)(void *);
        *(void **)&release = find("TVMFFIObjectDecRef");
        if (release)
            release(scratch);
    }
}

static int call_op(const adze_op *op, const any *arguments, int32_t count, any *result)
{
    tvm_call c;
    bind_begin(&c.call, op);
    c.first = NULL;
    int32_t at = 0;
    for (const adze_field *f = op->fields; f->name; f++, at++) {
        if (at >= count)
            continue;
        if (adze_is_tensor(f))
            take_tensor(&c, f, &arguments[at]);
        else
            take_number(&c, f, &arguments[at]);
    }
    if (count > at)
        bind_fail(&c.call, "%s: %d arguments are given, it has %d", op->name, count, at);
    take_stream(&c);
    run(&c);
    *result = (any){.type = NONE};
    if (c.call.status == ADZE_OK)
        return 0;
    void (*raise)(const char *, const char *);
    *(void **)&raise = find("TVMFFIErrorSetRaisedFromCStr");
    if (raise)
        raise(c.call.status == ADZE_BAD_ARG || c.call.status == ADZE_BAD_DTYPE ? "ValueError" : "RuntimeError",
              c.call.error);
    return -1;
}

#define X(name)                                                                                                      \
    ADZE_API int __tvm_ffi_##name(void *self, const any *arguments, int32_t count, any *result);                     \
    int __tvm_ffi_##name(void *self, const any *arguments, int32_t count, any *result)                               \
    {                                                                                                                \
        (void)self;                                                                                                  \
        return call_op(&adze_op_##name, arguments, count, result);                                                   \
    }
ADZE_OPS(X)
