/* append_unit.cuh - a call of kv_append on the device: the tensors, where a token lies, and what a lane has of a
 * head.
 */
#ifndef ADZE_CUDA_APPEND_UNIT_CUH
#define ADZE_CUDA_APPEND_UNIT_CUH

#include "kv_cache.h"
#include "rows.cuh"
#include "stored.cuh"
#include "unit.cuh"

enum { Q, K, V, PARTS };
struct append_part {
    const char *x;
    char *out;                              /* q_out or the cache */
    const char *weight;                     /* NULL: ones */
    float *scale;                           /* NULL: the cache has x's dtype */
    int64_t x_stride[3];                    /* of batch, token and head */
    int64_t out_stride[3], scale_stride[3]; /* of these; of a cache, of entry, row and head */
    int64_t heads;
    int32_t dim, rotary_dim;
    int32_t norm, weight_f32;
};
struct append_params {
    append_part part[PARTS];
    const char *cos, *sin;
    int64_t cos_stride[2], sin_stride[2]; /* of batch and token, or slot */
    const int32_t *slots;                 /* positions, or lengths: then token s of a sequence is s further */
    int64_t slots_stride[2];
    const int32_t *block_table;
    int64_t block_stride[2];
    int64_t rows, pages; /* of the cache: slots of an entry, entries */
    int64_t pages_each;  /* of a sequence */
    int64_t table_rows;  /* of tables by slot; -1: they are by token */
    int64_t seq, count;  /* count: heads, or blocks, with work */
    int64_t all_heads;   /* of a token */
    float inverse[2];    /* 1 / elements of a norm, of q and k */
    float eps, weight_offset;
    divisor by_heads, by_seq, by_rows;
    int32_t lane_bits; /* 2^lane_bits lanes share a head (append_vectors.cuh) */
    bool wide_index;   /* indices need more than 31 bits */
    bool by_length;    /* slots are lengths */
    bool interleaved, once, table_f32;
    int32_t rounding, stored; /* stored: the dtype of a cache in fewer bits, or 0 */
    bool const_weights;       /* they may be read before the dependency wait */
};

__device__ __forceinline__ int64_t append_divide(bool wide, const divisor &d, int64_t n, int64_t *rest)
{
    const int64_t quotient = wide ? divide(n, d.by) : (int64_t)divide((uint32_t)n, d);
    *rest = n - quotient * d.by;
    return quotient;
}

/* Where a token lies, and what it reads and writes. What follows from its number needs no memory; its slot is read,
   and then its place is known. */
struct append_token {
    int64_t b, s, slot;
    int64_t entry = -1, row = 0; /* of the caches; entry is -1 where it has no place */
    const char *cos, *sin;
    bool tables = true; /* its row of the tables is there */

    __device__ __forceinline__ append_token(const append_params &p, int64_t token, bool wide)
    {
        b = append_divide(wide, p.by_seq, token, &s);
    }
    __device__ __forceinline__ const int32_t *slot_at(const append_params &p) const
    {
        return p.slots + b * p.slots_stride[0] + s * p.slots_stride[1];
    }
    __device__ __forceinline__ bool tables_by_slot(const append_params &p) const { return p.table_rows >= 0; }
    /* number: what slot_at() has. */
    __device__ __forceinline__ void place(const append_params &p, int32_t number)
    {
        slot = number + (p.by_length ? s : 0);
        tables = !tables_by_slot(p) || (slot >= 0 && slot < p.table_rows);
        row = slot;
        if (slot < 0 || p.rows == 0 || !tables)
            return;
        if (!p.block_table) {
            entry = slot < p.rows ? b : -1;
            return;
        }
        const int64_t most = 0x7fffffff;
        const int64_t at = append_divide(slot > most || p.rows > most, p.by_rows, slot, &row);
        if (at >= p.pages_each)
            return;
        const int64_t page = p.block_table[b * p.block_stride[0] + at * p.block_stride[1]];
        entry = page >= 0 && page < p.pages ? page : -1;
    }
    /* size: bytes of an element of the tables. */
    __device__ __forceinline__ void place_tables(const append_params &p, int size)
    {
        const bool by_slot = tables_by_slot(p);
        const int64_t of_b = by_slot ? 0 : b, of_s = !by_slot ? s : tables ? slot : 0;
        cos = p.cos + (of_b * p.cos_stride[0] + of_s * p.cos_stride[1]) * size;
        sin = p.sin + (of_b * p.sin_stride[0] + of_s * p.sin_stride[1]) * size;
    }
};

/* What is known of the tables when a kernel is compiled: nothing, or that they have T, or f32. */
enum append_tables { ANY_TABLES, OWN_TABLES, F32_TABLES };

template <typename T, int W, append_tables TABLES = ANY_TABLES>
struct append_unit {
    int32_t at[2];
    bool there, second, rotates;
    unit<T, W> x[2];
    param_unit<T, W> cos[2], sin[2], weight[2];
    float f[2][W];

    __device__ __forceinline__ static bool table_f32(const append_params &p)
    {
        return TABLES == ANY_TABLES ? p.table_f32 : TABLES == F32_TABLES;
    }
    /* Unit n of a head. */
    __device__ __forceinline__ void place(const append_params &p, const append_part &part, int32_t n)
    {
        const int32_t turning = part.rotary_dim / (2 * W), half = part.rotary_dim / 2;
        rotates = n < turning;
        const bool apart = rotates && !p.interleaved;
        at[0] = apart ? n * W : 2 * n * W;
        at[1] = apart ? half + n * W : 2 * n * W + W;
        there = at[0] < part.dim;
        second = at[1] < part.dim;
    }
    __device__ __forceinline__ void fetch_x(const T *head)
    {
        x[0].fill(0), x[1].fill(0);
        if (there)
            x[0].fetch(head + at[0]);
        if (there && second)
            x[1].fetch(head + at[1]);
    }
    /* The same of a head that has elements, without a branch: a lane that has no unit reads the first. */
    __device__ __forceinline__ void fetch_x_at_once(const T *head)
    {
        const bool has[2] = {there, there && second};
#pragma unroll
        for (int i = 0; i < 2; i++)
            x[i].fetch(head + (has[i] ? at[i] : 0));
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (!has[i])
                x[i].fill(0);
    }
    __device__ __forceinline__ void fetch_weight(const append_part &part, int64_t from)
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (part.weight && there && (i == 0 || second))
                weight[i].fetch(part.weight, part.weight_f32, from + at[i]);
    }
    /* The columns of both halves. A table with one column per pair has those of neighbouring pairs together. */
    __device__ __forceinline__ void fetch_tables(const append_params &p, const append_token &token)
    {
        if (rotates && there && token.tables)
            fetch_tables_at_once(p, token);
    }
    /* The same of rows that are there: a lane whose unit does not rotate reads the first columns. */
    __device__ __forceinline__ void fetch_tables_at_once(const append_params &p, const append_token &token)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int32_t column = !p.once ? at[i] : p.interleaved ? at[0] / 2 : at[0];
            cos[i].fetch(token.cos, table_f32(p), rotates ? column : 0);
            sin[i].fetch(token.sin, table_f32(p), rotates ? column : 0);
        }
    }
    __device__ __forceinline__ float squares() const
    {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float v[W];
            x[i].get(v);
#pragma unroll
            for (int j = 0; j < W; j++)
                sum += v[j] * v[j];
        }
        return sum;
    }
    /* f: what is stored, before it is rounded. */
    __device__ __forceinline__ void turn(const append_params &p, const append_part &part, float scale, bool tables)
    {
        if (!tables)
            x[0].fill(NAN), x[1].fill(NAN);
        x[0].get(f[0]), x[1].get(f[1]);
        if (part.norm)
            apply_norm(p, part, scale);
        if (!rotates)
            return;
        if (p.rounding & ADZE_ROUND_STEPS)
            rotate<true>(p);
        else
            rotate<false>(p);
    }
    __device__ __forceinline__ void put(T *head) const
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (there && (i == 0 || second)) {
                unit<T, W> y;
                y.set(f[i]);
                y.put(head + at[i]);
            }
    }
    /* In fewer bits, of what T holds. */
    __device__ __forceinline__ float most() const
    {
        float all = 0;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < W; j++)
                if (there && (i == 0 || second))
                    all = fmaxf(all, fabsf(round_to<T>(f[i][j])));
        return all;
    }
    /* ALIGNED: units of the cache are aligned to their W bytes. */
    template <bool ALIGNED>
    __device__ __forceinline__ void put_stored(int stored, uint8_t *head, float scale) const
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (!there || (i == 1 && !second))
                continue;
            uint32_t word[2] = {0, 0};
#pragma unroll
            for (int j = 0; j < W; j++) {
                const float q = over_scale(round_to<T>(f[i][j]), scale);
                const uint8_t byte =
                    stored == ADZE_I8 ? (uint8_t)whole_between(q, 0, -127, 127) : (uint8_t)f8_bits(q);
                if (ALIGNED)
                    word[j / 4] |= (uint32_t)byte << j % 4 * 8;
                else
                    head[at[i] + j] = byte;
            }
            if constexpr (ALIGNED && W == 8)
                store_raw(head + at[i], make_uint2(word[0], word[1]));
            else if constexpr (ALIGNED && W == 4)
                *(uint32_t *)(head + at[i]) = word[0];
            else if constexpr (ALIGNED)
                *(uint16_t *)(head + at[i]) = (uint16_t)word[0];
        }
    }

  private:
    __device__ __forceinline__ void apply_norm(const append_params &p, const append_part &part, float scale)
    {
        const bool round_norm = p.rounding & ADZE_ROUND_NORM;
        const bool round_value = p.rounding & (ADZE_ROUND_VALUE | ADZE_ROUND_STEPS);
        const auto round_if = [](bool condition, float v) { return condition ? round_to<T>(v) : v; };
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float w[W];
            weight[i].get(part.weight_f32, w);
#pragma unroll
            for (int j = 0; j < W; j++) {
                f[i][j] = round_if(round_norm, f[i][j] * scale);
                f[i][j] = round_if(round_value, part.weight ? f[i][j] * (w[j] + p.weight_offset) : f[i][j]);
            }
        }
    }
    template <bool STEPS>
    __device__ __forceinline__ void rotate(const append_params &p)
    {
        const auto product = [](float a, float b) { return STEPS ? round_to<T>(a * b) : a * b; };
        /* Of a pair: a cos - b sin and b cos + a sin, each with its own column. */
        const auto pair = [&](float &a, float &b, float a_cos, float a_sin, float b_cos, float b_sin) {
            const float x0 = a, y0 = b;
            a = product(x0, a_cos) - product(y0, a_sin);
            b = product(y0, b_cos) + product(x0, b_sin);
        };
        float c[2][W], s[2][W];
#pragma unroll
        for (int i = 0; i < 2; i++)
            cos[i].get(table_f32(p), c[i]), sin[i].get(table_f32(p), s[i]);
        if (W == 2 && p.interleaved) {
            constexpr int NEXT = W > 1 ? 1 : 0;
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < W; j += 2) {
                    const int column = (i * W + j) / 2; /* of a table with one column per pair */
                    pair(f[i][j], f[i][j + NEXT], p.once ? c[i][column] : c[i][j], p.once ? s[i][column] : s[i][j],
                         p.once ? c[i][column] : c[i][j + NEXT], p.once ? s[i][column] : s[i][j + NEXT]);
                }
        } else {
#pragma unroll
            for (int j = 0; j < W; j++)
                pair(f[0][j], f[1][j], c[0][j], s[0][j], c[1][j], s[1][j]);
        }
    }
};

#endif
