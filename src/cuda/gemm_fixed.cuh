/* gemm_fixed.cuh - products of one token with quantised weights, on tensor cores that multiply bytes.

   An mma has columns for eight tokens. With one token, six of them are the bytes of its elements, as whole numbers
   of 44 bits that have one power of two for each 128 elements. So weights of i8 need no instruction before they are
   multiplied, those of u4 three for eight of them, and the products of 64 bytes are added without rounding.
   Elements that are not such numbers, as they are less than 2^-33 of the largest or have no value, are rare: then
   the block adds up its rows one element at a time.

   A block has a multiprocessor to itself, a range of the weights' rows in tiles of 16, and all of k. Units of a
   tile, 16 rows of 64 bytes, go round the warps. Lane 4 g + t has 16 bytes of rows g and g + 8, straight in
   registers. When the weights are constant, all but the last of a warp's are requested before the dependency wait,
   the first by the first instructions, and the last after x, which would wait behind it. The sums of warps are
   added up at the end, in their order. */
#ifndef ADZE_CUDA_GEMM_FIXED_CUH
#define ADZE_CUDA_GEMM_FIXED_CUH

#include "gemm_compact.cuh"

template <weight_format FORMAT_, compact_scales SCALES_, bool NORM_>
struct fixed_shape {
    static constexpr weight_format FORMAT = FORMAT_;
    static constexpr compact_scales SCALES = SCALES_;
    static constexpr bool NORM = NORM_, U4 = FORMAT == OF_U4, GROUPED = SCALES != ROW_SCALES;
    static constexpr int TOKENS = 1, WARPS = 32, THREADS = 32 * WARPS;
    static constexpr int ROWS_MOST = 512;                   /* of a block, that it is used for */
    static constexpr int AHEAD = U4 ? 2 : 3;                /* units of a warp under way */
    static constexpr int STEP = U4 ? 128 : 64, GROUP = 128; /* weights of a unit's row; of one power of two */
    static constexpr int BYTES = 6, X_STEP = STEP * BYTES;  /* of an element; of a step */
    static constexpr int SCALE_BYTES = SCALES == F32_SCALES ? 4 : 2;
    typedef typename std::conditional<U4, uint4, uint2>::type raw; /* in which four elements of x are loaded */
    static constexpr int PITCH = WARPS + 4; /* floats of a row's sums: lanes have banks of their own */
};

struct fixed_row {
    const char *w;
    int part, row; /* of which weight */
};
struct fixed_call {
    int rows_each, rows_extra;                            /* the first `extra` blocks have one more */
    int steps;                                            /* units of a row */
    int scale_words, scale_pitch;                         /* of a row; in shared memory */
    uint32_t scale_inverse;                               /* 2^32 / scale_words, and up */
    int x, raw, weight, powers, sums, rows, scales, ends; /* where they are there */
    float k_inverse;
    size_t bytes;
};
/* A call with `blocks` blocks; bytes is 0 where shared memory has no room. */
template <class S>
static fixed_call fixed_call_of(const gemm_params &p, int64_t blocks, size_t room)
{
    const auto up = [](int64_t bytes) { return (bytes + 127) / 128 * 128; };
    const int64_t rows = ceil_div(p.n, blocks), slots = ceil_div(rows, p.glu ? 8 : 16) * 16;
    fixed_call c = {};
    c.rows_each = (int)(p.n / blocks), c.rows_extra = (int)(p.n % blocks);
    c.steps = (int)(p.k / S::STEP), c.k_inverse = 1 / (float)p.k;
    c.scale_words = S::GROUPED ? (int)(p.k / S::GROUP * S::SCALE_BYTES / 4) : 0, c.scale_pitch = c.scale_words | 1;
    c.scale_inverse = S::GROUPED ? (uint32_t)((1ull << 32) / (uint64_t)c.scale_words + 1) : 0;
    const struct {
        int *at;
        int64_t bytes;
    } parts[] = {{&c.x, p.k * S::BYTES},
                 {&c.raw, p.k * 2},
                 {&c.weight, S::NORM ? p.k * 2 : 0},
                 {&c.powers, p.k / S::GROUP * 16},
                 {&c.sums, slots * S::PITCH * 4},
                 {&c.rows, slots * (int64_t)sizeof(fixed_row)},
                 {&c.scales, S::GROUPED ? slots * c.scale_pitch * 4 : 0},
                 {&c.ends, std::max<int64_t>(rows * 12, S::WARPS * 4)}};
    int64_t at = 0;
    for (const auto &part : parts)
        if (at <= (int64_t)room)
            *part.at = (int)at, at += up(part.bytes);
    c.bytes = at <= (int64_t)room && rows <= S::THREADS ? (size_t)at : 0;
    return c;
}

/* As load_once, but the compiler does not move it to where its result is used, behind barriers and loops. */
__device__ __forceinline__ uint4 fixed_load(const char *from)
{
#if __CUDA_ARCH__ >= 800
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
#else
    return load_once(from);
#endif
}

__device__ __forceinline__ uint32_t fixed_warp_max(uint32_t v)
{
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, v);
#else
#    pragma unroll
    for (int mask = 16; mask; mask /= 2)
        v = max(v, __shfl_xor_sync(~0u, v, mask));
    return v;
#endif
}

__device__ __forceinline__ float fixed_scale(const gemm_part &w, int64_t row, int64_t group)
{
    const int64_t at = row * w.scale_stride + group;
    return w.scale_dtype == ADZE_F32   ? ((const float *)w.scale)[at]
           : w.scale_dtype == ADZE_F16 ? to_float(((const f16 *)w.scale)[at])
                                       : to_float(((const bf16 *)w.scale)[at]);
}

/* Four elements whose weights are together in a word, in the order of its bytes: neighbours, or with u4 every other
   one of eight, so that two lanes load the same vector. */
template <typename T>
__device__ __forceinline__ void fixed_four(uint4 v, int item, float (&f)[4])
{
    const uint32_t words[4] = {v.x, v.y, v.z, v.w}, half = item % 2 ? 0x3232 : 0x1010;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const uint32_t both = __byte_perm(words[e], 0, half);
        f[e] = to_float(*reinterpret_cast<const T *>(&both));
    }
}
template <typename T>
__device__ __forceinline__ void fixed_four(uint2 v, int, float (&f)[4])
{
    float all[8];
    const packed<T> of = {make_uint4(v.x, v.y, 0, 0)};
    of.get(all);
#pragma unroll
    for (int e = 0; e < 4; e++)
        f[e] = all[e];
}
template <typename T>
__device__ __forceinline__ float fixed_normed(const gemm_params &p, float f, float rms, float weight)
{
    f *= rms;
    if (p.rounding & ADZE_ROUND_NORM)
        f = round_to<T>(f);
    return round_to<T>(f * (weight + p.weight_offset));
}

/* The bytes of four elements, which a lane has of the 128 of its warp, to where the mma's operand has them. False:
   the numbers are not the elements.

   A number is three parts, each of which is 2^15 of the one above. An element is rounded to its part by a sum with
   1.5 * 2^23, whose last bits the part then is; what remains goes into the part below. Of a part's 16 bits the upper
   byte is rounded by another 128, and the lower byte, which that changed by 128, has its sign. */
template <class S>
__device__ __forceinline__ bool fixed_store(const float (&f)[4], int item, char *xs, float *powers)
{
    constexpr float ROUNDING = 0x1.8p23f + 128;
    const int lane = item % 32, group = item / 32;
    const float mine = fmaxf(fmaxf(fabsf(f[0]), fabsf(f[1])), fmaxf(fabsf(f[2]), fabsf(f[3])));
    const uint32_t most = fixed_warp_max(__float_as_uint(mine));
    const int top = most ? (int)(most >> 23) : 127; /* the exponent, more by 127 */
    char *const to = xs +
                     (S::U4 ? group * S::X_STEP + lane / 4 % 2 * (S::BYTES * 64) + lane / 8 * 16
                            : (group * 2 + lane / 16) * S::X_STEP + lane / 4 % 4 * 16) +
                     lane / 2 % 2 * 8 + lane % 2 * 4;
    float rest[4], larger = __int_as_float((127 + 13 + 127 - top) << 23);
#pragma unroll
    for (int e = 0; e < 4; e++)
        rest[e] = f[e];
#pragma unroll
    for (int part = 2; part >= 0; part--) {
        uint32_t bits[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float rounded = fmaf(rest[e], larger, ROUNDING);
            rest[e] = fmaf(rest[e], larger, -(rounded - ROUNDING));
            bits[e] = __float_as_uint(rounded);
        }
        larger = 0x1p15f;
        const uint32_t a = __byte_perm(bits[0], bits[1], 0x5140), b = __byte_perm(bits[2], bits[3], 0x5140);
        *reinterpret_cast<uint32_t *>(to + part * 128) = __byte_perm(a, b, 0x5410) ^ 0x80808080u;
        *reinterpret_cast<uint32_t *>(to + part * 128 + 64) = __byte_perm(a, b, 0x7632);
    }
    /* Of the parts, of which lanes t have one each, and the last none. The operands of u4 are 16 times the weights.
     */
    if (lane < 4)
        powers[group * 4 + lane] = lane == 3 ? 0 : __int_as_float((top - 43 - (S::U4 ? 4 : 0) + 15 * lane) << 23);
    return top >= 127 - 48 && top <= 127 + 28 &&
           (fabsf(rest[0]) + fabsf(rest[1])) + (fabsf(rest[2]) + fabsf(rest[3])) == 0;
}

template <typename T, class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    gemm_fixed(const __grid_constant__ gemm_params p, const __grid_constant__ fixed_call c)
{
    constexpr bool U4 = S::U4, GROUPED = S::GROUPED;
    extern __shared__ __align__(128) char shared[];
    const int thread = (int)threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane >> 2, t = lane & 3;
    const int block = (int)blockIdx.x, begin = block * c.rows_each + min(block, c.rows_extra), steps = c.steps;
    const int rows = c.rows_each + (block < c.rows_extra), of_tile = p.glu ? 3 : 4; /* log2 of a tile's rows */
    const int tiles = (rows + (1 << of_tile) - 1) >> of_tile;
    fixed_row *const table = (fixed_row *)(shared + c.rows);
    float *const sums = (float *)(shared + c.sums), *const ends = (float *)(shared + c.ends);

    if (!p.const_weights)
        pdl_wait();
    pdl_launch_next();
    /* Slots are rows of tiles. With glu the upper 8 of a tile are the value's. After the last row it is that again.
     */
    auto row_of = [&](int slot) {
        int part = p.glu ? slot >> 3 & 1 : 0;
        int row = begin + min(((slot >> 4) << of_tile) + (slot & ((1 << of_tile) - 1)), rows - 1);
        if (!p.glu && row >= (int)p.part[0].n) {
            row -= (int)p.part[0].n, part = 1;
            if (row >= (int)p.part[1].n)
                row -= (int)p.part[1].n, part = 2;
        }
        return fixed_row{p.part[part].w + row * p.part[part].w_stride, part, row};
    };
    /* The next unit to load. */
    int fetch_tile = 0, fetch_step = warp;
    const char *from[2] = {row_of(g).w + warp * 64 + t * 16, row_of(8 + g).w + warp * 64 + t * 16};
    uint4 w[S::AHEAD][2];
    auto load = [&](uint4(&to)[2]) {
        if (fetch_tile < tiles)
            to[0] = load_once(from[0]), to[1] = load_once(from[1]);
    };
    auto early = [&](uint4(&to)[2]) {
        if (fetch_tile < tiles)
            to[0] = fixed_load(from[0]), to[1] = fixed_load(from[1]);
    };
    auto go_on = [&]() {
        fetch_step += S::WARPS, from[0] += S::WARPS * 64, from[1] += S::WARPS * 64;
        if (fetch_step < steps)
            return;
        fetch_step -= steps, fetch_tile++;
        if (fetch_tile < tiles) {
            const uint32_t of = thread_again() % 32;
            const fixed_row *const row = table + fetch_tile * 16 + of / 4;
            const int in_row = fetch_step * 64 + (int)(of % 4 * 16);
            from[0] = row[0].w + in_row, from[1] = row[8].w + in_row;
        }
    };
    early(w[0]);
    /* The norm's weight, and the table of rows. */
    const auto copy_vectors = [&](const void *vectors, int to) {
#pragma unroll 1
        for (int item = thread; item < (int)p.k / 4; item += S::THREADS)
            if (item % 2 == 0)
                copy_async(shared_address(shared + to) + (uint32_t)(item * 8), (const char *)vectors + item * 8);
    };
    if constexpr (S::NORM)
        copy_vectors(p.norm_weight, c.weight);
#pragma unroll 1
    for (int slot = thread; slot < tiles * 16; slot += S::THREADS)
        table[slot] = row_of(slot);
    __syncthreads();
    go_on();
#pragma unroll
    for (int i = 1; i < S::AHEAD - 1; i++)
        early(w[i]), go_on();
    if constexpr (GROUPED) { /* words of scales are copied as they are */
#pragma unroll 1
        for (int i = thread; i < tiles * 16 * c.scale_words; i += S::THREADS) {
            const int slot = (int)__umulhi((uint32_t)i, c.scale_inverse), word = i - slot * c.scale_words;
            const gemm_part &of = p.part[table[slot].part];
            copy_async_4(shared_address(shared + c.scales) + (uint32_t)((slot * c.scale_pitch + word) * 4),
                         (const char *)of.scale + table[slot].row * of.scale_stride * S::SCALE_BYTES + word * 4,
                         true);
        }
    }
    if (p.const_weights)
        pdl_wait();
    copy_vectors(p.x, c.raw);
    copy_commit();
    early(w[S::AHEAD - 1]);
    if constexpr (S::NORM)
        __syncthreads(); /* without it the compiler moves these loads behind the wait for x */
    go_on();
    /* What this thread's row needs at the end: its scales, and the residual. */
    const auto slot_of = [&](int row) { return ((row >> of_tile) << 4) + (row & ((1 << of_tile) - 1)); };
    float end[3] = {1, 1, 0};
    if (thread < rows) {
        const fixed_row &mine = table[slot_of(thread)];
        if constexpr (!GROUPED) {
            end[0] = fixed_scale(p.part[mine.part], mine.row, 0);
            if (p.glu)
                end[1] = fixed_scale(p.part[1], mine.row, 0);
        }
        if (p.residual) {
            float residual[1];
            load_param<T, 1>(p.residual, p.out_f32, p.part[mine.part].column + mine.row, residual);
            end[2] = residual[0];
        }
    }
    copy_wait<0>();
    __syncwarp(); /* lanes have what their neighbours copied */

    const auto four = [&](int of, int item, float(&f)[4]) {
        const char *const at = shared + of + (U4 ? item / 2 * 16 : item * 8);
        fixed_four<T>(*reinterpret_cast<const typename S::raw *>(at), item, f);
    };
    float rms = 1;
    bool held = true;
    if constexpr (S::NORM) {
        float sum = 0;
#pragma unroll 1
        for (int item = thread; item < (int)p.k / 4; item += S::THREADS) {
            float f[4];
            four(c.raw, item, f);
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum = fmaf(f[e], f[e], sum);
        }
        sum = warp_sum<32>(sum);
        if (lane == 0)
            ends[warp] = sum;
        __syncthreads();
        rms = rsqrtf(warp_sum<32>(ends[lane]) * c.k_inverse + p.eps);
        __syncthreads(); /* they are read */
    }
#pragma unroll 1
    for (int item = thread; item < (int)p.k / 4; item += S::THREADS) {
        float f[4];
        four(c.raw, item, f);
        if constexpr (S::NORM) {
            float weight[4];
            four(c.weight, item, weight);
#pragma unroll
            for (int e = 0; e < 4; e++)
                f[e] = fixed_normed<T>(p, f[e], rms, weight[e]);
        }
        held = fixed_store<S>(f, item, shared + c.x, (float *)(shared + c.powers)) && held;
    }
    if (thread < rows)
#pragma unroll
        for (int i = 0; i < 3; i++)
            ends[thread * 3 + i] = end[i];

    if (__syncthreads_and(held)) {
        const char *const x_lane = shared + c.x + min(g, S::BYTES - 1) * 64 + t * 16;
        const float *const powers = (const float *)(shared + c.powers) + t;
        const char *scale_lane = shared + c.scales + g * c.scale_pitch * 4;
        float *sum_lane = sums + g * S::PITCH + warp, sum[2] = {};
        int tile = 0, step = warp;
        /* Sums begin with 1.5 * 2^23, as the bits of a float: then they are the last bits of one. */
        constexpr int ZERO = 0x4b400000;
        constexpr float LESS = 0x1.8p23f;
        auto multiply = [&](uint4 low, uint4 high) {
            const uint32_t words[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
            int y[4] = {ZERO, ZERO, ZERO, ZERO};
#pragma unroll
            for (int h = 0; h < (U4 ? 2 : 1); h++) {
                const uint4 x = load_shared(x_lane + step * S::X_STEP + h * (S::BYTES * 64));
                if constexpr (U4) {
                    /* Of a nibble, with its highest bit changed, that is the sign of 16 times a weight. */
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const uint32_t a = words[0][h * 2 + i], b = words[1][h * 2 + i];
                        mma_i8(y, and_xor<0xf0f0f0f0u, 0x80808080u>(a << 4),
                               and_xor<0xf0f0f0f0u, 0x80808080u>(b << 4), and_xor<0xf0f0f0f0u, 0x80808080u>(a),
                               and_xor<0xf0f0f0f0u, 0x80808080u>(b), i ? x.z : x.x, i ? x.w : x.y);
                    }
                } else {
                    mma_i8(y, words[0][0], words[1][0], words[0][1], words[1][1], x.x, x.y);
                    mma_i8(y, words[0][2], words[1][2], words[0][3], words[1][3], x.z, x.w);
                }
            }
            const float power = powers[step / (S::GROUP / S::STEP) * 4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float lower = __int_as_float(y[h * 2]) - LESS, upper = __int_as_float(y[h * 2 + 1]) - LESS;
                float scale = power;
                if constexpr (GROUPED) {
                    const char *const of = scale_lane + h * 8 * c.scale_pitch * 4 + step * S::SCALE_BYTES;
                    scale *= S::SCALES == F32_SCALES   ? *(const float *)of
                             : S::SCALES == F16_SCALES ? to_float(*(const f16 *)of)
                                                       : to_float(*(const bf16 *)of);
                }
                sum[h] = fmaf(fmaf(upper, 256, lower), scale, sum[h]);
            }
        };
        auto next = [&]() {
            step += S::WARPS;
            if (step < steps)
                return;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float all = warp_sum<4>(sum[h]);
                if (t == 0)
                    sum_lane[h * 8 * S::PITCH] = all;
                sum[h] = 0;
            }
            sum_lane += 16 * S::PITCH, scale_lane += 16 * c.scale_pitch * 4;
            step -= steps, tile++;
        };
#pragma unroll 1
        while (tile < tiles) {
#pragma unroll
            for (int a = 0; a < S::AHEAD; a++) {
                if (tile >= tiles)
                    break;
                multiply(w[a][0], w[a][1]);
                load(w[a]);
                go_on();
                next();
            }
        }
    } else {
        /* A warp has a row, a lane every 32nd element. */
#pragma unroll 1
        for (int slot = warp; slot < tiles * 16; slot += S::WARPS) {
            const fixed_row of = table[slot];
            float sum = 0;
#pragma unroll 1
            for (int i = lane; i < (int)p.k; i += 32) {
                float x = to_float(((const T *)p.x)[i]);
                if constexpr (S::NORM)
                    x = fixed_normed<T>(p, x, rms, to_float(((const T *)p.norm_weight)[i]));
                const float scale = GROUPED ? fixed_scale(p.part[of.part], of.row, i / S::GROUP) : 1;
                sum = fmaf(x * (weight_float<T, S::FORMAT>(of.w, i) - (U4 ? 8 : 0)), scale, sum);
            }
            sum = warp_sum<32>(sum);
            sums[slot * S::PITCH + lane] = lane ? 0 : sum;
        }
    }
    __syncthreads();

    const int last = (int)thread_again();
    if (last >= rows)
        return;
    const fixed_row &mine = table[slot_of(last)];
    const auto bias_of = [](const gemm_part &of, int row) {
        float b[1] = {};
        if (of.bias)
            load_param<T, 1>(of.bias, of.bias_f32, row, b);
        return b[0];
    };
    const gemm_part &of = p.part[mine.part];
    const float *const its_sums = sums + slot_of(last) * S::PITCH;
    float y[2] = {};
#pragma unroll
    for (int kind = 0; kind < 2; kind++) {
        if (kind && !p.glu)
            break;
#pragma unroll
        for (int v = 0; v < S::WARPS; v += 4) {
            const float4 four = *(const float4 *)(its_sums + kind * 8 * S::PITCH + v);
            y[kind] += (four.x + four.y) + (four.z + four.w);
        }
    }
    const bool rounded = p.rounding & ADZE_ROUND_STEPS;
    float f = fmaf(y[0], ends[last * 3], bias_of(of, mine.row));
    f = rounded ? round_to<T>(f) : f;
    if (p.glu) {
        const float value = fmaf(y[1], ends[last * 3 + 1], bias_of(p.part[1], mine.row));
        f = act_times_sigmoid(f, f);
        f = (rounded ? round_to<T>(f) : f) * (rounded ? round_to<T>(value) : value);
        f = rounded ? round_to<T>(f) : f;
    }
    f += ends[last * 3 + 2];
    if (p.out_f32)
        ((float *)of.out)[mine.row] = f;
    else
        ((T *)of.out)[mine.row] = from_float<T>(f);
}

#endif
