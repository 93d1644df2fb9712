/* gemm on CUDA: a call as its kernels take it, and the norm or the copy of x by a launch of its own. */
#include "gemm_call.cuh"

extern "C" adze_status adze_rms_norm_cuda(adze_stream, const void *);
extern "C" adze_status adze_layer_norm_cuda(adze_stream, const void *);

extern "C" gemm_params gemm_params_of(const adze_gemm_args *a)
{
    gemm_params p = {};
    const int size = (int)adze_dtype_size(a->x.dtype);
    const int out_size = adze_float_size(a->out.dtype);
    const adze_tensor *const w[GEMM_PARTS] = {&a->w, &a->w2, &a->w3};
    const adze_tensor *const bias[GEMM_PARTS] = {&a->bias, &a->bias2, &a->bias3};
    const adze_tensor *const scale[GEMM_PARTS] = {&a->w_scale, &a->w2_scale, &a->w3_scale};
    const adze_tensor *const zero[GEMM_PARTS] = {&a->w_zero, &a->w2_zero, &a->w3_zero};
    const adze_tensor *const out[GEMM_PARTS] = {&a->out, &a->out2, &a->out3};
    adze_tensor x = a->x, gate = a->gate;
    adze_tensor rows_of[GEMM_TENSORS] = {
        a->x, a->out, a->out2, a->out3, a->residual, a->gate, adze_by_rows(&a->x_scale)};
    p.batches = 1;
    if (a->w.rank == 3) { /* the first dimension of each is the batch */
        p.batches = a->x.shape[0];
        p.x_batch = a->x.stride[0] * size, p.w_batch = a->w.stride[0] * size;
        p.out_batch = a->out.stride[0], p.residual_batch = a->residual.dtype ? a->residual.stride[0] : 0;
        const bool gate_batched = gate.rank == 3 && gate.shape[0] > 1;
        p.gate_batch = gate_batched ? gate.stride[0] : 0;
        for (adze_tensor &t : rows_of) {
            if (!t.dtype || t.rank < 3)
                continue;
            t.rank--;
            for (int d = 0; d < t.rank; d++)
                t.shape[d] = t.shape[d + 1], t.stride[d] = t.stride[d + 1];
        }
        x = rows_of[GEMM_X];
    }
    const adze_tensor *tensors[GEMM_TENSORS];
    for (int t = 0; t < GEMM_TENSORS; t++)
        tensors[t] = &rows_of[t];
    adze_rows_init(&p.rows, &x, GEMM_TENSORS, tensors);
    p.x = (const char *)a->x.data;
    p.m = p.rows.count;
    p.k = a->x.shape[a->x.rank - 1];
    int64_t column = 0;
    for (int i = 0; i < GEMM_PARTS; i++) {
        gemm_part &part = p.part[i];
        if (!w[i]->dtype)
            continue;
        part.w = (const char *)w[i]->data;
        part.w_stride = w[i]->stride[w[i]->rank - 2] * size;
        part.n = w[i]->shape[w[i]->rank - 2];
        if (scale[i]->dtype) {
            part.w_stride = w[i]->stride[0]; /* of bytes */
            part.scale = scale[i]->data;
            part.scale_dtype = scale[i]->dtype;
            part.scale_stride = scale[i]->rank == 1 && scale[i]->shape[0] == 1 ? 0 : scale[i]->stride[0];
            part.zero = zero[i]->dtype ? zero[i]->data : NULL;
            part.zero_stride = zero[i]->rank == 1 && zero[i]->shape[0] == 1 ? 0 : zero[i]->stride[0];
        }
        part.bias = bias[i]->dtype ? bias[i]->data : NULL;
        part.bias_f32 = bias[i]->dtype == ADZE_F32;
        part.out_rows = a->separate ? GEMM_OUT + i : GEMM_OUT;
        part.column = a->separate ? 0 : column;
        part.out = out[a->separate ? i : 0]->data;
        if (part.out && !a->separate)
            part.out = (char *)part.out + column * out_size;
        column += part.n;
        p.n += a->glu && i ? 0 : part.n;
    }
    p.norm_weight = a->norm_weight.dtype ? a->norm_weight.data : NULL;
    p.norm_weight_f32 = a->norm_weight.dtype == ADZE_F32;
    p.norm_bias = a->norm_bias.dtype ? a->norm_bias.data : NULL;
    p.norm_bias_f32 = a->norm_bias.dtype == ADZE_F32;
    p.residual = a->residual.dtype ? a->residual.data : NULL;
    p.gate = gate.dtype ? gate.data : NULL;
    p.gate_f32 = gate.dtype == ADZE_F32;
    p.eps = a->eps, p.weight_offset = a->weight_offset;
    p.norm = a->norm, p.rounding = a->rounding, p.glu = a->glu;
    p.act = a->glu && !a->act ? ADZE_ACT_SILU : a->act;
    p.out_f32 = a->out.dtype == ADZE_F32, p.out_bf16 = a->out.dtype == ADZE_BF16;
    p.x_scale = (const float *)a->x_scale.data;
    p.format = a->w.dtype == ADZE_I8       ? OF_I8
               : a->w.dtype == ADZE_F8E4M3 ? OF_F8
               : a->w.dtype == ADZE_U8     ? OF_U4
                                           : OF_X;
    p.group = a->group, p.group_rows = a->group_rows ? a->group_rows : 1;
    p.const_weights = a->call.flags & ADZE_CONST_WEIGHTS;
    p.batch_invariant = a->call.flags & ADZE_BATCH_INVARIANT;
    return p;
}

/* x in scratch. */
extern "C" adze_tensor gemm_dense(const adze_gemm_args *a)
{
    adze_tensor t = a->x;
    t.data = a->call.scratch;
    int64_t stride = 1;
    for (int d = t.rank; d-- > 0;) {
        t.stride[d] = stride;
        stride *= t.shape[d];
    }
    return t;
}
extern "C" adze_status gemm_norm(const cuda_call &s, const adze_gemm_args *a, const gemm_params &p)
{
    const adze_run_fn run = a->norm == ADZE_NORM_RMS ? adze_rms_norm_cuda : adze_layer_norm_cuda;
    adze_norm_args norm = {};
    norm.x = a->x;
    norm.out = gemm_dense(a);
    norm.weight = a->norm_weight, norm.bias = a->norm_bias;
    norm.eps = a->eps, norm.weight_offset = a->weight_offset;
    norm.rounding = a->rounding & ADZE_ROUND_NORM;
    norm.call.flags = a->call.flags & ADZE_CONST_WEIGHTS;
    if (!p.batch_invariant)
        return run(s, &norm);
    /* The order of a norm's sum depends on the number of rows. */
    const int64_t size = (int64_t)adze_dtype_size(a->x.dtype);
    for (int64_t token = 0; token < p.m; token++) {
        adze_norm_args row = norm;
        row.x.rank = row.out.rank = 1;
        row.x.shape[0] = row.out.shape[0] = p.k;
        row.x.stride[0] = row.out.stride[0] = 1;
        row.x.data = (char *)a->x.data + adze_row_offset(&p.rows, GEMM_X, token) * size;
        row.out.data = (char *)norm.out.data + token * p.k * size;
        ADZE_CHECK(run(s, &row));
    }
    return ADZE_OK;
}

/* Whether x is off 16-byte borders where the weights are not, and worth a copy: a launch more, and then kernels that
   load vectors. */
extern "C" int gemm_copies(const gemm_params &p, int dtype)
{
    constexpr double MANY = 16e6; /* products: fewer take other kernels no longer */
    const int64_t stride = p.rows.rank == 1 ? p.rows.stride[GEMM_X][0] : 0;
    bool copies = (dtype == ADZE_F16 || dtype == ADZE_BF16) && !p.norm && !p.x_scale && p.batches == 1 &&
                  p.rows.rank == 1 && p.k % 8 == 0 && ((uintptr_t)p.x % 16 != 0 || stride % 8 != 0);
    for (const gemm_part &part : p.part)
        copies = copies && (part.n == 0 || ((uintptr_t)part.w % 16 == 0 && part.w_stride % 16 == 0));
    return copies && (double)(p.m * p.n) * (double)(p.k * (p.glu ? 2 : 1)) >= MANY;
}
/* Copies `rows` rows of k elements, k a multiple of 8, which begin at any address, and follow each other in `out`. */
static __global__ void gemm_copy_rows(const uint16_t *x, int64_t stride, int64_t rows, int64_t k, uint4 *out)
{
    pdl_launch_next();
    pdl_wait();
    const int64_t vectors = k / 8, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < rows * vectors; i += step) {
        const uint16_t *const from = x + i / vectors * stride + i % vectors * 8;
        uint32_t pair[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            pair[j] = from[2 * j] | (uint32_t)from[2 * j + 1] << 16;
        out[i] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
}
extern "C" adze_status gemm_copy(const cuda_call &s, const adze_gemm_args *a, const gemm_params &p)
{
    constexpr int64_t THREADS = 256, MOST = 16; /* MOST: blocks of a multiprocessor */
    const int64_t blocks = std::min(ceil_div(p.m * (p.k / 8), THREADS), MOST * s.gpu.sm_count);
    return launch(s, gemm_copy_rows, blocks, dim3((unsigned)THREADS), 0, (const uint16_t *)p.x,
                  p.rows.stride[GEMM_X][0], p.m, p.k, (uint4 *)a->call.scratch);
}
