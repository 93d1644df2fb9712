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
   are exchanged by half of the row's number modulo 4. False where the driver has no such maps, or does not take these
   sizes and strides. */
static inline bool panel_map_of(CUtensorMap &map, CUtensorMapDataType type, unsigned size, const void *data,
                                const int64_t (&shape)[4], const int64_t (&stride)[3], int rows,
                                unsigned row_bytes = PANEL_ROW)
{
    typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                  const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                  CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    /* The driver's own function: the library does not link against the driver. Threads that look it up at the same
       time find the same one. */
    static void *known;
    void *entry = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!entry) {
        cudaDriverEntryPointQueryResult found;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found) !=
                cudaSuccess ||
            found != cudaDriverEntryPointSuccess) {
            cudaGetLastError();
            return false;
        }
        __atomic_store_n(&known, entry, __ATOMIC_RELAXED);
    }
    cuuint64_t sizes[4], strides[3];
    for (int d = 0; d < 4; d++)
        sizes[d] = (cuuint64_t)shape[3 - d];
    for (int d = 0; d < 3; d++) /* of one row, or head, the stride has no meaning, and must still be valid */
        strides[d] = shape[2 - d] > 1 ? (cuuint64_t)stride[2 - d] * size : sizes[d] * (d ? strides[d - 1] : size);
    const cuuint32_t box[4] = {row_bytes / size, (cuuint32_t)rows, 1, 1}, each[4] = {1, 1, 1, 1};
    return reinterpret_cast<encode_fn>(entry)(
               &map, type, 4, const_cast<void *>(data), sizes, strides, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
               row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
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
#define WGMMA_LIST16 WGMMA_TEN() "%10, %11, %12, %13, %14, %15"
#define WGMMA_LIST32 WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) "%30, %31"
#define WGMMA_LIST64 WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) WGMMA_TEN(3) WGMMA_TEN(4) WGMMA_TEN(5) "%60, %61, %62, %63"
#define WGMMA_SUM8(i)                                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),      \
        "+f"(d[i + 7])
#define WGMMA_SUMS16 WGMMA_SUM8(0), WGMMA_SUM8(8)
#define WGMMA_SUMS32 WGMMA_SUM8(0), WGMMA_SUM8(8), WGMMA_SUM8(16), WGMMA_SUM8(24)
#define WGMMA_SUMS64 WGMMA_SUMS32, WGMMA_SUM8(32), WGMMA_SUM8(40), WGMMA_SUM8(48), WGMMA_SUM8(56)
/* d [64 x n] (+)= a . b, both in shared memory; the columns of both are summed over. */
#define WGMMA_SHARED(n, type, list, sums, a_at, b_at, adds_at)                                                       \
    asm volatile("{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, %" #adds_at ", 0;\n\t"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" list "}, %" #a_at ", %" #b_at  \
                 ", adds, 1, 1, 0, 0;\n\t}"                                                                          \
                 : sums                                                                                              \
                 : "l"(a), "l"(b), "r"(adds))
/* The same with a in registers; the rows of b are summed over. */
#define WGMMA_HELD(n, type, list, sums, a_at, b_at)                                                                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" list "}, {" a_at "}, %" #b_at  \
                 ", 1, 1, 1, 1;"                                                                                     \
                 : sums                                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

/* A product of 16-bit elements: d [64 rows x N] += a [64 x 16] . b^T, of b [N x 16], or = where it does not add. Warp
   w of the warpgroup has rows 16 w to 16 w + 15; of them lane 4 g + t has in d[4 j + e] column 8 j + 2 t + e % 2 of
   row g + e / 2 * 8. */
template <typename T, int N>
__device__ __forceinline__ void wgmma_shared(float (&d)[N / 2], uint64_t a, uint64_t b, int adds)
{
    static_assert(N == 32 || N == 64 || N == 128, "");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr bool BF16 = std::is_same<T, bf16>::value;
    if constexpr (N == 128 && BF16)
        WGMMA_SHARED(128, "bf16", WGMMA_LIST64, WGMMA_SUMS64, 64, 65, 66);
    else if constexpr (N == 128)
        WGMMA_SHARED(128, "f16", WGMMA_LIST64, WGMMA_SUMS64, 64, 65, 66);
    else if constexpr (N == 64 && BF16)
        WGMMA_SHARED(64, "bf16", WGMMA_LIST32, WGMMA_SUMS32, 32, 33, 34);
    else if constexpr (N == 64)
        WGMMA_SHARED(64, "f16", WGMMA_LIST32, WGMMA_SUMS32, 32, 33, 34);
    else if constexpr (BF16)
        WGMMA_SHARED(32, "bf16", WGMMA_LIST16, WGMMA_SUMS16, 16, 17, 18);
    else
        WGMMA_SHARED(32, "f16", WGMMA_LIST16, WGMMA_SUMS16, 16, 17, 18);
#else
    (void)d, (void)a, (void)b, (void)adds;
#endif
}
/* d [64 rows x N] += a [64 x 16] . b [16 x N]. Of a, lane 4 g + t has columns 2 t and 2 t + 1 of row g, of row g + 8,
   and columns 2 t + 8 and 2 t + 9 of both. */
template <typename T, int N>
__device__ __forceinline__ void wgmma_held(float (&d)[N / 2], const uint32_t *a, uint64_t b)
{
    static_assert(N == 64 || N == 128, "");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr bool BF16 = std::is_same<T, bf16>::value;
    if constexpr (N == 128 && BF16)
        WGMMA_HELD(128, "bf16", WGMMA_LIST64, WGMMA_SUMS64, "%64, %65, %66, %67", 68);
    else if constexpr (N == 128)
        WGMMA_HELD(128, "f16", WGMMA_LIST64, WGMMA_SUMS64, "%64, %65, %66, %67", 68);
    else if constexpr (BF16)
        WGMMA_HELD(64, "bf16", WGMMA_LIST32, WGMMA_SUMS32, "%32, %33, %34, %35", 36);
    else
        WGMMA_HELD(64, "f16", WGMMA_LIST32, WGMMA_SUMS32, "%32, %33, %34, %35", 36);
#else
    (void)d, (void)a, (void)b;
#endif
}
/* The same of b [N x 16]^T, whose contiguous columns are summed over, or = where it does not add. */
#define WGMMA_WEIGHTS(n, type, list, sums, a_at, b_at, adds_at)                                                      \
    asm volatile("{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, %" #adds_at ", 0;\n\t"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" list "}, {" a_at "}, %" #b_at  \
                 ", adds, 1, 1, 0;\n\t}"                                                                             \
                 : sums                                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))
template <typename T, int N>
__device__ __forceinline__ void wgmma_weights(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int adds)
{
    static_assert(N == 32 || N == 64, "");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr bool BF16 = std::is_same<T, bf16>::value;
    if constexpr (N == 64 && BF16)
        WGMMA_WEIGHTS(64, "bf16", WGMMA_LIST32, WGMMA_SUMS32, "%32, %33, %34, %35", 36, 37);
    else if constexpr (N == 64)
        WGMMA_WEIGHTS(64, "f16", WGMMA_LIST32, WGMMA_SUMS32, "%32, %33, %34, %35", 36, 37);
    else if constexpr (BF16)
        WGMMA_WEIGHTS(32, "bf16", WGMMA_LIST16, WGMMA_SUMS16, "%16, %17, %18, %19", 20, 21);
    else
        WGMMA_WEIGHTS(32, "f16", WGMMA_LIST16, WGMMA_SUMS16, "%16, %17, %18, %19", 20, 21);
#else
    (void)d, (void)a, (void)b, (void)adds;
#endif
}

#define BYTES_FIFTY   WGMMA_TEN() WGMMA_TEN(1) WGMMA_TEN(2) WGMMA_TEN(3) WGMMA_TEN(4)
#define BYTES_NEXT    WGMMA_TEN(5) WGMMA_TEN(6) WGMMA_TEN(7) WGMMA_TEN(8) WGMMA_TEN(9) WGMMA_TEN(10) WGMMA_TEN(11)
#define BYTES_LIST128 BYTES_FIFTY BYTES_NEXT "%120, %121, %122, %123, %124, %125, %126, %127"
#define BYTES_SUM8(i)                                                                                                \
    "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]),      \
        "+r"(d[i + 7])
#define BYTES_SUM16(i) BYTES_SUM8(i), BYTES_SUM8(i + 8)
#define BYTES_SUM32(i) BYTES_SUM16(i), BYTES_SUM16(i + 16)
#define BYTES_SUMS64   BYTES_SUM32(0), BYTES_SUM32(32)
#define BYTES_SUMS128  BYTES_SUMS64, BYTES_SUM32(64), BYTES_SUM32(96)
#define BYTES_WGMMA_F8                                                                                               \
    asm volatile("{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, %66, 0;\n\t"                                            \
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" WGMMA_LIST64                              \
                 "}, %64, %65, adds, 1, 1;\n\t}"                                                                     \
                 : WGMMA_SUMS64                                                                                      \
                 : "l"(a), "l"(b), "r"(adds))
#define BYTES_WGMMA(n, list, sums, a_at, b_at, adds_at)                                                              \
    asm volatile("{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, %" #adds_at ", 0;\n\t"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" list "}, %" #a_at ", %" #b_at              \
                 ", adds;\n\t}"                                                                                      \
                 : sums                                                                                              \
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
        BYTES_WGMMA(32, WGMMA_LIST16, BYTES_SUM16(0), 16, 17, 18);
    else if constexpr (N == 64)
        BYTES_WGMMA(64, WGMMA_LIST32, BYTES_SUM32(0), 32, 33, 34);
    else if constexpr (N == 128)
        BYTES_WGMMA(128, WGMMA_LIST64, BYTES_SUMS64, 64, 65, 66);
    else
        BYTES_WGMMA(256, BYTES_LIST128, BYTES_SUMS128, 128, 129, 130);
#else
    (void)d, (void)a, (void)b, (void)adds;
#endif
}

#endif
