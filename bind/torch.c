/* torch.c - every op as torch.ops.adze.*, from its table of fields.
   Plain C over PyTorch's stable C functions, found by dlsym in the libtorch that is already loaded: no header of
   torch, no link to it, and one binary for torch 2.10 and newer. Each op has up to four overloads: `op` returns the
   outputs that are always there, `op.<another output>` returns those up to that one, and `op.out` writes the
   caller's. A boxed kernel owns what it finds on the stack: tensors and optional cells are freed here, outputs are
   handed over. Errors leave by aoti_torch_check, which throws through this frame: nothing may be held then
   (-fexceptions). */
#include "torch.h"

#include <dlfcn.h>
#include <stdio.h>

#ifndef ADZE_NAMESPACE
#    define ADZE_NAMESPACE adze
#endif
#define TEXT_(x) #x
#define TEXT(x)  TEXT_(x)
static const char namespace_name[] = TEXT(ADZE_NAMESPACE);

torch_functions torch;

/* What a call reads of an op's table of fields: the inputs and numbers in the order of the stack, and the outputs. */
typedef struct slot {
    uint16_t offset;
    uint8_t kind, field;
} slot;
typedef struct plan {
    const adze_op *op;
    int32_t n_inputs, n_outputs;
    slot inputs[BIND_FIELDS], outputs[BIND_FIELDS];
} plan;
#define X(name) {.op = &adze_op_##name},
static plan plans[] = {ADZE_OPS(X)};
#undef X
#define X(name) name##_index,
enum { ADZE_OPS(X) };
#undef X

/* A call in torch's terms, with the tensors taken from the stack. */
typedef struct torch_call {
    int32_t device_type, device_index; /* of the first tensor; type -1 before it */
    int n_taken, n_made;
    tensor scratch, taken[BIND_FIELDS];
    bind_call call;
} torch_call;

static void device_name(char *text, size_t size, int32_t type, int32_t index)
{
    if (type == torch.cpu)
        snprintf(text, size, "the CPU");
    else
        snprintf(text, size, "%s %d", type == torch.cuda ? "CUDA device" : "a device of another type,", index);
}

/* The error for a tensor whose dtype or device this call does not accept. */
__attribute__((cold, noinline)) static void other_tensor(torch_call *c, const adze_field *f, int32_t type,
                                                         int32_t index)
{
    char here[48], there[48];
    device_name(here, sizeof here, type, index);
    device_name(there, sizeof there, c->device_type, c->device_index);
    if (bind_tensor(&c->call, f)->dtype == ADZE_NONE)
        bind_fail(&c->call, "%s: %s has a dtype that adze does not have", c->call.op->name, f->name);
    else
        bind_fail(&c->call, "%s: %s is on %s, tensors before it are on %s", c->call.op->name, f->name, here, there);
}

static inline int always_there(int kind)
{
    return kind == ADZE_IN || kind == ADZE_INOUT || kind == ADZE_OUT;
}

/* The view of a tensor on the stack. */
static void take_tensor(torch_call *c, const slot *s, value v, bind_form form)
{
    tensor t = always_there(s->kind) ? (tensor)(uintptr_t)v : open_cell(v);
    c->taken[c->n_taken++] = t;
    int64_t rank, *shape, *stride;
    int32_t dtype, type, index = -1;
    adze_tensor *view = (void *)(c->call.args + s->offset);
    const adze_field *f = c->call.op->fields + s->field;
    if (torch.aoti_torch_get_dim(t, &rank) || torch.aoti_torch_get_sizes(t, &shape) ||
        torch.aoti_torch_get_strides(t, &stride) || torch.aoti_torch_get_dtype(t, &dtype) ||
        torch.aoti_torch_get_device_type(t, &type) ||
        (s->kind < ADZE_INOUT ? torch.torch_get_const_data_ptr : torch.torch_get_mutable_data_ptr)(t, &view->data) ||
        (type != torch.cpu && torch.aoti_torch_get_device_index(t, &index))) {
        bind_fail(&c->call, "%s: torch gives no shape, dtype or address for %s", c->call.op->name, f->name);
        return;
    }
    view->dtype = (uint32_t)dtype < sizeof torch.adze_dtype ? torch.adze_dtype[dtype] : ADZE_NONE;
    bind_shape(&c->call, f, view, rank, shape, stride);
    if (c->device_type < 0)
        c->device_type = type, c->device_index = index;
    if (view->dtype == ADZE_NONE || type != c->device_type || index != c->device_index)
        other_tensor(c, f, type, index);
    if (form != BIND_OUT)
        bind_check(&c->call, f);
}

static inline void take_number(torch_call *c, const slot *s, value v)
{
    double number;
    if (s->kind == ADZE_FLOAT) {
        memcpy(&number, &v, sizeof number);
        *(float *)(void *)(c->call.args + s->offset) = (float)number;
    } else
        bind_number(&c->call, c->call.op->fields + s->field, (double)(int64_t)v);
}

/* Zero is an absent tensor or the number 0: the field has it already. */
static inline const value *take(torch_call *c, const slot *slots, int n, const value *stack, bind_form form)
{
    for (int i = 0; i < n; i++) {
        const value v = *stack++;
        if (!v)
            continue;
        if (slots[i].kind < ADZE_FLOAT)
            take_tensor(c, &slots[i], v, form);
        else
            take_number(c, &slots[i], v);
    }
    return stack;
}

static tensor make(torch_call *c, int64_t rank, const int64_t *shape, const int64_t *stride, int32_t dtype)
{
    tensor t = NULL;
    if (torch.aoti_torch_empty_strided(rank, shape, stride, dtype, c->device_type, c->device_index, &t))
        bind_fail(&c->call, "%s: torch could not allocate an output", c->call.op->name);
    return t;
}

/* The outputs go to the stack, whose arguments have all been taken. */
static inline void make_outputs(torch_call *c, const plan *p, bind_form form, value *stack)
{
    if (!bind_outputs(&c->call))
        return;
    for (int i = 0; i < p->n_outputs; i++) {
        const adze_field *f = c->call.op->fields + p->outputs[i].field;
        if (!bind_output(&c->call, form, f))
            continue;
        adze_tensor *view = bind_tensor(&c->call, f);
        const int64_t none = 0, one = 1;
        tensor t = view->dtype ? make(c, view->rank, view->shape, view->stride, torch.dtype[view->dtype])
                               : make(c, 1, &none, &one, torch.dtype[ADZE_F32]);
        if (!t)
            return;
        stack[c->n_made++] = (value)(uintptr_t)t;
        if (view->dtype)
            torch.torch_get_const_data_ptr(t, &view->data); /* it is new, so there is no copy-on-write to resolve */
    }
}

/* The stream of the tensors, and the device's kernels loaded: a later capture finds them there. */
__attribute__((noinline)) static void take_stream(torch_call *c)
{
    c->call.stream.device = c->device_index;
    if (c->device_type != torch.cuda || !torch.aoti_torch_get_current_cuda_stream ||
        torch.aoti_torch_get_current_cuda_stream(c->device_index, &c->call.stream.handle))
        bind_fail(&c->call, "%s: torch has no CUDA stream for its tensors", c->call.op->name);
    else
        bind_prepare(&c->call);
}

/* The memory that some ops need besides their tensors, and how much it is. */
__attribute__((noinline)) static void *make_scratch(torch_call *c, bind_form form, size_t *bytes)
{
    void *data = NULL;
    *bytes = 0;
    if (form != BIND_OUT) {
        ((adze_call *)(void *)c->call.args)->scratch_size = SIZE_MAX; /* as adze_dispatch_scratch() asks */
        *bytes = c->call.op->scratch(c->call.stream, c->call.args);
    } else {
        bind_scratch(&c->call, bytes);
    }
    const int64_t size = (int64_t)*bytes, one = 1;
    if (size && (c->scratch = make(c, 1, &size, &one, torch.uint8)))
        torch.torch_get_mutable_data_ptr(c->scratch, &data);
    return data;
}

static inline void run(torch_call *c, bind_form form)
{
    size_t bytes = 0;
    void *const scratch = c->call.op->scratch ? make_scratch(c, form, &bytes) : NULL;
    if (c->call.status == ADZE_OK)
        bind_run(&c->call, form, scratch, bytes);
}

__attribute__((always_inline)) static inline void call_op(const plan *p, bind_form form, value *stack)
{
    torch_call c;
    bind_begin(&c.call, p->op);
    c.n_taken = c.n_made = 0;
    c.scratch = NULL;
    c.device_type = c.device_index = -1;
    const value *rest = take(&c, p->inputs, p->n_inputs, stack, form);
    if (form == BIND_OUT)
        take(&c, p->outputs, p->n_outputs, rest, form);
    else
        make_outputs(&c, p, form, stack);
    if (c.call.status == ADZE_OK && c.device_type != torch.cpu)
        take_stream(&c);
    if (c.call.status == ADZE_OK)
        run(&c, form);
    for (int i = 0; i < c.n_taken; i++)
        torch.aoti_torch_delete_tensor_object(c.taken[i]);
    if (c.scratch)
        torch.aoti_torch_delete_tensor_object(c.scratch);
    if (c.call.status == ADZE_OK)
        return;
    for (int i = 0; i < c.n_made; i++)
        torch.aoti_torch_delete_tensor_object((tensor)(uintptr_t)stack[i]);
    torch.aoti_torch_check(false, p->op->name, __FILE__, __LINE__, c.call.error);
}

/* One copy for each form, so that the hot path has no branches on the form. */
__attribute__((noinline)) static void call_plain(const plan *p, value *stack)
{
    call_op(p, BIND_PLAIN, stack);
}
__attribute__((noinline)) static void call_one_more(const plan *p, value *stack)
{
    call_op(p, BIND_ONE_MORE, stack);
}
__attribute__((noinline)) static void call_two_more(const plan *p, value *stack)
{
    call_op(p, BIND_TWO_MORE, stack);
}
__attribute__((noinline)) static void call_out(const plan *p, value *stack)
{
    call_op(p, BIND_OUT, stack);
}

/* A boxed kernel gets no context, so each op has three functions of its own. */
#define X(name)                                                                                                      \
    static void name##_plain(value *stack, uint64_t n_in, uint64_t n_out)                                            \
    {                                                                                                                \
        (void)n_in, (void)n_out;                                                                                     \
        call_plain(&plans[name##_index], stack);                                                                     \
    }                                                                                                                \
    static void name##_one_more(value *stack, uint64_t n_in, uint64_t n_out)                                         \
    {                                                                                                                \
        (void)n_in, (void)n_out;                                                                                     \
        call_one_more(&plans[name##_index], stack);                                                                  \
    }                                                                                                                \
    static void name##_two_more(value *stack, uint64_t n_in, uint64_t n_out)                                         \
    {                                                                                                                \
        (void)n_in, (void)n_out;                                                                                     \
        call_two_more(&plans[name##_index], stack);                                                                  \
    }                                                                                                                \
    static void name##_out(value *stack, uint64_t n_in, uint64_t n_out)                                              \
    {                                                                                                                \
        (void)n_in, (void)n_out;                                                                                     \
        call_out(&plans[name##_index], stack);                                                                       \
    }
ADZE_OPS(X)
#undef X
#define X(name) {name##_plain, name##_one_more, name##_two_more, name##_out},
static const boxed kernels[][BIND_FORMS] = {ADZE_OPS(X)};
#undef X

/* `rms_norm.sum(Tensor x, Tensor? residual=None, ..., float eps=0., int rounding=0) -> (Tensor, Tensor)` */
static void schema(char *text, size_t size, const adze_op *op, bind_form form)
{
    size_t n = 0;
    const adze_field *last_in = op->fields;
#define PUT(...) n += (size_t)snprintf(text + n, n < size ? size - n : 0, __VA_ARGS__)
    for (const adze_field *f = op->fields; f->name; f++)
        last_in = adze_is_input(f) && always_there(f->kind) ? f : last_in;
    PUT("%s%s%s(", op->name, form == BIND_PLAIN ? "" : ".",
        form == BIND_PLAIN ? ""
        : form == BIND_OUT ? "out"
                           : bind_last_optional(op, form)->name);
    const char *comma = "";
    int written = 0;
    for (const adze_field *f = op->fields; f->name; f++) {
        if (adze_is_made(f))
            continue;
        PUT("%s%s", comma, adze_is_tensor(f) ? "Tensor" : f->kind == ADZE_FLOAT ? "float" : "int");
        if (adze_is_inout(f))
            PUT("(%c!)", 'a' + written++);
        PUT("%s %s%s", adze_is_tensor(f) && !always_there(f->kind) ? "?" : "", f->name,
            always_there(f->kind) || f <= last_in ? ""
            : adze_is_tensor(f)                   ? "=None"
            : f->kind == ADZE_FLOAT               ? "=0.0"
                                                  : "=0");
        comma = ", ";
    }
    int count = 0;
    if (form == BIND_OUT)
        PUT(", *");
    for (const adze_field *f = op->fields; f->name; f++) {
        if (form == BIND_OUT && adze_is_made(f))
            PUT(", Tensor(%c!)%s %s%s", 'a' + written++, f->kind == ADZE_OUT ? "" : "?", f->name,
                f->kind == ADZE_OUT ? "" : "=None");
        else
            count += bind_returns(op, f, form);
    }
    PUT(") -> %s", form == BIND_OUT || count == 0 ? "()" : count == 1 ? "Tensor" : "(");
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
    *(void **)&torch.aoti_torch_get_storage_offset = dlsym(cpu, "aoti_torch_get_storage_offset");
    *(void **)&torch.aoti_torch__reinterpret_tensor = dlsym(cpu, "aoti_torch__reinterpret_tensor");
    *(void **)&torch.addmm_out[0] = dlsym(cpu, "aoti_torch_cpu_addmm_out");
    *(void **)&torch.mm_out[0] = dlsym(cpu, "aoti_torch_cpu_mm_out");
    if (cuda) {
        *(void **)&torch.aoti_torch_get_current_cuda_stream = dlsym(cuda, "aoti_torch_get_current_cuda_stream");
        *(void **)&torch.addmm_out[1] = dlsym(cuda, "aoti_torch_cuda_addmm_out");
        *(void **)&torch.mm_out[1] = dlsym(cuda, "aoti_torch_cuda_mm_out");
    }
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
    torch.dtype[ADZE_U8] = torch.uint8;
    torch.dtype[ADZE_I8] = torch.aoti_torch_dtype_int8();
    torch.dtype[ADZE_I32] = torch.aoti_torch_dtype_int32();
    torch.dtype[ADZE_I64] = torch.aoti_torch_dtype_int64();
    torch.dtype[ADZE_BOOL] = torch.aoti_torch_dtype_bool();
    for (uint8_t d = 1; d < 16; d++)
        if (torch.dtype[d] >= 0 && torch.dtype[d] < (int32_t)sizeof torch.adze_dtype)
            torch.adze_dtype[torch.dtype[d]] = d;
    return NULL;
}

static void make_plan(plan *p)
{
    p->n_inputs = p->n_outputs = 0;
    for (const adze_field *f = p->op->fields; f->name; f++) {
        slot *s = adze_is_made(f) ? &p->outputs[p->n_outputs++] : &p->inputs[p->n_inputs++];
        *s = (slot){(uint16_t)f->offset, (uint8_t)f->kind, (uint8_t)(f - p->op->fields)};
    }
}

static int register_op(library definitions, const library *backends, int n_backends, int index)
{
    const adze_op *op = adze_ops[index];
    make_plan(&plans[index]);
    for (bind_form form = BIND_PLAIN; form <= BIND_OUT; form++) {
        char text[2048], name[128];
        const int more = form == BIND_ONE_MORE || form == BIND_TWO_MORE;
        if (more && !bind_last_optional(op, form))
            continue;
        schema(text, sizeof text, op, form);
        if (more)
            snprintf(name, sizeof name, "%s.%s", op->name, bind_last_optional(op, form)->name);
        else
            snprintf(name, sizeof name, "%s%s", op->name, form == BIND_OUT ? ".out" : "");
        if (torch.aoti_torch_library_def(definitions, text))
            return 0;
        for (int b = 0; b < n_backends; b++)
            if (torch.aoti_torch_library_impl(backends[b], name, kernels[index][form]))
                return 0;
    }
    return 1;
}

/* torch runs the GEMMs. Where it lacks a function for them, the operator is not registered. */
static int register_fused_linear(library definitions, const library *backends, int n_backends)
{
    for (int b = 0; b < n_backends; b++)
        if (!torch.addmm_out[b] || !torch.mm_out[b])
            return 1;
    if (!torch.aoti_torch_get_storage_offset || !torch.aoti_torch__reinterpret_tensor)
        return 1;
    int ok = !torch.aoti_torch_library_def(definitions, adze_fused_linear_schema);
    for (int b = 0; ok && b < n_backends; b++)
        ok = !torch.aoti_torch_library_impl(backends[b], "fused_linear", adze_fused_linear);
    return ok;
}

/* The libraries are never freed: that would remove the operators. */
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
    ok = ok && register_fused_linear(definitions, backends, n_backends);
    if (!ok) {
        snprintf(sentence, sizeof sentence, "torch refused the operators of the namespace %s; is adze loaded twice?",
                 namespace_name);
        return sentence;
    }
    adze_set_parallel_for(parallel_for);
    done = 1;
    return NULL;
}
