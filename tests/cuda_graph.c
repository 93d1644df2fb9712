/* cuda_graph.c - on a GPU: after adze_prepare() the very first calls of ops are recorded in a CUDA graph, their
   replay gives the bits of a plain call, and the current device stays what it was. An axis that rope_table does not
   have gives NaN, and nothing is read there. Built only where CUDA is. */
#include "adze.h"

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPECT_DETAIL adze_last_error()
#include "expect.h"

enum { ROWS = 37, DIM = 1024, COUNT = ROWS * DIM };

/* The first calls of four ops, each of a module of its own, in one capture; their results, then those of plain calls.
 */
enum { AXES = 3, POSITIONS = 5, COLUMNS = 8 };
typedef struct memory {
    float x[64], softmax[64], activation[64], sum[64];
    float pos[POSITIONS * AXES], freq[COLUMNS], cos[POSITIONS * COLUMNS], sin[POSITIONS * COLUMNS];
    int32_t axis[COLUMNS];
} memory;

static int call_four(adze_stream where, memory *m)
{
    const adze_tensor x = {m->x, {4, 16}, {16, 1}, 2, ADZE_F32};
    adze_softmax_args softmax = {.call = ADZE_CALL(softmax), .out = x, .x = x};
    adze_activation_args activation = {.call = ADZE_CALL(activation), .out = x, .x = x, .act = ADZE_ACT_GELU};
    adze_gated_add_args sum = {.call = ADZE_CALL(gated_add), .out = x, .x = x, .residual = x, .gate = x};
    softmax.out.data = m->softmax, activation.out.data = m->activation, sum.out.data = m->sum;
    const adze_rope_table_args table = {.call = ADZE_CALL(rope_table),
                                        .cos = {m->cos, {POSITIONS, COLUMNS}, {COLUMNS, 1}, 2, ADZE_F32},
                                        .sin = {m->sin, {POSITIONS, COLUMNS}, {COLUMNS, 1}, 2, ADZE_F32},
                                        .pos = {m->pos, {POSITIONS, AXES}, {AXES, 1}, 2, ADZE_F32},
                                        .freq = {m->freq, {COLUMNS}, {1}, 1, ADZE_F32},
                                        .axis = {m->axis, {COLUMNS}, {1}, 1, ADZE_I32}};
    return adze_softmax(where, &softmax) == ADZE_OK && adze_activation(where, &activation) == ADZE_OK &&
           adze_gated_add(where, &sum) == ADZE_OK && adze_rope_table(where, &table) == ADZE_OK;
}

static void check_first_calls(adze_stream where)
{
    static memory host, replayed, plain;
    memory *m = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    for (int i = 0; i < 64; i++)
        host.x[i] = (float)(i % 11) / 4 - 1;
    for (int i = 0; i < POSITIONS * AXES; i++)
        host.pos[i] = (float)i;
    for (int i = 0; i < COLUMNS; i++)
        host.freq[i] = 1, host.axis[i] = i % AXES;
    host.axis[3] = 9000, host.axis[4] = -1, host.axis[5] = AXES, host.axis[6] = INT32_MIN;
    cudaSetDevice(where.device);
    cudaMalloc((void **)&m, sizeof *m);
    cudaMemcpy(m, &host, sizeof host, cudaMemcpyHostToDevice);
    cudaStreamBeginCapture(where.handle, cudaStreamCaptureModeGlobal);
    expect(call_four(where, m), "the first calls of four ops, captured");
    expect(cudaStreamEndCapture(where.handle, &graph) == cudaSuccess, "the end of their capture");
    expect(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess, "their graph");
    cudaGraphLaunch(exec, where.handle);
    expect(cudaStreamSynchronize(where.handle) == cudaSuccess, "their replay");
    cudaMemcpy(&replayed, m, sizeof replayed, cudaMemcpyDeviceToHost);
    cudaMemcpy(m, &host, sizeof host, cudaMemcpyHostToDevice);
    expect(call_four(where, m) && cudaStreamSynchronize(where.handle) == cudaSuccess, "the same as plain calls");
    cudaMemcpy(&plain, m, sizeof plain, cudaMemcpyDeviceToHost);
    expect(memcmp(&plain, &replayed, sizeof plain) == 0 && plain.softmax[1] > 0, "the same bits of all");
    int known = 0, unknown = 0;
    for (int i = 0; i < POSITIONS * COLUMNS; i++) {
        const int there = host.axis[i % COLUMNS] >= 0 && host.axis[i % COLUMNS] < AXES;
        const float c = plain.cos[i], s = plain.sin[i];
        known += there && c * c + s * s > 0.999f && c * c + s * s < 1.001f;
        unknown += !there && c != c && s != s;
    }
    expect(known == POSITIONS * 4 && unknown == POSITIONS * 4, "an axis that is not there gives NaN");
    cudaFree(m);
    cudaSetDevice(0);
}

static float of_bf16(uint16_t value)
{
    const uint32_t bits = (uint32_t)value << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* The first product of many tokens, which is cuBLASLt's where that library is: in a capture, then as a plain call,
   with the scratch that it asks for and with none. Scratch may be asked for before tensors have memory. */
static void check_many_tokens(adze_stream where, const uint16_t *values)
{
    enum { M = 128, N = 64, K = 128, OUT = M * N };
    static uint16_t replayed[OUT], plain[OUT], bare[OUT];
    uint16_t *x = NULL, *w = NULL, *out = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    size_t bytes = 0;
    cudaSetDevice(where.device);
    cudaMalloc((void **)&x, M * K * sizeof *x);
    cudaMalloc((void **)&w, N * K * sizeof *w);
    cudaMalloc((void **)&out, OUT * sizeof *out);
    cudaMemcpy(x, values, M * K * sizeof *x, cudaMemcpyHostToDevice);
    cudaMemcpy(w, values + M * K, N * K * sizeof *w, cudaMemcpyHostToDevice);
    adze_gemm_args args = {.call = ADZE_CALL(gemm),
                           .out = {out, {M, N}, {N, 1}, 2, ADZE_BF16},
                           .x = {x, {M, K}, {K, 1}, 2, ADZE_BF16},
                           .w = {w, {N, K}, {K, 1}, 2, ADZE_BF16},
                           .act = ADZE_ACT_SILU};
    adze_gemm_args planned = args;
    planned.residual = args.out;
    expect(adze_gemm_scratch(where, &planned, &bytes) == ADZE_OK, "the scratch of a product with a residual");
    planned.residual.data = planned.out.data = planned.x.data = planned.w.data = NULL;
    size_t before = 0;
    expect(adze_gemm_scratch(where, &planned, &before) == ADZE_OK && before == bytes,
           "the same scratch before its tensors have memory");
    expect(adze_gemm_scratch(where, &args, &bytes) == ADZE_OK, "the scratch of a product");
    cudaMalloc(&args.call.scratch, bytes + 1);
    args.call.scratch_size = bytes;
    cudaStreamBeginCapture(where.handle, cudaStreamCaptureModeGlobal);
    expect(adze_gemm(where, &args) == ADZE_OK, "the first product, captured");
    expect(cudaStreamEndCapture(where.handle, &graph) == cudaSuccess, "the end of its capture");
    expect(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess, "its graph");
    cudaGraphLaunch(exec, where.handle);
    expect(cudaStreamSynchronize(where.handle) == cudaSuccess, "its replay");
    cudaMemcpy(replayed, out, sizeof replayed, cudaMemcpyDeviceToHost);
    expect(adze_gemm(where, &args) == ADZE_OK && cudaStreamSynchronize(where.handle) == cudaSuccess,
           "a plain product");
    cudaMemcpy(plain, out, sizeof plain, cudaMemcpyDeviceToHost);
    expect(memcmp(plain, replayed, sizeof plain) == 0 && plain[1] != 0, "the same bits of the product");
    args.call.scratch_size = 0;
    expect(adze_gemm(where, &args) == ADZE_OK && cudaStreamSynchronize(where.handle) == cudaSuccess,
           "without scratch");
    cudaMemcpy(bare, out, sizeof bare, cudaMemcpyDeviceToHost);
    int close = 0; /* another order of sums: a neighbour of the same bf16, or what floats lose of 128 products */
    for (int i = 0; i < OUT; i++) {
        const float a = of_bf16(plain[i]), b = of_bf16(bare[i]), most = (a < 0 ? -a : a) / 128 + 0x1p-12f;
        close += a - b <= most && b - a <= most;
    }
    expect(close == OUT, "without scratch: the same product");
    cudaFree(x), cudaFree(w), cudaFree(out), cudaFree(args.call.scratch);
    cudaSetDevice(0);
}

int main(void)
{
    static uint16_t host[COUNT], plain[COUNT], replayed[COUNT];
    int devices = 0, before = -1, after = -1;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("no CUDA device\n0 passed, 0 failed, 1 skipped\n");
        return 0;
    }
    for (int i = 0; i < COUNT; i++)
        host[i] = (uint16_t)(0x3f00 + i * 37 % 251 + (i % 3 == 0 ? 0x8000 : 0));
    const int device = devices - 1;
    cudaStream_t stream;
    void *x, *out;
    cudaSetDevice(device);
    cudaStreamCreate(&stream);
    cudaMalloc(&x, sizeof host);
    cudaMalloc(&out, sizeof host);
    cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice);
    cudaSetDevice(0);
    expect(adze_prepare(device) == ADZE_OK, "prepare");

    const adze_stream where = {device, stream};
    check_first_calls(where);
    check_many_tokens(where, host);
    const adze_tensor view = {x, {ROWS, DIM}, {DIM, 1}, 2, ADZE_BF16};
    adze_rms_norm_args args = {.call = ADZE_CALL(rms_norm), .out = view, .x = view, .eps = 1e-6f};
    args.out.data = out;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaGetDevice(&before);
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    expect(adze_rms_norm(where, &args) == ADZE_OK, "the first call, captured");
    expect(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "the end of the capture");
    cudaGetDevice(&after);
    expect(before == after, "the current device");
    expect(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess, "the graph");
    cudaMemset(out, 0, sizeof host);
    cudaGraphLaunch(exec, stream);
    cudaStreamSynchronize(stream);
    cudaMemcpy(replayed, out, sizeof host, cudaMemcpyDeviceToHost);
    cudaMemset(out, 0, sizeof host);
    expect(adze_rms_norm(where, &args) == ADZE_OK, "a plain call");
    cudaStreamSynchronize(stream);
    cudaMemcpy(plain, out, sizeof host, cudaMemcpyDeviceToHost);
    expect(memcmp(plain, replayed, sizeof plain) == 0, "the same bits");
    expect(plain[1] != 0, "a value");
    return expect_report();
}
