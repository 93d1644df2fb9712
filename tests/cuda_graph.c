/* cuda_graph.c - on a GPU: after adze_prepare() the very first call of an op is recorded in a CUDA graph, its replay
   gives the bits of a plain call, and the current device stays what it was. Built only where CUDA is. */
#include "adze.h"

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { ROWS = 37, DIM = 1024, COUNT = ROWS * DIM };

static int passed, failed;

static void expect(int ok, const char *what)
{
    ok ? passed++ : failed++;
    if (!ok)
        printf("FAIL %s (%s)\n", what, adze_last_error());
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
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
