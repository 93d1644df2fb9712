/* wgmma.cuh - Hopper's tensor cores (sm_90a alone): products of a warpgroup, which is four warps, with operands in
   shared memory, and the copies of boxes of a tensor that bring them there. Elsewhere these do nothing: kernels that
   use them are launched on sm_90 only.

   Operands lie in panels of 64 columns: a row has 128 bytes, and its 16-byte pieces are exchanged by the row's number
   modulo 8 (piece p of row r is at p ^ r % 8). 8 rows are 1024 bytes, to which panels are aligned. */
#ifndef ADZE_CUDA_WGMMA_CUH
#define ADZE_CUDA_WGMMA_CUH

#include "bulk.cuh"

#include <cuda.h>

enum { PANEL = 64, PANEL_ROW = 128, PANEL_ALIGN = 1024 }; /* columns; bytes of a row; bytes */

/* Copies the box of a panel whose first element is at column, row, head and batch into shared memory, zeros where the
   tensor ends. Its bytes, all of the box, arrive at the barrier. */
__device__ __forceinline__ void panel_copy(uint32_t to, const CUtensorMap &map, int column, int row, int head,
                                           int batch, uint32_t barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
                 : "memory");
#else
    (void)to, (void)map, (void)column, (void)row, (void)head, (void)batch, (void)barrier;
#endif
}
/* The same into L2, which is allowed before pdl_wait(). */
__device__ __forceinline__ void panel_prefetch(const CUtensorMap &map, int column, int row, int head, int batch)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(column),
                 "r"(row), "r"(head), "r"(batch)
                 : "memory");
#else
    (void)map, (void)column, (void)row, (void)head, (void)batch;
#endif
}
__device__ __forceinline__ void panel_prefetch_map(const CUtensorMap &map)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#else
    (void)map;
#endif
}

/* Host: the map of a tensor of elements of `size` bytes, [batch, head, row, column], whose strides, but for the last,
   count elements and are of multiples of 16 bytes. A box has `rows` rows of 128 bytes; or of 64, whose 16-byte pieces
   are exchanged by half of the row's number modulo 4. L2 fetches no more than the box: with promotion to 256 bytes,
   629 MB of keys took 158 us to read on an H200 (2026-11-19), and 144 without. False where the driver has no such
   maps, or does not take these sizes and strides. */
static inline bool panel_map_of(CUtensorMap &map, CUtensorMapDataType type, unsigned size, const void *data,
                                const int64_t (&shape)[4], const int64_t (&stride)[3], int rows,
                                unsigned row_bytes = PANEL_ROW)
{
    typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                  const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                  CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    void *const entry = adze_cuda_map_encoder();
    if (!entry)
        return false;
    cuuint64_t sizes[4], strides[3];
    for (int d = 0; d < 4; d++)
        sizes[d] = (cuuint64_t)shape[3 - d];
    for (int d = 0; d < 3; d++) /* of one row, or head, the stride has no meaning, and must still be valid */
        strides[d] = shape[2 - d] > 1 ? (cuuint64_t)stride[2 - d] * size : sizes[d] * (d ? strides[d - 1] : size);
    const cuuint32_t box[4] = {row_bytes / size, (cuuint32_t)rows, 1, 1}, each[4] = {1, 1, 1, 1};
    return reinterpret_cast<encode_fn>(entry)(
               &map, type, 4, const_cast<void *>(data), sizes, strides, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
               row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
/* The same of bf16 or f16. */
static inline bool panel_map(CUtensorMap &map, bool is_bf16, const void *data, const int64_t (&shape)[4],
                             const int64_t (&stride)[3], int rows)
{
    return panel_map_of(map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, data,
                        shape, stride, rows);
}

/* An operand that begins at `at`. Of one whose contiguous columns are summed over, `next` has no meaning; of one
   whose rows are, it is how far the next panel is. Both go on to 8 more rows after 1024 bytes. */
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t at, uint32_t next)
{
    return (uint64_t)(at >> 4) | (uint64_t)(next >> 4) << 16 | (uint64_t)(PANEL_ALIGN >> 4) << 32 | (uint64_t)1 << 62;
}
/* The operand that begins `bytes` later. */
__device__ __forceinline__ uint64_t wgmma_later(uint64_t operand, int bytes)
{
    return operand + (uint64_t)(bytes >> 4);
}

/* Between what was last done with the registers of a product and the product. */
__device__ __forceinline__ void wgmma_fence()
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit()
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
/* What is computed is computed here: not after the next wait, nor before the last one. */
template <int N>
__device__ __forceinline__ void wgmma_here(float (&values)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(values[i])::"memory");
}
/* Waits until at most NEWER committed groups of products are under way; `sums` are those of a group that is not. */
template <int NEWER, int N>
__device__ __forceinline__ void wgmma_wait(float (&sums)[N])
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWER) : "memory");
#endif
    wgmma_here(sums);
}

/* The same without sums to read; and until none is under way, of sums of either type. */
template <int NEWER>
__device__ __forceinline__ void wgmma_wait()
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWER) : "memory");
#endif
}
template <typename SUM, int N>
__device__ __forceinline__ void wgmma_wait_all(SUM (&sums)[N])
{
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < N; i++)
        if constexpr (std::is_same<SUM, int>::value)
            asm volatile("" : "+r"(sums[i])::"memory");
        else
            asm volatile("" : "+f"(sums[i])::"memory");
}

/* Registers a warpgroup may have from here on, in each thread: fewer, then more for others. */
template <int COUNT>
__device__ __forceinline__ void registers_down()
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT>
__device__ __forceinline__ void registers_up()
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

/* The text and the operands of the instructions. */
#define WGMMA_TEN(t)                                                                                                 \
    "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define WGMMA_THIRTY WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2)
#define WGMMA_SIXTY  WGMMA_THIRTY WGMMA_TEN(3) WGMMA_TEN(4) WGMMA_TEN(5)
#define WGMMA_NINETY WGMMA_SIXTY WGMMA_TEN(6) WGMMA_TEN(7) WGMMA_TEN(8)
#define WGMMA_LIST16 WGMMA_TEN() "%10, %11, %12, %13, %14, %15"
#define WGMMA_LIST32 WGMMA_THIRTY "%30, %31"
#define WGMMA_LIST40 WGMMA_THIRTY "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_LIST48 WGMMA_THIRTY WGMMA_TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_LIST56 WGMMA_THIRTY WGMMA_TEN(3) WGMMA_TEN(4) "%50, %51, %52, %53, %54, %55"
#define WGMMA_LIST64 WGMMA_SIXTY "%60, %61, %62, %63"
#define WGMMA_LIST80 WGMMA_SIXTY WGMMA_TEN(6) "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_LIST96 WGMMA_NINETY "%90, %91, %92, %93, %94, %95"
#define WGMMA_LIST128                                                                                                \
    WGMMA_NINETY WGMMA_TEN(9) WGMMA_TEN(10) WGMMA_TEN(11) "%120, %121, %122, %123, %124, %125, %126, %127"
/* Sums are floats ("+f") or integers ("+r"). */
#define WGMMA_SUM8(c, i)                                                                                             \
    c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define WGMMA_SUM16(c, i) WGMMA_SUM8(c, i), WGMMA_SUM8(c, i + 8)
#define WGMMA_SUM32(c, i) WGMMA_SUM16(c, i), WGMMA_SUM16(c, i + 16)
#define WGMMA_SUMS16(c)   WGMMA_SUM16(c, 0)
#define WGMMA_SUMS32(c)   WGMMA_SUM32(c, 0)
#define WGMMA_SUMS40(c)   WGMMA_SUM32(c, 0), WGMMA_SUM8(c, 32)
#define WGMMA_SUMS48(c)   WGMMA_SUM32(c, 0), WGMMA_SUM16(c, 32)
#define WGMMA_SUMS56(c)   WGMMA_SUMS48(c), WGMMA_SUM8(c, 48)
#define WGMMA_SUMS64(c)   WGMMA_SUM32(c, 0), WGMMA_SUM32(c, 32)
#define WGMMA_SUMS80(c)   WGMMA_SUMS64(c), WGMMA_SUM16(c, 64)
#define WGMMA_SUMS96(c)   WGMMA_SUMS64(c), WGMMA_SUM32(c, 64)
#define WGMMA_SUMS128(c)  WGMMA_SUMS96(c), WGMMA_SUM32(c, 96)
/* d [64 x n] (+)= a . b, both in shared memory; the columns of both are summed over. */
#define WGMMA_SHARED(n, type, r, a_at, b_at, adds_at)                                                                \
    asm volatile("{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, %" #adds_at ", 0;\n\t"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" WGMMA_LIST##r                  \
                 "}, %" #a_at ", %" #b_at ", adds, 1, 1, 0, 0;\n\t}"                                                 \
                 : WGMMA_SUMS##r("+f")                                                                               \
                 : "l"(a), "l"(b), "r"(adds))
/* The same with a in registers; the rows of b are summed over. */
#define WGMMA_HELD(n, type, r, a_at, b_at)                                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" WGMMA_LIST##r                  \
                 "}, {" a_at "}, %" #b_at ", 1, 1, 1, 1;"                                                            \
                 : WGMMA_SUMS##r("+f")                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
/* The instruction of N columns, which are n and have r sums, for T. */
#define WGMMA_CASE(instruction, n, ...)                                                                              \
    if constexpr (N == n && std::is_same<T, bf16>::value)                                                            \
        instruction(n, "bf16", __VA_ARGS__);                                                                         \
    else if constexpr (N == n)                                                                                       \
    instruction(n, "f16", __VA_ARGS__)

/* A product of 16-bit elements: d [64 rows x N] += a [64 x 16] . b^T, of b [N x 16], or = where it does not add. Warp
   w of the warpgroup has rows 16 w to 16 w + 15; of them lane 4 g + t has in d[4 j + e] column 8 j + 2 t + e % 2 of
   row g + e / 2 * 8. */
template <typename T, int N>
__device__ __forceinline__ void wgmma_shared(float (&d)[N / 2], uint64_t a, uint64_t b, int adds)
{
    static_assert(N == 32 || N == 64 || N == 80 || N == 112 || N == 128, "");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    WGMMA_CASE(WGMMA_SHARED, 32, 16, 16, 17, 18);
    WGMMA_CASE(WGMMA_SHARED, 64, 32, 32, 33, 34);
    WGMMA_CASE(WGMMA_SHARED, 80, 40, 40, 41, 42);
    WGMMA_CASE(WGMMA_SHARED, 112, 56, 56, 57, 58);
    WGMMA_CASE(WGMMA_SHARED, 128, 64, 64, 65, 66);
#else
    (void)d, (void)a, (void)b, (void)adds;
#endif
}
/* d [64 rows x N] += a [64 x 16] . b [16 x N]. Of a, lane 4 g + t has columns 2 t and 2 t + 1 of row g, of row g + 8,
   and columns 2 t + 8 and 2 t + 9 of both. */
template <typename T, int N>
__device__ __forceinline__ void wgmma_held(float (&d)[N / 2], const uint32_t *a, uint64_t b)
{
    static_assert(N == 64 || N == 96 || N == 128 || N == 160 || N == 192 || N == 256, "");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    WGMMA_CASE(WGMMA_HELD, 64, 32, "%32, %33, %34, %35", 36);
    WGMMA_CASE(WGMMA_HELD, 96, 48, "%48, %49, %50, %51", 52);
    WGMMA_CASE(WGMMA_HELD, 128, 64, "%64, %65, %66, %67", 68);
    WGMMA_CASE(WGMMA_HELD, 160, 80, "%80, %81, %82, %83", 84);
    WGMMA_CASE(WGMMA_HELD, 192, 96, "%96, %97, %98, %99", 100);
    WGMMA_CASE(WGMMA_HELD, 256, 128, "%128, %129, %130, %131", 132);
#else
    (void)d, (void)a, (void)b;
#endif
}
/* The same of b [N x 16]^T, whose contiguous columns are summed over, or = where it does not add. */
#define WGMMA_WEIGHTS(n, type, r, a_at, b_at, adds_at)                                                               \
    asm volatile("{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, %" #adds_at ", 0;\n\t"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" WGMMA_LIST##r                  \
                 "}, {" a_at "}, %" #b_at ", adds, 1, 1, 0;\n\t}"                                                    \
                 : WGMMA_SUMS##r("+f")                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))
template <typename T, int N>
__device__ __forceinline__ void wgmma_weights(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int adds)
{
    static_assert(N == 32 || N == 64, "");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    WGMMA_CASE(WGMMA_WEIGHTS, 32, 16, "%16, %17, %18, %19", 20, 21);
    WGMMA_CASE(WGMMA_WEIGHTS, 64, 32, "%32, %33, %34, %35", 36, 37);
#else
    (void)d, (void)a, (void)b, (void)adds;
#endif
}

#define BYTES_WGMMA_F8                                                                                               \
    asm volatile("{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, %66, 0;\n\t"                                            \
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" WGMMA_LIST64                              \
                 "}, %64, %65, adds, 1, 1;\n\t}"                                                                     \
                 : WGMMA_SUMS64("+f")                                                                                \
                 : "l"(a), "l"(b), "r"(adds))
#define BYTES_WGMMA(n, r, a_at, b_at, adds_at)                                                                       \
    asm volatile("{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, %" #adds_at ", 0;\n\t"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" WGMMA_LIST##r "}, %" #a_at ", %" #b_at     \
                                                                                        ", adds;\n\t}"               \
                 : WGMMA_SUMS##r("+r")                                                                               \
                 : "l"(a), "l"(b), "r"(adds))

/* d [64 rows x N] += a [64 x 32] . b^T, of b [N x 32], or = where it does not add: floats of f8e4m3, integers of
   i8. Lanes have d as wgmma_shared has it. */
template <int N>
__device__ __forceinline__ void wgmma_bytes(float (&d)[N / 2], uint64_t a, uint64_t b, int adds)
{
    static_assert(N == 128, "");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    BYTES_WGMMA_F8;
#else
    (void)d, (void)a, (void)b, (void)adds;
#endif
}
template <int N>
__device__ __forceinline__ void wgmma_bytes(int (&d)[N / 2], uint64_t a, uint64_t b, int adds)
{
    static_assert(N == 32 || N == 64 || N == 128 || N == 256, "");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (N == 32)
        BYTES_WGMMA(32, 16, 16, 17, 18);
    else if constexpr (N == 64)
        BYTES_WGMMA(64, 32, 32, 33, 34);
    else if constexpr (N == 128)
        BYTES_WGMMA(128, 64, 64, 65, 66);
    else
        BYTES_WGMMA(256, 128, 128, 129, 130);
#else
    (void)d, (void)a, (void)b, (void)adds;
#endif
}

#endif
