/* rope_pieces.cuh - rope and qk_norm_rope on CUDA for heads that a warp can hold, in any form and at any address.

   A lane has two pieces of up to 8 elements of a head: half of rotary_dim apart, or two that hold whole pairs, or two
   that do not rotate. A piece at any address is loaded as the aligned vectors around it, which are shifted together.
   Where pieces of out are not whole vectors, a head is stored by way of shared memory. A head has as many lanes as it
   needs (a group). The groups of a team take the heads of a token, each every `groups`th head, so that a lane unpacks
   its columns of the tables and its weight once for all its heads. A warp has several teams, or a team several warps.
   A norm of each head is a sum over a group. One across heads is a sum over the team, which holds all heads of its
   token; their weights differ, and each is loaded while the preceding head is stored. */
#ifndef ADZE_CUDA_ROPE_PIECES_CUH
#define ADZE_CUDA_ROPE_PIECES_CUH

#include "launch.cuh"
#include "rotary.h"
#include "rows.cuh"
#include "unit.cuh"

constexpr int PIECE = 8;            /* elements, at most */
constexpr int PIECES_THREADS = 128; /* of a block, at most */
template <int SIZE>
constexpr int TEAM_THREADS = SIZE < 4 ? 384 : 512; /* the same across heads */

enum { PIECES_NO_NORM, PIECES_HEAD, PIECES_ACROSS };

struct rope_pieces_params {
    adze_rotary r;
    float inverse[2];             /* 1 / elements of a norm, of q and k */
    uint32_t tokens;              /* in all */
    int32_t block_tokens;         /* of a block */
    int32_t shares[2];            /* of the heads of a token: a block has one of q or of k */
    divisor by_shares, by_seq;    /* by_shares: by those of q and k */
    int32_t lanes, rotating;      /* of a group; of them, those that rotate */
    int32_t apart, rest_apart;    /* from a lane's first piece to its second, in elements; where it does not rotate */
    int32_t first_end;            /* where the first pieces that rotate end, in a head */
    int32_t end;                  /* of a head */
    int32_t groups, each;         /* groups of a team; heads of a group in a share */
    int32_t warps;                /* of a team */
    int32_t per_warp;             /* teams of a warp, or groups where a team has several warps */
    uint32_t by_lanes, by_groups; /* 65536 / lanes and / groups, rounded up: exact for the lanes of a warp */
    uint32_t by_warps;            /* the same of warps */
    int32_t span;                 /* lanes of a warp that share a sum */
    int32_t const_tables;         /* tables and weights may be read before the dependency wait */
    uint32_t prefetch_blocks;     /* blocks that prefetch their inputs, the first of the grid */
    uint32_t staged;              /* bytes of shared memory in which a warp has its heads of out; 0: none */
};
/* Those of a group: the vectors that its head touches. */
__host__ __device__ inline uint32_t rope_pieces_pitch(const rope_pieces_params &p, int size)
{
    return (uint32_t)(p.end * size + 15) / 16 * 16 + 16;
}

/* A piece as it was loaded. ALIGNED: all pieces are whole and begin at 16-byte borders. */
template <typename T, bool ALIGNED>
struct rope_piece {
    static constexpr int SIZE = (int)sizeof(T), VECTORS = PIECE * SIZE / 16, WORDS = 4 * VECTORS;
    uint4 part[ALIGNED ? VECTORS : VECTORS + 1];

    /* The n elements from p on: only vectors that have some of them. */
    __device__ __forceinline__ void fetch(const T *p, int n)
    {
        const uint32_t shift = ALIGNED ? 0 : (uint32_t)(uintptr_t)p & 15, end = n > 0 ? shift + n * SIZE : 0;
        const uint4 *const at = reinterpret_cast<const uint4 *>((const char *)p - shift);
#pragma unroll
        for (int i = 0; i < (int)(sizeof part / sizeof *part); i++) {
            part[i] = make_uint4(0, 0, 0, 0);
            if (ALIGNED ? n > 0 : 16 * i < end)
                part[i] = at[i];
        }
    }
    /* The elements, packed, with zeros from n on; all are, where none was fetched. */
    __device__ __forceinline__ void words(const T *p, int n, uint32_t (&w)[WORDS]) const
    {
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            put_words(part[i], w + 4 * i);
        if constexpr (!ALIGNED) {
            const uint32_t shift = (uint32_t)(uintptr_t)p & 15;
            if (shift > 0) {
#pragma unroll
                for (int i = 0; i < VECTORS; i++)
                    put_words(shift_together<SIZE>(part[i], part[i + 1], shift), w + 4 * i);
            }
            if (n < PIECE) {
#pragma unroll
                for (int i = 0; i < WORDS; i++)
                    w[i] &= SIZE == 4 || n != 2 * i + 1 ? (i * 4 < n * SIZE ? ~0u : 0) : 0xffffu;
            }
        }
    }
    __device__ __forceinline__ static void put_words(uint4 v, uint32_t *w)
    {
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }
    __device__ __forceinline__ static void unpack(const uint32_t (&w)[WORDS], float (&f)[PIECE])
    {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            float each[VEC<T>];
            packed<T>{make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3])}.get(each);
#pragma unroll
            for (int j = 0; j < VEC<T>; j++)
                f[i * VEC<T> + j] = each[j];
        }
    }
    __device__ __forceinline__ static void pack(const float (&f)[PIECE], uint32_t (&w)[WORDS])
    {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            float each[VEC<T>];
#pragma unroll
            for (int j = 0; j < VEC<T>; j++)
                each[j] = f[i * VEC<T> + j];
            packed<T> v;
            v.set(each);
            put_words(v.raw, w + 4 * i);
        }
    }
    /* Stores n elements, as vectors or, into shared memory, at any address of elements. */
    __device__ __forceinline__ static void store(T *to, const uint32_t (&w)[WORDS], int n)
    {
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            if (16 * i < n * SIZE)
                store_raw((char *)to + 16 * i, make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]));
    }
    __device__ __forceinline__ static void stage(char *to, const uint32_t (&w)[WORDS], int n)
    {
        const uint32_t bytes = (uint32_t)(n * SIZE), bits = (uint32_t)(uintptr_t)to | bytes;
        if (bits % 8 == 0) {
#pragma unroll
            for (int i = 0; i < WORDS / 2; i++)
                if (8 * i < bytes)
                    reinterpret_cast<uint2 *>(to)[i] = make_uint2(w[2 * i], w[2 * i + 1]);
        } else if (SIZE == 4 || bits % 4 == 0) {
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                if (4 * i < bytes)
                    reinterpret_cast<uint32_t *>(to)[i] = w[i];
        } else {
#pragma unroll
            for (int j = 0; j < PIECE && SIZE < 4; j++)
                if (j < n)
                    reinterpret_cast<uint16_t *>(to)[j] = (uint16_t)(w[j / 2] >> j % 2 * 16);
        }
    }
};

/* Up to 8 elements of a tensor whose dtype is T or f32, packed; those from n on are zeros. */
template <typename T>
struct rope_params8 {
    uint32_t word[PIECE];
    __device__ __forceinline__ void fetch(const void *row, bool f32, int64_t at, int n)
    {
        const int size = sizeof(T) == 4 || f32 ? 4 : (int)sizeof(T);
        const char *const from = (const char *)row + at * size;
        const uint32_t bytes = (uint32_t)(n * size), bits = (uint32_t)(uintptr_t)from | bytes;
#pragma unroll
        for (int i = 0; i < PIECE; i++)
            word[i] = 0;
        if (bits % 16 == 0) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (16 * i < bytes) {
                    const uint4 v = reinterpret_cast<const uint4 *>(from)[i];
                    word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
                }
        } else if (bits % 8 == 0) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (8 * i < bytes) {
                    const uint2 v = reinterpret_cast<const uint2 *>(from)[i];
                    word[2 * i] = v.x, word[2 * i + 1] = v.y;
                }
        } else if (sizeof(T) == 4 || bits % 4 == 0) {
#pragma unroll
            for (int i = 0; i < PIECE; i++)
                if (4 * i < bytes)
                    word[i] = reinterpret_cast<const uint32_t *>(from)[i];
        } else {
            const uint16_t *const half = reinterpret_cast<const uint16_t *>(from);
#pragma unroll
            for (int j = 0; j < PIECE && sizeof(T) < 4; j++)
                if (j < n)
                    word[j / 2] |= (uint32_t)half[j] << j % 2 * 16;
        }
    }
    __device__ __forceinline__ void get(bool f32, float (&f)[PIECE]) const
    {
        if (sizeof(T) == 4 || f32) {
#pragma unroll
            for (int j = 0; j < PIECE; j++)
                f[j] = __uint_as_float(word[j]);
        } else if constexpr (sizeof(T) < 4) {
            packed<T>{make_uint4(word[0], word[1], word[2], word[3])}.get(f);
        }
    }
};

/* The work of a lane: a token, two pieces, and every `groups`th head of q or of k. */
template <typename T>
struct rope_pieces_share {
    bool k, rotates;
    int32_t base, end;   /* the heads of the block's share */
    int32_t first, left; /* the group's first head; the heads from it on, at most 0 where there is nothing to do */
    int32_t at, apart;   /* where the first piece is in a head, and from there to the second */
    int32_t n[2];        /* elements of a piece; 0 where there is nothing to do */
    int32_t of_span;     /* the lane, among those that share its sum */
    uint32_t b, s;

    __device__ __forceinline__ rope_pieces_share(const rope_pieces_params &p, uint32_t block)
    {
        const uint32_t tile = divide(block, p.by_shares);
        int32_t share = (int32_t)(block - tile * (uint32_t)p.by_shares.by);
        k = share >= p.shares[0];
        share -= k ? p.shares[0] : 0;
        base = share * p.groups * p.each;
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const uint32_t of_warp = lane * p.by_lanes >> 16, piece = lane - of_warp * (uint32_t)p.lanes;
        uint32_t group, token = tile * (uint32_t)p.block_tokens;
        bool works;
        if (p.warps == 1) {
            const uint32_t team = of_warp * p.by_groups >> 16;
            group = of_warp - team * (uint32_t)p.groups;
            token += warp * (uint32_t)p.per_warp + team;
            works = team < (uint32_t)p.per_warp;
            of_span = (int32_t)(p.span == p.lanes ? piece : group * (uint32_t)p.lanes + piece);
        } else {
            const uint32_t team = warp * p.by_warps >> 16;
            group = (warp - team * (uint32_t)p.warps) * (uint32_t)p.per_warp + of_warp;
            token += team;
            works = of_warp < (uint32_t)p.per_warp && group < (uint32_t)p.groups;
            of_span = (int32_t)lane;
        }
        works = works && token < p.tokens;
        b = 0, s = works ? token : 0;
        if (p.r.batch > 1) {
            b = divide(s, p.by_seq);
            s -= b * (uint32_t)p.r.seq;
        }
        first = base + (works ? (int32_t)group : 0);
        end = min((int32_t)(k ? p.r.qk[1].heads : p.r.qk[0].heads), base + p.groups * p.each);
        left = works ? end - first : 0;
        rotates = (int32_t)piece < p.rotating;
        const int32_t rotary = (int32_t)p.r.rotary_dim;
        at = rotates ? (int32_t)piece * PIECE : rotary + ((int32_t)piece - p.rotating) * PIECE;
        apart = rotates ? p.apart : p.rest_apart;
        const int32_t first_end = rotates ? p.first_end : p.end, second_end = rotates ? rotary : p.end;
        n[0] = works ? max(min(first_end - at, PIECE), 0) : 0;
        n[1] = works ? max(min(second_end - at - apart, PIECE), 0) : 0;
    }
    __device__ __forceinline__ const T *from(const rope_pieces_params &p) const
    {
        return (const T *)(k ? p.r.qk[1].x : p.r.qk[0].x) + b * (k ? p.r.qk[1].x_stride[0] : p.r.qk[0].x_stride[0]) +
               s * (k ? p.r.qk[1].x_stride[1] : p.r.qk[0].x_stride[1]) +
               first * (k ? p.r.qk[1].x_stride[2] : p.r.qk[0].x_stride[2]) + at;
    }
    __device__ __forceinline__ T *to(const rope_pieces_params &p) const
    {
        return (T *)(k ? p.r.qk[1].out : p.r.qk[0].out) +
               b * (k ? p.r.qk[1].out_stride[0] : p.r.qk[0].out_stride[0]) +
               s * (k ? p.r.qk[1].out_stride[1] : p.r.qk[0].out_stride[1]) +
               first * (k ? p.r.qk[1].out_stride[2] : p.r.qk[0].out_stride[2]) + at;
    }
    /* The table column of piece i, and how many columns it has. */
    __device__ __forceinline__ int32_t column(const rope_pieces_params &p, int i) const
    {
        if (p.r.pairs == ADZE_ROPE_HALF)
            return at + (p.r.once ? 0 : i * apart);
        return (at + i * apart) / (p.r.once ? 2 : 1);
    }
    __device__ __forceinline__ int32_t columns(const rope_pieces_params &p, int i) const
    {
        return p.r.once && p.r.pairs != ADZE_ROPE_HALF ? n[i] / 2 : n[i];
    }
};

template <typename T>
__device__ __forceinline__ void rope_pieces_prefetch(const rope_pieces_params &p)
{
    pdl_launch_next();
    const rope_pieces_share<T> share(p, opaque(blockIdx.x));
    const int64_t step = p.groups * (share.k ? p.r.qk[1].x_stride[2] : p.r.qk[0].x_stride[2]);
    const int size = p.r.table_dtype == ADZE_F32 ? 4 : (int)sizeof(T);
    const char *const cos =
        (const char *)p.r.cos + (share.b * p.r.cos_stride[0] + share.s * p.r.cos_stride[1]) * size;
    const char *const sin =
        (const char *)p.r.sin + (share.b * p.r.sin_stride[0] + share.s * p.r.sin_stride[1]) * size;
    const bool leads = share.first == 0 && (!share.k || p.shares[0] == 0) && /* as in rope_any */
                       (share.b == 0 || p.r.cos_stride[0] != 0) && (share.s == 0 || p.r.cos_stride[1] != 0);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (share.n[i] == 0)
            continue;
        const T *at = share.from(p) + i * share.apart;
        int32_t left = share.left;
#pragma unroll 1
        for (int h = 0; h < p.each && left > 0; h++, at += step, left -= p.groups)
            prefetch(at);
        if (share.rotates && leads)
            prefetch(cos + share.column(p, i) * size), prefetch(sin + share.column(p, i) * size);
    }
}

/* The sum over the lanes that share it: a tree, whose result the first of them has. */
template <int N>
__device__ __forceinline__ void rope_pieces_sums(const rope_pieces_params &p, int32_t of_span, float (&sum)[N])
{
    for (int step = 1; step < p.span; step *= 2)
#pragma unroll
        for (int h = 0; h < N; h++) {
            const float other = __shfl_down_sync(~0u, sum[h], step);
            sum[h] += of_span + step < p.span ? other : 0;
        }
#pragma unroll
    for (int h = 0; h < N; h++)
        sum[h] = __shfl_sync(~0u, sum[h], (int)(threadIdx.x % 32) - of_span);
}

/* Normalises and rotates two pieces. */
template <typename T, bool NORM, bool ROUNDS>
__device__ __forceinline__ void rope_pieces_turn(const rope_pieces_params &p, bool rotates, float scale,
                                                 const float (&weight)[2][PIECE], const float (&cos)[2][PIECE],
                                                 const float (&sin)[2][PIECE], float (&f)[2][PIECE])
{
    const int rounding = ROUNDS ? p.r.rounding : 0;
    const bool steps = rounding & ADZE_ROUND_STEPS, values = rounding & (ADZE_ROUND_VALUE | ADZE_ROUND_STEPS);
    const auto round_if = [](bool condition, float v) { return condition ? round_to<T>(v) : v; };
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < PIECE && NORM; j++) {
            f[i][j] = round_if(rounding & ADZE_ROUND_NORM, f[i][j] * scale);
            f[i][j] = round_if(values, f[i][j] * weight[i][j]);
        }
    /* Of a pair: a cos - b sin and b cos + a sin, each with its own column. */
    const auto turn = [&](float &a, float &b, float a_cos, float a_sin, float b_cos, float b_sin) {
        const float x0 = a, y0 = b;
        a = round_if(steps, x0 * a_cos) - round_if(steps, y0 * a_sin);
        b = round_if(steps, y0 * b_cos) + round_if(steps, x0 * b_sin);
    };
    if (!rotates)
        return;
    if (p.r.pairs == ADZE_ROPE_HALF) {
#pragma unroll
        for (int j = 0; j < PIECE; j++)
            turn(f[0][j], f[1][j], cos[0][j], sin[0][j], cos[1][j], sin[1][j]);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < PIECE; j += 2)
                turn(f[i][j], f[i][j + 1], cos[i][j], sin[i][j], cos[i][j + 1], sin[i][j + 1]);
    }
}

/* Keeps the compiler from holding unpacked floats beyond this point (vec.cuh). */
template <int N, int WORDS>
__device__ __forceinline__ void keep_words(uint32_t (&w)[N][2][WORDS])
{
#pragma unroll
    for (int i = 0; i < 2 * N * WORDS; i++)
        asm volatile("" : "+r"(w[i / WORDS / 2][i / WORDS % 2][i % WORDS]));
}

/* Stores the group's head, whose first piece of this lane is at `to`, if it is there: `part` is the warp's memory.
   The pieces are put where they are in the vectors of out; then lanes have a vector each, of which the first and the
   last may be parts of one. */
template <typename T, int WORDS>
__device__ __forceinline__ void rope_pieces_store(const rope_pieces_params &p, const rope_pieces_share<T> &share,
                                                  char *part, T *to, const uint32_t (&words)[2][WORDS], bool there)
{
    typedef rope_piece<T, false> piece;
    const uint32_t lane = threadIdx.x % 32, group = lane * p.by_lanes >> 16, of_group = lane - group * p.lanes;
    char *const row = (char *)(to - share.at);
    const uint32_t first = (uint32_t)(uintptr_t)row & 15, end = first + (uint32_t)p.end * piece::SIZE;
    char *const staged = part + group * rope_pieces_pitch(p, piece::SIZE);
    __syncwarp(); /* the head before has been read */
    if (there)
#pragma unroll
        for (int i = 0; i < 2; i++)
            piece::stage(staged + first + (share.at + i * share.apart) * piece::SIZE, words[i], share.n[i]);
    __syncwarp();
    for (uint32_t at = there ? of_group * 16 : end; at < end; at += (uint32_t)p.lanes * 16) {
        char *const vector = row - first + at;
        if (at >= first && at + 16 <= end) {
            store_raw(vector, *reinterpret_cast<const uint4 *>(staged + at));
            continue;
        }
        for (uint32_t i = at < first ? first - at : 0; i < 16 && at + i < end; i += piece::SIZE)
            *reinterpret_cast<T *>(vector + i) = *reinterpret_cast<const T *>(staged + at + i);
    }
}

/* Heads that a lane has at once: those in flight, or across heads all that it holds. */
template <typename T, int KIND>
constexpr int pieces_heads = (KIND == PIECES_ACROSS ? 8 : 4) / (int)sizeof(T);
/* Threads of a block and minimum blocks per SM, as the compiler is told: they bound the registers. */
template <int KIND, bool ROUNDS>
constexpr int pieces_threads = KIND != PIECES_ACROSS ? PIECES_THREADS
                               : ROUNDS              ? TEAM_THREADS<2>
                                                     : TEAM_THREADS<4>;
template <typename T, int KIND>
constexpr int pieces_blocks = KIND == PIECES_ACROSS                  ? 1
                              : KIND == PIECES_HEAD && sizeof(T) < 4 ? 3
                                                                     : 4;

template <typename T, int KIND, bool ROUNDS, bool ALIGNED>
__global__ void __launch_bounds__(pieces_threads<KIND, ROUNDS>, pieces_blocks<T, KIND>)
    rope_pieces(const __grid_constant__ rope_pieces_params p)
{
    typedef rope_piece<T, ALIGNED> piece;
    constexpr bool NORM = KIND != PIECES_NO_NORM, ACROSS = KIND == PIECES_ACROSS;
    constexpr int HEADS = pieces_heads<T, KIND>, WORDS = piece::WORDS;
    __shared__ float part[TEAM_THREADS<sizeof(T)> / 32];
    extern __shared__ __align__(16) char staged[];
    if (blockIdx.x < p.prefetch_blocks)
        rope_pieces_prefetch<T>(p);
    const rope_pieces_share<T> share(p, blockIdx.x);
    const bool f32_tables = sizeof(T) == 4 || p.r.table_dtype == ADZE_F32;
    const void *const weight_row = NORM ? (share.k ? p.r.qk[1].weight : p.r.qk[0].weight) : nullptr;
    const bool f32_weight = sizeof(T) == 4 || (share.k ? p.r.qk[1].weight_dtype : p.r.qk[0].weight_dtype) == ADZE_F32;
    const int64_t x_step = p.groups * (share.k ? p.r.qk[1].x_stride[2] : p.r.qk[0].x_stride[2]);
    const int64_t out_step = p.groups * (share.k ? p.r.qk[1].out_stride[2] : p.r.qk[0].out_stride[2]);
    pdl_launch_next();
    if (!p.const_tables)
        pdl_wait();

    rope_params8<T> packed_cos[2], packed_sin[2], packed_weight[2];
    const auto fetch_tables = [&] {
        const int size = f32_tables ? 4 : (int)sizeof(T);
        const char *const cos_row =
            (const char *)p.r.cos + (share.b * p.r.cos_stride[0] + share.s * p.r.cos_stride[1]) * size;
        const char *const sin_row =
            (const char *)p.r.sin + (share.b * p.r.sin_stride[0] + share.s * p.r.sin_stride[1]) * size;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int columns = share.rotates ? share.columns(p, i) : 0;
            packed_cos[i].fetch(cos_row, f32_tables, share.column(p, i), columns);
            packed_sin[i].fetch(sin_row, f32_tables, share.column(p, i), columns);
        }
    };
    const auto fetch_weight = [&](int64_t at, bool there) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            packed_weight[i].fetch(weight_row, f32_weight, at + share.at + i * share.apart,
                                   weight_row && there ? share.n[i] : 0);
    };
    float cos[2][PIECE], sin[2][PIECE], weight[2][PIECE];
    const auto unpack_tables = [&] {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            packed_cos[i].get(f32_tables, cos[i]);
            packed_sin[i].get(f32_tables, sin[i]);
            if (p.r.once && p.r.pairs != ADZE_ROPE_HALF) {
#pragma unroll
                for (int j = PIECE - 1; j > 0; j--)
                    cos[i][j] = cos[i][j / 2], sin[i][j] = sin[i][j / 2];
            }
        }
    };
    const auto unpack_weight = [&] {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            packed_weight[i].get(f32_weight, weight[i]);
#pragma unroll
            for (int j = 0; j < PIECE; j++)
                weight[i][j] = weight_row ? weight[i][j] + p.r.weight_offset : 1;
        }
    };

    if (!ACROSS) {
        fetch_tables();
        if (NORM)
            fetch_weight(0, true);
    }
    if (p.const_tables)
        pdl_wait();
    const T *from = share.from(p);
    T *to = share.to(p);
    int32_t left = share.left;
    const auto has = [&](int h, int i) { return h * p.groups < left ? share.n[i] : 0; };
    piece x[HEADS][2];
    const auto fetch_heads = [&] {
#pragma unroll
        for (int h = 0; h < HEADS; h++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                x[h][i].fetch(from + h * x_step + i * share.apart, has(h, i));
    };
    fetch_heads();
    if (!ACROSS) {
        unpack_tables();
        if (NORM)
            unpack_weight();
    }
    for (int32_t base = share.base; base < share.end; base += HEADS * p.groups) {
        uint32_t words[HEADS][2][WORDS];
        float sum[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            sum[h] = 0;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                x[h][i].words(from + h * x_step + i * share.apart, share.n[i], words[h][i]);
                float f[PIECE], squares = 0;
                piece::unpack(words[h][i], f);
#pragma unroll
                for (int j = 0; j < PIECE && NORM; j++)
                    squares += f[j] * f[j];
                sum[h] += squares;
            }
        }
        if constexpr (ACROSS) {
            fetch_tables();
            fetch_weight((int64_t)share.first * p.r.head_dim, has(0, 0) > 0);
            float all[1] = {0};
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                all[0] += sum[h];
            rope_pieces_sums<1>(p, share.of_span, all);
            if (p.warps > 1) {
                const int warp = (int)threadIdx.x / 32, team = (int)((uint32_t)warp * p.by_warps >> 16);
                if (threadIdx.x % 32 == 0)
                    part[warp] = all[0];
                __syncthreads();
                all[0] = 0;
                for (int w = 0; w < p.warps; w++)
                    all[0] += part[team * p.warps + w];
            }
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                sum[h] = all[0];
            unpack_tables();
        } else if constexpr (NORM) {
            rope_pieces_sums<HEADS>(p, share.of_span, sum);
        }
        const float inverse = share.k ? p.inverse[1] : p.inverse[0];
        if (NORM)
            keep_words(words);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            if constexpr (ACROSS) {
                unpack_weight();
                if (h + 1 < HEADS)
                    fetch_weight((share.first + (h + 1) * p.groups) * p.r.head_dim, has(h + 1, 0) > 0);
            }
            if (NORM || share.rotates) {
                float f[2][PIECE];
                piece::unpack(words[h][0], f[0]);
                piece::unpack(words[h][1], f[1]);
                const float scale = NORM ? rsqrtf(sum[h] * inverse + p.r.eps) : 1;
                rope_pieces_turn<T, NORM, ROUNDS>(p, share.rotates, scale, weight, cos, sin, f);
                piece::pack(f[0], words[h][0]);
                piece::pack(f[1], words[h][1]);
            }
            if (!ALIGNED && p.staged) {
                rope_pieces_store<T>(p, share, staged + threadIdx.x / 32 * p.staged, to + h * out_step, words[h],
                                     h * p.groups < left);
                continue;
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                piece::store(to + h * out_step + i * share.apart, words[h][i], has(h, i));
        }
        if (ACROSS)
            break;
        from += HEADS * x_step, to += HEADS * out_step, left -= HEADS * p.groups;
        if (base + HEADS * p.groups < share.end)
            fetch_heads();
    }
}

#endif
