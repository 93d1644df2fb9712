/* attention_load.cuh - the shape of a block of attention_tile.cuh, and how q, k and v come into its shared memory. */
#ifndef ADZE_CUDA_ATTENTION_LOAD_CUH
#define ADZE_CUDA_ATTENTION_LOAD_CUH

#include "attention_call.cuh"
#include "mma.cuh"
#include "quantised.cuh"

/* Rows have up to D elements. ACROSS warps have 16 * FRAGMENTS rows of q each; ALONG such groups of warps share the
   KEYS keys of a stage. FORMAT is that of k and v. In shared memory rows are 16 bytes longer: 8 of them are then in
   different banks. */
template <int D_, int FRAGMENTS_, int ACROSS_, int ALONG_, int KEYS_, int STAGES_, weight_format FORMAT_ = OF_X>
struct attention_shape {
    static constexpr int D = D_, FRAGMENTS = FRAGMENTS_, ACROSS = ACROSS_, ALONG = ALONG_, KEYS = KEYS_;
    static constexpr int STAGES = STAGES_, ROWS = 16 * FRAGMENTS * ACROSS, THREADS = 32 * ACROSS * ALONG;
    static constexpr weight_format FORMAT = FORMAT_;
    static constexpr bool QUANTISED = FORMAT != OF_X, ANYWHERE = false; /* rows of out are whole vectors */
    static constexpr int ELEMENT = QUANTISED ? 1 : 2;                   /* bytes of an element of k and v */
    static constexpr int WARP_KEYS = KEYS / ALONG, PITCH = D * 2 + 16, KEY_PITCH = D * ELEMENT + 16;
    /* Of a row of k: its pieces of 16 bytes, and how many threads copy one; rows that the block copies at once. */
    static constexpr int PIECES = D * ELEMENT / 16, LANES = PIECES <= 4    ? 4
                                                            : PIECES <= 8  ? 8
                                                            : PIECES <= 16 ? 16
                                                                           : 32;
    static constexpr int LOAD_ROWS = THREADS / LANES;
    /* A stage: keys, values, and of quantised ones their scales. */
    static constexpr int SCALES = 2 * KEYS * KEY_PITCH, STAGE_BYTES = SCALES + (QUANTISED ? 2 * KEYS * 4 : 0);
    static constexpr int Q_BYTES = ROWS * PITCH, HOLDS = Q_BYTES + STAGES * STAGE_BYTES;
    /* Where the keys of STAGES + 1 steps are, if they are paged. */
    static constexpr int PLACES = STAGES + 1, SHARED = HOLDS + PLACES * KEYS * (int)sizeof(attention_place);
    static constexpr int BLOCKS = THREADS > 128 || SHARED > (113 << 10) ? 1 : 2; /* per SM: bounds the registers */
    /* Merging takes the place of q and the stages: a row of floats, then its maximum and its sum. */
    static constexpr int MERGE_PITCH = D + 4, MERGE_BYTES = ALONG * ROWS * MERGE_PITCH * 4;
    static_assert(WARP_KEYS % 16 == 0 && MERGE_BYTES <= HOLDS && HOLDS % 16 == 0, "");
    static_assert(KEYS % LOAD_ROWS == 0 && KEYS <= THREADS && (!QUANTISED || D % 32 == 0), "");
};

/* What a block knows of its rows. */
struct attention_block {
    attention_sequence s;
    int sequence, kv_head, first, rows; /* rows: those of the sequence, of which the block has some from `first` on */
    int high;                           /* the keys up to which some row of the block sees */
};

/* Copies q's rows, zeros where there are none. */
template <class S>
__device__ __forceinline__ void attention_load_q(const attention_params &p, const attention_block &b, uint32_t shared)
{
    constexpr int PIECES = S::D / 8;
    for (int at = (int)threadIdx.x; at < S::ROWS * PIECES; at += S::THREADS) {
        const int row = at / PIECES, piece = at % PIECES, r = b.first + row;
        const bool there = r < b.rows && piece * 8 < p.d;
        const int i = there ? r / p.group : 0, head = there ? b.kv_head * p.group + r % p.group : 0;
        const char *from = p.q + (b.s.batch * p.q_stride[0] + head * p.q_stride[1] +
                                  (int64_t)(b.s.first + i) * p.q_stride[2] + (there ? piece * 8 : 0)) *
                                     2;
        copy_async(shared + (uint32_t)(row * S::PITCH + piece * 16), from, there);
    }
}

/* Quantised keys come in an order of their own (weight_pairs): elements 0 and 2, 4 and 6, ... of each 16, then 1 and
   3, 5 and 7, ... This gives q the same. */
template <class S>
__device__ __forceinline__ void attention_order_q(char *shared)
{
    constexpr int PIECES = S::D / 16;
    for (int at = (int)threadIdx.x; at < S::ROWS * PIECES; at += S::THREADS) {
        uint4 *q = reinterpret_cast<uint4 *>(shared + at / PIECES * S::PITCH + at % PIECES * 32);
        const uint4 a = q[0], b = q[1];
        q[0] = make_uint4(__byte_perm(a.x, a.y, 0x5410), __byte_perm(a.z, a.w, 0x5410), __byte_perm(b.x, b.y, 0x5410),
                          __byte_perm(b.z, b.w, 0x5410));
        q[1] = make_uint4(__byte_perm(a.x, a.y, 0x7632), __byte_perm(a.z, a.w, 0x7632), __byte_perm(b.x, b.y, 0x7632),
                          __byte_perm(b.z, b.w, 0x7632));
    }
}

/* Of a thread: its piece of the row of key 0, or of page 0, in k and in v, and the first of its rows in a stage. */
struct attention_source {
    const char *k, *v;
    int row, piece;
    bool k_in, v_in; /* the piece is in the row; otherwise it is zeros */
};
template <class S>
__device__ __forceinline__ attention_source attention_source_of(const attention_params &p, const attention_block &b)
{
    attention_source from;
    from.row = (int)threadIdx.x / S::LANES, from.piece = (int)threadIdx.x % S::LANES;
    const int column = from.piece * (16 / S::ELEMENT);
    from.k_in = column < p.d, from.v_in = column < p.dv;
    const attention_place begin = p.page ? attention_place{0, 0} : attention_place{b.s.key_batch, b.s.first_key};
    from.k = p.k + (attention_at(p.k_stride, begin, b.kv_head) + (from.k_in ? column : 0)) * S::ELEMENT;
    from.v = p.v + (attention_at(p.v_stride, begin, b.kv_head) + (from.v_in ? column : 0)) * S::ELEMENT;
    return from;
}

/* Looks up where the keys of a later step are: one for each of the first KEYS threads. */
template <class S>
__device__ __forceinline__ void attention_look_up(const attention_params &p, const attention_block &b, int key,
                                                  attention_place *places)
{
    const int j = key + (int)threadIdx.x;
    if ((int)threadIdx.x < S::KEYS)
        places[threadIdx.x] = j < b.high ? attention_place_of(p, b.s, b.sequence, j) : attention_place{-1, 0};
}

/* Copies the scales of the keys from `key` on; zeros where there is no key. */
template <class S>
__device__ __forceinline__ void attention_load_scales(const attention_params &p, const attention_block &b, int key,
                                                      uint32_t stage, const attention_place *places)
{
    for (int at = (int)threadIdx.x; at < 2 * S::KEYS; at += S::THREADS) {
        const bool is_v = at >= S::KEYS;
        if (is_v ? !p.v_scale_each : !p.k_scale_each)
            continue;
        const int row = is_v ? at - S::KEYS : at;
        attention_place place = {b.s.key_batch, b.s.first_key + key + row};
        if (p.page)
            place = places[row];
        const bool there = p.page ? place.entry >= 0 : key + row < b.high;
        const float *from = is_v ? p.v_scale + attention_at(p.v_scale_stride, place, b.kv_head)
                                 : p.k_scale + attention_at(p.k_scale_stride, place, b.kv_head);
        copy_async_4(stage + (uint32_t)(S::SCALES + at * 4), there ? from : p.k_scale, there);
    }
}

/* Copies the keys from `key` on, and their values, into a stage. Rows beyond the last key, and those of pages that do
   not exist, are zeros. */
template <class S>
__device__ __forceinline__ void attention_load_keys(const attention_params &p, const attention_block &b,
                                                    const attention_source &from, int key, uint32_t stage,
                                                    const attention_place *places)
{
    constexpr int TIMES = S::KEYS / S::LOAD_ROWS, V = S::KEYS * S::KEY_PITCH;
    if constexpr (S::QUANTISED)
        attention_load_scales<S>(p, b, key, stage, places);
    if (S::PIECES < S::LANES && from.piece >= S::PIECES)
        return;
    const uint32_t to = stage + (uint32_t)(from.row * S::KEY_PITCH + from.piece * 16);
    const int64_t k_row = p.k_stride[2] * S::ELEMENT, v_row = p.v_stride[2] * S::ELEMENT;
    if (p.page) {
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            const attention_place at = places[from.row + i * S::LOAD_ROWS];
            const bool there = at.entry >= 0;
            const int64_t entry = there ? at.entry : 0;
            const uint32_t row = to + (uint32_t)(i * S::LOAD_ROWS * S::KEY_PITCH);
            copy_async(row, from.k + entry * p.k_stride[0] * S::ELEMENT + at.row * k_row, there && from.k_in);
            copy_async(row + V, from.v + entry * p.v_stride[0] * S::ELEMENT + at.row * v_row, there && from.v_in);
        }
        return;
    }
    const char *k = from.k + (key + from.row) * k_row, *v = from.v + (key + from.row) * v_row;
    if (key + S::KEYS <= b.high && from.k_in && from.v_in) {
        /* Opaque: else the multiples of a stride would take registers while the warps compute. */
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            const uint32_t row = to + (uint32_t)(i * S::LOAD_ROWS * S::KEY_PITCH);
            copy_async(row, k);
            copy_async(row + V, v);
            k = opaque(k + S::LOAD_ROWS * k_row), v = opaque(v + S::LOAD_ROWS * v_row);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < TIMES; i++) {
        const uint32_t row = to + (uint32_t)(i * S::LOAD_ROWS * S::KEY_PITCH);
        const bool there = key + from.row + i * S::LOAD_ROWS < b.high;
        copy_async(row, there ? k : from.k, there && from.k_in);
        copy_async(row + V, there ? v : from.v, there && from.v_in);
        k = opaque(k + S::LOAD_ROWS * k_row), v = opaque(v + S::LOAD_ROWS * v_row);
    }
}

#endif
