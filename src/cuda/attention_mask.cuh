/* attention_mask.cuh - the mask of a tile of scores as tensor cores leave them: of 8 NT keys, lane 4 g + t has
   columns 8 j + 2 t and 8 j + 2 t + 1 of a row. The four lanes of a row load 64 bytes of its mask at a time, 16 each,
   from any address, and exchange them. */
#ifndef ADZE_CUDA_ATTENTION_MASK_CUH
#define ADZE_CUDA_ATTENTION_MASK_CUH

#include "attention_call.cuh"
#include "mma.cuh"
#include "unit.cuh"

/* Lanes whose number has LANE give the word without WORD, the others the one with it, of each pair of words. */
template <int LANE, int WORD>
__device__ __forceinline__ void quad_swap(uint32_t (&x)[4])
{
    const bool upper = threadIdx.x & LANE;
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (!(j & WORD)) {
            const uint32_t got = __shfl_xor_sync(~0u, upper ? x[j] : x[j + WORD], LANE);
            (upper ? x[j] : x[j + WORD]) = got;
        }
}
/* Word j of lane t of four becomes word t of lane j. */
__device__ __forceinline__ void quad_transpose(uint32_t (&x)[4])
{
    quad_swap<1, 1>(x);
    quad_swap<2, 2>(x);
}

/* Loads 8 NT elements of BYTES, those of a row of n from `key` on, and calls change(tile, words, j) for each tile of
   8 with what the lane has of it: the words of f32, pair j of others. Only vectors that hold an element of the row
   are loaded; others are zeros. */
template <int BYTES, int NT, typename CHANGE>
__device__ __forceinline__ void mask_pairs(const char *row, int64_t n, int64_t key, CHANGE change)
{
    constexpr int TILES = 8 / BYTES, CHUNKS = (NT + TILES - 1) / TILES; /* tiles of 8 columns in 64 bytes */
    constexpr int ROUND = CHUNKS < 4 ? CHUNKS : 4;                      /* chunks whose loads are in flight at once */
    const int t = (int)threadIdx.x % 4;
    const char *const from = row + key * BYTES + t * 16, *const first =
                                                             (const char *)((uintptr_t)from & ~(uintptr_t)15);
    const uint32_t shift = (uint32_t)(uintptr_t)from & 15;
    /* Bytes of the row behind `first`, or as many as are looked at. */
    const int left = (int)min((n - key) * BYTES - t * 16 + shift, (int64_t)(CHUNKS * 64 + 32));
#pragma unroll
    for (int begin = 0; begin < CHUNKS; begin += ROUND) {
        uint4 low[ROUND], high[ROUND];
#pragma unroll
        for (int i = 0; i < ROUND; i++) {
            const int at = (begin + i) * 64;
            const bool mine = at + 64 <= NT * 8 * BYTES || at + t * 16 < NT * 8 * BYTES;
            low[i] = load_or_zeros(first + at, mine && at < left);
            high[i] = load_or_zeros(first + at + 16, mine && shift > 0 && at + 16 < left);
        }
#pragma unroll
        for (int i = 0; i < ROUND; i++) {
            const uint4 v = shift_together<BYTES>(low[i], high[i], shift);
            uint32_t x[4] = {v.x, v.y, v.z, v.w};
            if constexpr (BYTES == 1) { /* a lane's two tiles: their pairs of the same number in a word */
                x[0] = __byte_perm(v.x, v.z, 0x5410), x[1] = __byte_perm(v.x, v.z, 0x7632);
                x[2] = __byte_perm(v.y, v.w, 0x5410), x[3] = __byte_perm(v.y, v.w, 0x7632);
            }
            if constexpr (BYTES == 4) { /* four lanes have two tiles */
                quad_swap<1, 2>(x);
                quad_swap<2, 2>(x);
            } else {
                quad_transpose(x);
            }
#pragma unroll
            for (int j = 0; j < TILES; j++)
                if ((begin + i) * TILES + j < NT)
                    change((begin + i) * TILES + j, x, j);
        }
    }
}

/* Applies the mask to the scores in base 2 of a row: score(j, e) is at column 8 j + 2 t + e from `key` on, and the
   row of the mask begins at element `row`. Scores of keys that the row does not see may be anything afterwards. Whole
   warps call it. */
template <typename T, int NT, typename SCORE>
__device__ __forceinline__ void attention_mask_row(const attention_params &p, int64_t row, int key, SCORE score)
{
    constexpr float LOG2_E = 1.4426950408889634f;
    const auto add = [&](int tile, float even, float odd) {
        score(tile, 0) = fmaf(even, LOG2_E, score(tile, 0)), score(tile, 1) = fmaf(odd, LOG2_E, score(tile, 1));
    };
    if (p.mask_kind == MASK_HIDES) {
        mask_pairs<1, NT>(p.mask + row, p.n, key, [&](int tile, const uint32_t(&x)[4], int j) {
            const uint32_t pair = x[j / 2] >> (j % 2 * 16);
            score(tile, 0) = pair & 0xff ? score(tile, 0) : -INFINITY;
            score(tile, 1) = pair & 0xff00 ? score(tile, 1) : -INFINITY;
        });
    } else if (sizeof(T) == 4 || p.mask_kind == MASK_F32) {
        mask_pairs<4, NT>(p.mask + row * 4, p.n, key, [&](int tile, const uint32_t(&x)[4], int j) {
            add(tile, __uint_as_float(x[2 * j]), __uint_as_float(x[2 * j + 1]));
        });
    } else if constexpr (sizeof(T) == 2) {
        mask_pairs<2, NT>(p.mask + row * 2, p.n, key, [&](int tile, const uint32_t(&x)[4], int j) {
            const float2 pair = two_floats<T>(x[j]);
            add(tile, pair.x, pair.y);
        });
    }
}

#endif
