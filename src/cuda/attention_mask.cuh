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

/* Where a lane loads the mask of a row from a key on: aligned vectors from `first` on, which hold bytes of the row up
   to `left`, and whose elements are `shift` bytes later. Only vectors that hold an element of the row are loaded;
   others are zeros. */
struct mask_source {
    const char *first;
    uint32_t shift;
    int left;
};
enum { MASK_ROUND = 4 }; /* vectors that a lane loads at once, at most, and as many again where rows are unaligned */
struct mask_vectors {
    uint4 v[MASK_ROUND];
};
/* The vectors of a lane that the 8 NT elements of a row take. */
template <int BYTES, int NT>
constexpr int mask_chunks = (NT * BYTES * 8 + 63) / 64;

template <int BYTES>
__device__ __forceinline__ mask_source mask_source_of(const attention_params &p, int64_t row, int key)
{
    constexpr int64_t FAR = 1 << 20;
    const int t = (int)threadIdx.x % 4;
    const char *const from = p.mask + (row + key) * BYTES + t * 16;
    const uint32_t shift = (uint32_t)(uintptr_t)from & 15;
    return {from - shift, shift, (int)min((int64_t)(p.n - key) * BYTES - t * 16 + shift, FAR)};
}
/* Loads a round of vectors, from number `begin` on: those with the elements' first bytes, or with SECOND the ones
   after them, which are needed where elements lie in both. */
template <int BYTES, int NT, bool SECOND>
__device__ __forceinline__ void mask_load(const mask_source &from, int begin, mask_vectors &to)
{
    constexpr int ALL = NT * BYTES * 8;
    const int t = (int)threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < MASK_ROUND; i++)
        if (begin + i < mask_chunks<BYTES, NT>) {
            const int at = (begin + i) * 64, of = at + (SECOND ? 16 : 0);
            const bool mine = at + 64 <= ALL || at + t * 16 < ALL;
            to.v[i] = load_or_zeros(from.first + of, mine && (!SECOND || from.shift > 0) && of < from.left);
        }
}

/* Applies a round to scores in base 2: score(j, e) is that of column 8 j + 2 t + e. */
template <typename T, int BYTES, int NT, typename SCORE>
__device__ __forceinline__ void mask_apply(const mask_vectors &low, const mask_vectors &high, uint32_t shift,
                                           int begin, SCORE score)
{
    constexpr float LOG2_E = 1.4426950408889634f;
    constexpr int TILES = 8 / BYTES; /* of 8 columns, in the vectors of four lanes */
#pragma unroll
    for (int i = 0; i < MASK_ROUND; i++) {
        if (begin + i >= mask_chunks<BYTES, NT>)
            break;
        const uint4 v = shift_together<BYTES>(low.v[i], high.v[i], shift);
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
        for (int j = 0; j < TILES; j++) {
            const int tile = (begin + i) * TILES + j;
            if (tile >= NT)
                break;
            if constexpr (BYTES == 1) {
                const uint32_t pair = x[j / 2] >> (j % 2 * 16);
                score(tile, 0) = pair & 0xff ? score(tile, 0) : -INFINITY;
                score(tile, 1) = pair & 0xff00 ? score(tile, 1) : -INFINITY;
            } else {
                float2 added;
                if constexpr (BYTES == 4)
                    added = make_float2(__uint_as_float(x[2 * j]), __uint_as_float(x[2 * j + 1]));
                else
                    added = two_floats<T>(x[j]);
                score(tile, 0) = fmaf(added.x, LOG2_E, score(tile, 0));
                score(tile, 1) = fmaf(added.y, LOG2_E, score(tile, 1));
            }
        }
    }
}
/* The same with all rounds, which it loads. */
template <typename T, int BYTES, int NT, typename SCORE>
__device__ __forceinline__ void mask_apply_row(const mask_source &from, SCORE score)
{
#pragma unroll
    for (int at = 0; at < mask_chunks<BYTES, NT>; at += MASK_ROUND) {
        mask_vectors low, high;
        mask_load<BYTES, NT, false>(from, at, low);
        mask_load<BYTES, NT, true>(from, at, high);
        mask_apply<T, BYTES, NT>(low, high, from.shift, at, score);
    }
}
/* Calls use() with the size of the mask's elements, which is a type. */
template <typename T, typename USE>
__device__ __forceinline__ void mask_with_bytes(const attention_params &p, USE use)
{
    if (p.mask_kind == MASK_HIDES)
        use(std::integral_constant<int, 1>());
    else if (sizeof(T) == 4 || p.mask_kind == MASK_F32)
        use(std::integral_constant<int, 4>());
    else if constexpr (sizeof(T) == 2)
        use(std::integral_constant<int, 2>());
}

/* Applies the mask to the scores in base 2 of a row: score(j, e) is at column 8 j + 2 t + e from `key` on, and the
   row of the mask begins at element `row`. Scores of keys that the row does not see may be anything afterwards. Whole
   warps call it. */
template <typename T, int NT, typename SCORE>
__device__ __forceinline__ void attention_mask_row(const attention_params &p, int64_t row, int key, SCORE score)
{
    mask_with_bytes<T>(p, [&](auto bytes) {
        constexpr int BYTES = decltype(bytes)::value;
        mask_apply_row<T, BYTES, NT>(mask_source_of<BYTES>(p, row, key), score);
    });
}

/* A mask that all rows share, whose pairs of elements are aligned (mask_shared): a lane loads those of its own
   columns, before the scores are there. Pairs of f32 would take too many registers: they are loaded as they are
   added. */
template <typename T, int NT>
struct attention_mask_shared {
    uint32_t pair[NT];
    template <int BYTES>
    __device__ __forceinline__ static const char *at(const attention_params &p, int64_t row, int key)
    {
        return p.mask + (row + key + (int)threadIdx.x % 4 * 2) * BYTES;
    }
    __device__ __forceinline__ void load(const attention_params &p, int64_t row, int key)
    {
        const int left = p.n - key - (int)threadIdx.x % 4 * 2;
        mask_with_bytes<T>(p, [&](auto bytes) {
            constexpr int BYTES = decltype(bytes)::value;
            const char *const from = at<BYTES>(p, row, key);
#pragma unroll
            for (int j = 0; j < NT && BYTES < 4; j++) {
                pair[j] = 0;
                if (8 * j < left)
                    pair[j] = BYTES == 1 ? *reinterpret_cast<const uint16_t *>(from + 8 * j)
                                         : *reinterpret_cast<const uint32_t *>(from + 16 * j);
            }
        });
    }
    /* score(half, j, e): of two rows. */
    template <typename SCORE>
    __device__ __forceinline__ void apply(const attention_params &p, int64_t row, int key, SCORE score)
    {
        constexpr float LOG2_E = 1.4426950408889634f;
        const int left = p.n - key - (int)threadIdx.x % 4 * 2;
        mask_with_bytes<T>(p, [&](auto bytes) {
            constexpr int BYTES = decltype(bytes)::value;
            const float2 *const from = reinterpret_cast<const float2 *>(at<BYTES>(p, row, key));
#pragma unroll
            for (int j = 0; j < NT; j++) {
                if (BYTES == 4 && j % 4 == 0) /* loads that come earlier would take registers */
                    asm volatile("" ::: "memory");
                float2 added = {};
                if constexpr (BYTES == 2)
                    added = two_floats<T>(pair[j]);
                else if (BYTES == 4 && 8 * j < left)
                    added = from[4 * j];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float &even = score(half, j, 0), &odd = score(half, j, 1);
                    if constexpr (BYTES == 1)
                        even = pair[j] & 0xff ? even : -INFINITY, odd = pair[j] & 0xff00 ? odd : -INFINITY;
                    else
                        even = fmaf(added.x, LOG2_E, even), odd = fmaf(added.y, LOG2_E, odd);
                }
            }
        });
    }
};

#endif
