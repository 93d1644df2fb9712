/* torch.c - every op as torch.ops.adze.*, from its table of fields.
   Plain C over PyTorch's stable C functions, found by dlsym in the libtorch that is already loaded: no header of
   torch, no link to it, and one binary for torch 2.10 and newer. Each op has up to three overloads: `op` returns the
   outputs that are always there, `op.<last output>` returns all of them, and `op.out` writes the caller's. A boxed
   kernel owns what it finds on the stack: tensors and optional cells are freed here, outputs are handed over. Errors
   leave by aoti_torch_check, which throws through this frame: nothing may be held then (-fexceptions). */
#include "bind.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>

#ifndef ADZE_NAMESPACE
#    define ADZE_NAMESPACE adze
#endif
#define TEXT_(x) #x
#define TEXT(x)  TEXT_(x)
static const char namespace_name[] = TEXT(ADZE_NAMESPACE);

typedef uint64_t value; /* StableIValue */
typedef int32_t error;  /* AOTITorchError */
typedef struct torch_tensor *tensor;
typedef struct torch_library *library;
typedef void (*boxed)(value *, uint64_t, uint64_t);
typedef void (*range)(int64_t, int64_t, void *);

#define TORCH(X)                                                                                                     \
    X(error, aoti_torch_library_init_fragment, (const char *, const char *, uint32_t, library *))                    \
    X(error, aoti_torch_library_init_impl, (const char *, const char *, const char *, uint32_t, library *))          \
    X(error, aoti_torch_library_def, (library, const char *))                                                        \
    X(error, aoti_torch_library_impl, (library, const char *, boxed))                                                \
    X(error, aoti_torch_delete_tensor_object, (tensor))                                                              \
    X(error, torch_get_const_data_ptr, (tensor, const void **))                                                      \
    X(error, torch_get_mutable_data_ptr, (tensor, void **))                                                          \
    X(error, aoti_torch_get_dim, (tensor, int64_t *))                                                                \
    X(error, aoti_torch_get_sizes, (tensor, int64_t **))                                                             \
    X(error, aoti_torch_get_strides, (tensor, int64_t **))                                                           \
    X(error, aoti_torch_get_dtype, (tensor, int32_t *))                                                              \
    X(error, aoti_torch_get_device_type, (tensor, int32_t *))                                                        \
    X(error, aoti_torch_get_device_index, (tensor, int32_t *))                                                       \
    X(error, aoti_torch_empty_strided,                                                                               \
      (int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, tensor *))                              \
    X(void, aoti_torch_check, (bool, const char *, const char *, uint32_t, const char *))                            \
    X(error, torch_parallel_for, (int64_t, int64_t, int64_t, range, void *))                                         \
    X(int32_t, aoti_torch_device_type_cpu, (void))                                                                   \
    X(int32_t, aoti_torch_device_type_cuda, (void))                                                                  \
    X(int32_t, aoti_torch_dtype_float32, (void))                                                                     \
    X(int32_t, aoti_torch_dtype_float16, (void))                                                                     \
    X(int32_t, aoti_torch_dtype_bfloat16, (void))                                                                    \
    X(int32_t, aoti_torch_dtype_float8_e4m3fn, (void))                                                               \
    X(int32_t, aoti_torch_dtype_float64, (void))                                                                     \
    X(int32_t, aoti_torch_dtype_uint8, (void))                                                                       \
    X(int32_t, aoti_torch_dtype_int8, (void))                                                                        \
    X(int32_t, aoti_torch_dtype_int32, (void))                                                                       \
    X(int32_t, aoti_torch_dtype_int64, (void))                                                                       \
    X(int32_t, aoti_torch_dtype_bool, (void))
#define DECLARE(result, name, parameters) result(*name) parameters; /* NOLINT(bugprone-macro-parentheses) */
static struct {
    TORCH(DECLARE)
    error (*aoti_torch_get_current_cuda_stream)(int32_t, void **); /* of libtorch_cuda, where there is one */
    error (*torch_delete_stable_ivalue)(value *);                  /* from 2.13 on; before, C++'s operator delete */
    void (*operator_delete)(void *);
    int32_t cpu, cuda, uint8;
    int32_t dtype[16]; /* torch's number of each adze_dtype, or -1 */
} torch;

static int dtype_from(int32_t torch_dtype)
{
    for (int d = 1; d < 16; d++)
        if (torch.dtype[d] == torch_dtype)
            return d;
    return ADZE_NONE;
}

/* A call in torch's terms: the tensors taken from the stack, and those made here. */
typedef struct torch_call {
    bind_call call;
    tensor taken[BIND_FIELDS], made[BIND_FIELDS], scratch;
    const adze_field *outs[BIND_FIELDS];
    int n_taken, n_made, n_outs;
    int32_t device_type, device_index; /* of the first tensor; type -1 before it */
} torch_call;

/* A tensor of the stack; an optional one lies in a cell made by C++'s new. */
static tensor pop_tensor(int optional, value v)
{
    if (!optional)
        return (tensor)(uintptr_t)v;
    value *cell = (value *)(uintptr_t)v;
    tensor t = (tensor)(uintptr_t)*cell;
    if (torch.torch_delete_stable_ivalue)
        torch.torch_delete_stable_ivalue(cell);
    else
        torch.operator_delete(cell);
    return t;
}

static void device_name(char *text, size_t size, int32_t type, int32_t index)
{
    if (type == torch.cpu)
        snprintf(text, size, "the CPU");
    else
        snprintf(text, size, "%s %d", type == torch.cuda ? "CUDA device" : "a device of another type,", index);
}

/* The view of a tensor on the stack. */
static void take_tensor(torch_call *c, const adze_field *f, value v)
{
    tensor t = pop_tensor(f->kind != ADZE_IN && f->kind != ADZE_OUT, v);
    c->taken[c->n_taken++] = t;
    int64_t rank, *shape, *stride;
    int32_t dtype, type, index = -1;
    adze_tensor *view = bind_tensor(&c->call, f);
    if (torch.aoti_torch_get_dim(t, &rank) || torch.aoti_torch_get_sizes(t, &shape) ||
        torch.aoti_torch_get_strides(t, &stride) || torch.aoti_torch_get_dtype(t, &dtype) ||
        torch.aoti_torch_get_device_type(t, &type) ||
        (type != torch.cpu && torch.aoti_torch_get_device_index(t, &index)) ||
        (bind_is_out(f) ? torch.torch_get_mutable_data_ptr(t, &view->data)
                        : torch.torch_get_const_data_ptr(t, (const void **)&view->data))) {
        bind_fail(&c->call, "%s: torch does not say what %s is", c->call.op->name, f->name);
        return;
    }
    bind_shape(&c->call, f, rank, shape, stride);
    view->dtype = dtype_from(dtype);
    if (view->dtype == ADZE_NONE)
        bind_fail(&c->call, "%s: %s has a dtype that adze does not have", c->call.op->name, f->name);
    if (c->device_type < 0)
        c->device_type = type, c->device_index = index;
    if (type != c->device_type || index != c->device_index) {
        char here[48], there[48];
        device_name(here, sizeof here, type, index);
        device_name(there, sizeof there, c->device_type, c->device_index);
        bind_fail(&c->call, "%s: %s is on %s, tensors before it are on %s", c->call.op->name, f->name, here, there);
    }
}

static void take_number(torch_call *c, const adze_field *f, value v)
{
    double number;
    if (f->kind == ADZE_FLOAT)
        memcpy(&number, &v, sizeof number);
    else
        number = (double)(int64_t)v;
    bind_number(&c->call, f, number);
}

/* Zero is an absent tensor or the number 0: the field has it already. */
static inline void take(torch_call *c, const adze_field *f, value v, bind_form form)
{
    if (v && bind_is_tensor(f)) {
        take_tensor(c, f, v);
        if (form != BIND_OUT)
            bind_check(&c->call, f);
    } else if (v)
        take_number(c, f, v);
}

static tensor make(torch_call *c, int64_t rank, const int64_t *shape, const int64_t *stride, int32_t dtype)
{
    tensor t = NULL;
    if (torch.aoti_torch_empty_strided(rank, shape, stride, dtype, c->device_type, c->device_index, &t))
        bind_fail(&c->call, "%s: torch could not allocate an output", c->call.op->name);
    return t;
}

static void make_outputs(torch_call *c, bind_form form)
{
    if (!bind_outputs(&c->call))
        return;
    for (int i = 0; i < c->n_outs; i++) {
        if (!bind_output(&c->call, form, c->outs[i]))
            continue;
        adze_tensor *view = bind_tensor(&c->call, c->outs[i]);
        tensor t = make(c, view->rank, view->shape, view->stride, torch.dtype[view->dtype]);
        if (!t)
            return;
        c->made[c->n_made++] = t;
        torch.torch_get_mutable_data_ptr(t, &view->data);
    }
}

/* The stream of the tensors, and the device's kernels loaded: a later capture finds them there. */
static void take_stream(torch_call *c)
{
    if (c->call.error[0] || c->device_type == torch.cpu)
        return;
    c->call.stream.device = c->device_index;
    if (c->device_type != torch.cuda || !torch.aoti_torch_get_current_cuda_stream ||
        torch.aoti_torch_get_current_cuda_stream(c->device_index, &c->call.stream.handle))
        bind_fail(&c->call, "%s: torch has no CUDA stream for its tensors", c->call.op->name);
    else
        bind_prepare(&c->call);
}

static void run(torch_call *c, bind_form form)
{
    size_t bytes = 0;
    void *scratch = NULL;
    if (c->call.error[0] || (form == BIND_OUT && !bind_scratch(&c->call, &bytes)))
        return;
    if (form != BIND_OUT && c->call.op->scratch)
        bytes = c->call.op->scratch(c->call.stream, c->call.args);
    if (bytes) {
        const int64_t size = (int64_t)bytes, one = 1;
        c->scratch = make(c, 1, &size, &one, torch.uint8);
        if (!c->scratch)
            return;
        torch.torch_get_mutable_data_ptr(c->scratch, &scratch);
    }
    bind_run(&c->call, form, scratch, bytes);
}

static void call_op(const adze_op *op, bind_form form, value *stack)
{
    const value *stack_at = stack;
    torch_call c;
    bind_begin(&c.call, op);
    c.n_taken = c.n_made = c.n_outs = 0;
    c.scratch = NULL;
    c.device_type = -1;
    for (const adze_field *f = op->fields; f->name; f++)
        if (bind_is_out(f))
            c.outs[c.n_outs++] = f;
        else
            take(&c, f, *stack_at++, form);
    for (int i = 0; form == BIND_OUT && i < c.n_outs; i++)
        take(&c, c.outs[i], *stack_at++, form);
    if (form != BIND_OUT)
        make_outputs(&c, form);
    take_stream(&c);
    run(&c, form);
    for (int i = 0; i < c.n_taken; i++)
        torch.aoti_torch_delete_tensor_object(c.taken[i]);
    if (c.scratch)
        torch.aoti_torch_delete_tensor_object(c.scratch);
    for (int i = 0; i < c.n_made; i++)
        if (c.call.error[0])
            torch.aoti_torch_delete_tensor_object(c.made[i]);
        else
            stack[i] = (value)(uintptr_t)c.made[i];
    if (c.call.error[0])
        torch.aoti_torch_check(false, op->name, __FILE__, __LINE__, c.call.error);
}

/* A boxed kernel carries no context: each op has three of its own. */
#define X(name)                                                                                                      \
    static void name##_plain(value *stack, uint64_t n_in, uint64_t n_out)                                            \
    {                                                                                                                \
        (void)n_in, (void)n_out;                                                                                     \
        call_op(&adze_op_##name, BIND_PLAIN, stack);                                                                 \
    }                                                                                                                \
    static void name##_all(value *stack, uint64_t n_in, uint64_t n_out)                                              \
    {                                                                                                                \
        (void)n_in, (void)n_out;                                                                                     \
        call_op(&adze_op_##name, BIND_ALL, stack);                                                                   \
    }                                                                                                                \
    static void name##_out(value *stack, uint64_t n_in, uint64_t n_out)                                              \
    {                                                                                                                \
        (void)n_in, (void)n_out;                                                                                     \
        call_op(&adze_op_##name, BIND_OUT, stack);                                                                   \
    }
ADZE_OPS(X)
#undef X
#define X(name) {name##_plain, name##_all, name##_out},
static const boxed kernels[][3] = {ADZE_OPS(X)};
#undef X

/* `rms_norm.sum(Tensor x, Tensor? residual=None, ..., float eps=0., int rounding=0) -> (Tensor, Tensor)` */
static void schema(char *text, size_t size, const adze_op *op, bind_form form)
{
    size_t n = 0;
    const adze_field *last_in = op->fields;
#define PUT(...) n += (size_t)snprintf(text + n, n < size ? size - n : 0, __VA_ARGS__)
    for (const adze_field *f = op->fields; f->name; f++)
        last_in = f->kind == ADZE_IN ? f : last_in;
    PUT("%s%s%s(", op->name, form == BIND_PLAIN ? "" : ".",
        form == BIND_PLAIN ? ""
        : form == BIND_OUT ? "out"
                           : bind_last_optional(op)->name);
    const char *comma = "";
    for (const adze_field *f = op->fields; f->name; f++) {
        if (bind_is_out(f))
            continue;
        PUT("%s%s %s%s", comma,
            f->kind == ADZE_IN         ? "Tensor"
            : f->kind == ADZE_OPTIONAL ? "Tensor?"
            : f->kind == ADZE_FLOAT    ? "float"
                                       : "int",
            f->name,
            f->kind == ADZE_IN || f < last_in ? ""
            : f->kind == ADZE_OPTIONAL        ? "=None"
            : f->kind == ADZE_FLOAT           ? "=0.0"
                                              : "=0");
        comma = ", ";
    }
    int count = 0;
    if (form == BIND_OUT)
        PUT(", *");
    for (const adze_field *f = op->fields; f->name; f++) {
        if (form == BIND_OUT && bind_is_out(f))
            PUT(", Tensor(%c!)%s %s%s", 'a' + count++, f->kind == ADZE_OUT ? "" : "?", f->name,
                f->kind == ADZE_OUT ? "" : "=None");
        else
            count += bind_returns(f, form);
    }
    PUT(") -> %s", form == BIND_OUT ? "()" : count == 1 ? "Tensor" : "(");
    for (int i = 0; form != BIND_OUT && count > 1 && i < count; i++)
        PUT("%sTensor%s", i ? ", " : "", i == count - 1 ? ")" : "");
#undef PUT
}

/* CPU kernels run in torch's threads. */
typedef struct loop {
    adze_range_fn body;
    void *context;
} loop;

static void loop_range(int64_t begin, int64_t end, void *of)
{
    ((loop *)of)->body(((loop *)of)->context, begin, end);
}

static void parallel_for(int64_t count, int64_t grain, adze_range_fn body, void *context)
{
    loop of = {body, context};
    if (count <= grain)
        body(context, 0, count);
    else
        torch.torch_parallel_for(0, count, grain > 0 ? grain : 1, loop_range, &of);
}

/* NULL, or the name of what this libtorch lacks. */
static const char *find_functions(void *cpu, void *cuda)
{
#define FIND(result, name, parameters)                                                                               \
    *(void **)&torch.name = dlsym(cpu, #name);                                                                       \
    if (!torch.name)                                                                                                 \
        return #name;
    TORCH(FIND)
    *(void **)&torch.torch_delete_stable_ivalue = dlsym(cpu, "torch_delete_stable_ivalue");
    *(void **)&torch.operator_delete = dlsym(cpu, "_ZdlPv");
    if (cuda)
        *(void **)&torch.aoti_torch_get_current_cuda_stream = dlsym(cuda, "aoti_torch_get_current_cuda_stream");
    if (!torch.torch_delete_stable_ivalue && !torch.operator_delete)
        return "torch_delete_stable_ivalue";
    torch.cpu = torch.aoti_torch_device_type_cpu();
    torch.cuda = torch.aoti_torch_device_type_cuda();
    torch.uint8 = torch.aoti_torch_dtype_uint8();
    for (int d = 0; d < 16; d++)
        torch.dtype[d] = -1;
    torch.dtype[ADZE_F32] = torch.aoti_torch_dtype_float32();
    torch.dtype[ADZE_F16] = torch.aoti_torch_dtype_float16();
    torch.dtype[ADZE_BF16] = torch.aoti_torch_dtype_bfloat16();
    torch.dtype[ADZE_F8E4M3] = torch.aoti_torch_dtype_float8_e4m3fn();
    torch.dtype[ADZE_F64] = torch.aoti_torch_dtype_float64();
    torch.dtype[ADZE_I8] = torch.aoti_torch_dtype_int8();
    torch.dtype[ADZE_I32] = torch.aoti_torch_dtype_int32();
    torch.dtype[ADZE_I64] = torch.aoti_torch_dtype_int64();
    torch.dtype[ADZE_BOOL] = torch.aoti_torch_dtype_bool();
    return NULL;
}

static int register_op(library definitions, const library *backends, int n_backends, int index)
{
    static const char *const suffix[] = {"", NULL, ".out"};
    const adze_op *op = adze_ops[index];
    for (bind_form form = BIND_PLAIN; form <= BIND_OUT; form++) {
        char text[2048], name[128];
        if (form == BIND_ALL && !bind_last_optional(op))
            continue;
        schema(text, sizeof text, op, form);
        if (form == BIND_ALL)
            snprintf(name, sizeof name, "%s.%s", op->name, bind_last_optional(op)->name);
        else
            snprintf(name, sizeof name, "%s%s", op->name, suffix[form]);
        if (torch.aoti_torch_library_def(definitions, text))
            return 0;
        for (int b = 0; b < n_backends; b++)
            if (torch.aoti_torch_library_impl(backends[b], name, kernels[index][form]))
                return 0;
    }
    return 1;
}

/* The libraries are never freed: that would take the operators away. */
const char *adze_torch_register(void)
{
    static char sentence[256];
    static int done;
    if (done)
        return NULL;
    void *const cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    void *const cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!cpu)
        return "libtorch_cpu.so is not loaded: import torch first";
    const char *const missing = find_functions(cpu, cuda);
    if (missing) {
        snprintf(sentence, sizeof sentence, "this torch has no %s: adze needs torch 2.10 or newer", missing);
        return sentence;
    }
    library definitions, backends[2];
    const int n_backends = cuda ? 2 : 1;
    int ok = !torch.aoti_torch_library_init_fragment(namespace_name, __FILE__, __LINE__, &definitions);
    for (int b = 0; ok && b < n_backends; b++)
        ok =
            !torch.aoti_torch_library_init_impl(namespace_name, b ? "CUDA" : "CPU", __FILE__, __LINE__, &backends[b]);
    for (int i = 0; ok && adze_ops[i]; i++)
        ok = register_op(definitions, backends, n_backends, i);
    if (!ok) {
        snprintf(sentence, sizeof sentence, "torch refused the operators of the namespace %s; is adze loaded twice?",
                 namespace_name);
        return sentence;
    }
    adze_set_parallel_for(parallel_for);
    done = 1;
    return NULL;
}
