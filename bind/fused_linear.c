/* fused_linear.c - torch.ops.adze.fused_linear: two or three Linears that read the same input, with concatenated
   results. torch runs the GEMMs: one, where the weights follow each other in memory, which every call checks, else
   one for each. It is for compiled graphs, in which Python sees the weights only while it traces. */
#include "torch.h"

#include <stdarg.h>
#include <stdio.h>

enum { PARTS = 3, ARGUMENTS = 1 + 2 * PARTS, RANK = 16 };
static const char *const names[ARGUMENTS] = {"x",          "first",       "second",    "third",
                                             "first_bias", "second_bias", "third_bias"};
const char adze_fused_linear_schema[] =
    "fused_linear(Tensor x, Tensor first, Tensor second, Tensor? third=None, Tensor? first_bias=None, "
    "Tensor? second_bias=None, Tensor? third_bias=None) -> Tensor";

typedef struct view {
    tensor handle; /* NULL: absent */
    int64_t rank, *shape, *stride, offset;
    void *data;
    int32_t dtype, type, index;
} view;
typedef struct fused_call {
    view in[ARGUMENTS];
    int n_parts, n_held;
    int64_t rows, depth, size[PARTS], width; /* of x as a matrix, of each result, and of all */
    tensor held[4];                          /* the views that a GEMM reads and writes */
    char error[256];                         /* empty: nothing has failed */
} fused_call;

__attribute__((format(printf, 2, 3))) static int fail(fused_call *c, const char *format, ...)
{
    if (!c->error[0]) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(c->error, sizeof c->error, format, arguments);
        va_end(arguments);
    }
    return 0;
}

static int is_dense(const view *v)
{
    int64_t count = 1;
    int dense = 1;
    for (int64_t d = v->rank - 1; d >= 0; d--) {
        dense = dense && (v->shape[d] == 1 || v->stride[d] == count);
        count *= v->shape[d];
    }
    return dense || count == 0;
}

/* What an argument is, and that it can be multiplied with the others. */
static int look(fused_call *c, int i)
{
    view *v = &c->in[i];
    const view *x = &c->in[0];
    if (torch.aoti_torch_get_dim(v->handle, &v->rank) || torch.aoti_torch_get_sizes(v->handle, &v->shape) ||
        torch.aoti_torch_get_strides(v->handle, &v->stride) || torch.aoti_torch_get_dtype(v->handle, &v->dtype) ||
        torch.aoti_torch_get_device_type(v->handle, &v->type) ||
        torch.aoti_torch_get_device_index(v->handle, &v->index) ||
        torch.torch_get_const_data_ptr(v->handle, &v->data) ||
        torch.aoti_torch_get_storage_offset(v->handle, &v->offset))
        return fail(c, "fused_linear: torch gives no shape, dtype or address for %s", names[i]);
    if ((uint32_t)v->dtype >= sizeof torch.adze_dtype || torch.adze_dtype[v->dtype] == ADZE_NONE)
        return fail(c, "fused_linear: %s has a dtype that adze does not have", names[i]);
    if (v->dtype != x->dtype || v->type != x->type || v->index != x->index)
        return fail(c, "fused_linear: %s has another dtype or device than x", names[i]);
    const int64_t rank = i == 0 ? v->rank : i <= PARTS ? 2 : 1;
    if (v->rank != rank || rank < 1 || rank > RANK || !is_dense(v))
        return fail(c, "fused_linear: %s of rank %lld must be contiguous, %s", names[i], (long long)v->rank,
                    i == 0       ? "of rank 1 to 16"
                    : i <= PARTS ? "a matrix"
                                 : "a vector");
    return 1;
}

static int look_at_all(fused_call *c)
{
    const view *x = &c->in[0], *weight = c->in + 1, *bias = weight + PARTS;
    c->n_parts = weight[2].handle ? 3 : 2;
    for (int i = 0; i < ARGUMENTS; i++)
        if (c->in[i].handle && !look(c, i))
            return 0;
    c->depth = x->shape[x->rank - 1];
    c->rows = 1;
    for (int64_t d = 0; d < x->rank - 1; d++)
        c->rows *= x->shape[d];
    for (int i = 0; i < PARTS; i++) {
        if (!bias[i].handle != !(bias[0].handle && i < c->n_parts))
            return fail(c, "fused_linear: %s is %s", names[1 + PARTS + i],
                        bias[i].handle ? "one too many" : "missing");
        if (i >= c->n_parts)
            continue;
        c->size[i] = weight[i].shape[0];
        c->width += c->size[i];
        if (weight[i].shape[1] != c->depth)
            return fail(c, "fused_linear: %s has rows of %lld elements, x has %lld", names[1 + i],
                        (long long)weight[i].shape[1], (long long)c->depth);
        if (bias[i].handle && bias[i].shape[0] != c->size[i])
            return fail(c, "fused_linear: %s has %lld elements, it must have %lld", names[1 + PARTS + i],
                        (long long)bias[i].shape[0], (long long)c->size[i]);
    }
    return 1;
}

/* Whether tensors are contiguous as one. Addresses are not enough: neighbours may belong to two allocations. */
static int end_to_end(const view *v, int n)
{
    for (int i = 0; i + 1 < n; i++) {
        const int64_t count = v[i].shape[0] * (v[i].rank == 2 ? v[i].shape[1] : 1);
        const int64_t size = (int64_t)adze_dtype_size(torch.adze_dtype[v[i].dtype]);
        if (v[i + 1].offset != v[i].offset + count || (char *)v[i + 1].data != (char *)v[i].data + count * size)
            return 0;
    }
    return 1;
}

/* A view of a tensor's memory, held until its GEMM is launched. */
static tensor part_of(fused_call *c, const view *v, int64_t rank, int64_t rows, int64_t columns, int64_t row_stride,
                      int64_t column_stride, int64_t at)
{
    const int64_t shape[] = {rows, columns}, stride[] = {row_stride, column_stride};
    tensor made = NULL;
    if (torch.aoti_torch__reinterpret_tensor(v->handle, rank, shape, stride, at, &made)) {
        fail(c, "fused_linear: torch could not make a view");
        return NULL;
    }
    return c->held[c->n_held++] = made;
}

/* out[:, at:at + size] = x weight^T + bias */
static void multiply(fused_call *c, const view *out, const view *weight, const view *bias, int64_t at, int64_t size)
{
    c->n_held = 0;
    const view *x = &c->in[0];
    tensor to = part_of(c, out, 2, c->rows, size, c->width, 1, at);
    tensor a = to ? part_of(c, x, 2, c->rows, c->depth, c->depth, 1, 0) : NULL;
    tensor b = a ? part_of(c, weight, 2, c->depth, size, 1, c->depth, 0) : NULL;
    tensor more = b && bias->handle ? part_of(c, bias, 1, size, 0, 1, 0, 0) : NULL;
    const int cuda = x->type != torch.cpu;
    if (!c->error[0] && (bias->handle ? torch.addmm_out[cuda](to, more, a, b, 1, 1) : torch.mm_out[cuda](to, a, b)))
        fail(c, "fused_linear: torch could not multiply");
    for (int i = 0; i < c->n_held; i++)
        torch.aoti_torch_delete_tensor_object(c->held[i]);
}

static tensor compute(fused_call *c)
{
    const view *x = &c->in[0], *weight = c->in + 1, *bias = weight + PARTS;
    int64_t shape[RANK], stride[RANK], step = 1;
    memcpy(shape, x->shape, (size_t)x->rank * sizeof *shape);
    shape[x->rank - 1] = c->width;
    for (int64_t d = x->rank - 1; d >= 0; d--) {
        stride[d] = step;
        step *= shape[d] > 0 ? shape[d] : 1;
    }
    view out = {0};
    if (torch.aoti_torch_empty_strided(x->rank, shape, stride, x->dtype, x->type, x->index, &out.handle)) {
        fail(c, "fused_linear: torch could not allocate an output");
        return NULL;
    }
    if (c->rows * c->width == 0)
        return out.handle;
    if (end_to_end(weight, c->n_parts) && (!bias->handle || end_to_end(bias, c->n_parts))) {
        multiply(c, &out, weight, bias, 0, c->width);
        return out.handle;
    }
    int64_t at = 0;
    for (int i = 0; i < c->n_parts && !c->error[0]; at += c->size[i++])
        if (c->size[i] > 0)
            multiply(c, &out, &weight[i], &bias[i], at, c->size[i]);
    return out.handle;
}

void adze_fused_linear(value *stack, uint64_t n_in, uint64_t n_out)
{
    (void)n_in, (void)n_out;
    fused_call c = {0};
    for (int i = 0; i < ARGUMENTS; i++)
        if (stack[i])
            c.in[i].handle = i <= 2 ? (tensor)(uintptr_t)stack[i] : open_cell(stack[i]);
    tensor out = look_at_all(&c) ? compute(&c) : NULL;
    for (int i = 0; i < ARGUMENTS; i++)
        if (c.in[i].handle)
            torch.aoti_torch_delete_tensor_object(c.in[i].handle);
    if (c.error[0]) {
        if (out)
            torch.aoti_torch_delete_tensor_object(out);
        torch.aoti_torch_check(false, "fused_linear", __FILE__, __LINE__, c.error);
    }
    stack[0] = (value)(uintptr_t)out;
}
