// The inner loops of attention's forward: softmax of a row, rows times keys, weights times values.
#pragma once

#include "attention/attention.h"

#include <algorithm>

// Of a key: what its score is multiplied by, and its weight after the sum of weights, for float32; float64 has one
// factor for all scores, since its keys and values are read with their scales.
struct Factors32 {
    const float *score, *weight;
};

// Weights from 0 to 1 as E4M3 of 2^8 times each, over 2^8, to nearest even: four significant bits, or from 2^-14 down
// steps of 2^-17. The definition is kernels/attention/probabilities.py.
INLINE f32x16 as_e4m3(f32x16 weight) {
    const u32x16 bits = (u32x16)weight, normal = (bits + 0x7ffff + ((bits >> 20) & 1)) & 0xfff00000u;
    const u32x16 small = (u32x16)((weight + 96.0f) - 96.0f), is_small = (u32x16)(weight < 0x1p-14f);
    return (f32x16)((small & is_small) | (normal & ~is_small));
}
// The same of float64 weights but for ties: the leading four bits are Veltkamp's.
INLINE f64x8 nearest_e4m3(f64x8 weight) {
    const f64x8 wide = weight * (0x1p49 + 1), normal = wide - (wide - weight);
    const f64x8 small = (weight + 0x1.8p35) - 0x1.8p35;
    const i64x8 is_small = weight < 0x1p-14;
    return (f64x8)(((i64x8)small & is_small) | ((i64x8)normal & ~is_small));
}

constexpr int64_t CODES = 120;  // of weights in E4M3, without 0

// exp(shifted) in E4M3, by the exact exp: `weight` is some units in the last place from it. Where that leaves a choice, it
// is how many boundaries `shifted` reaches that counts.
static INLINE f64x8 as_e4m3(f64x8 weight, f64x8 shifted, const double* boundaries) {
    const f64x8 low = nearest_e4m3(weight * (1 - 0x1p-40)), high = nearest_e4m3(weight * (1 + 0x1p-40));
    if (lane_sum(high - low) == 0) return low;
    double rounded[8];
    for (int lane = 0; lane < 8; lane++) {
        const int64_t code = std::upper_bound(boundaries, boundaries + CODES, shifted[lane]) - boundaries;
        rounded[lane] = code < 8 ? double(code) * 0x1p-17 : std::ldexp(double(8 + code % 8), int(code / 8) - 18);
    }
    return load<f64x8>(rounded);
}

// Weights as they meet the values.
template <class V>
static INLINE V as_rounded(const Attention& g, V weight, V shifted) {
    if constexpr (sizeof(shifted[0]) == sizeof(float))
        return g.probabilities == E4M3 ? as_e4m3(weight) : g.probabilities == BF16 ? as_bf16(weight) : weight;
    else return g.probabilities == E4M3 ? as_e4m3(weight, shifted, g.boundaries) : weight;
}

// scores [stop] of one row, keys first..last, to weights exp(score · factor - peak); all other weights are zero. A `sink` is
// one score more, whose weight is added to the sum of the others.
template <class R>
static void softmax_row(const Attention& g, R* scores, int64_t first, int64_t last, int64_t stop, Factors32 factors,
                        R* total, double* lse, const float* sink) {
    typedef typename Columns<R>::V V;
    constexpr int lanes = Columns<R>::lanes;
    constexpr bool single = sizeof(R) == sizeof(float);
    for (int64_t j = 0; j < first; j++) scores[j] = -R(INFINITY);
    for (int64_t j = last + 1; j < stop; j++) scores[j] = -R(INFINITY);
    V most = splat(-R(INFINITY)), sum = splat(R(0));
    for (int64_t j = 0; j < stop; j += lanes) {
        V value = load<V>(scores + j);
        if constexpr (single) value = value * load<V>(factors.score + j);
        else value = value * splat(g.scale);
        store(scores + j, value);
        most = larger_of(value, most);
    }
    R peak = most[0];
    for (int lane = 1; lane < lanes; lane++) peak = most[lane] > peak ? most[lane] : peak;
    if (sink && R(*sink) > peak) peak = R(*sink);
    for (int64_t j = 0; j < stop; j += lanes) {
        const V shifted = load<V>(scores + j) - splat(peak);
        V weight = exponential(shifted);
        sum = sum + weight;
        weight = as_rounded(g, weight, shifted);
        if constexpr (single) weight = weight * load<V>(factors.weight + j);
        store(scores + j, weight);
    }
    *total = lane_sum(sum);
    if (sink) *total = *total + exponential(splat(R(*sink) - peak))[0];
    *lse = double(peak) + (single ? logarithm(double(*total)) : std::log(double(*total)));
}

// Two rows of key lanes to one: the first half of each key's lanes plus the second half, keys side by side. Three levels
// bring the lanes of 8 keys into one vector, each summed by the tree of `lane_sum`.
#ifdef ISOBIT_PAIRS
INLINE f64x8 fold(f64x8 a, f64x8 b, int level) {
    if (level == 0) return {a.low + a.high, b.low + b.high};
    if (level == 1) return FROM_BOTH(a, b, 0, 1, 4, 5) + FROM_BOTH(a, b, 2, 3, 6, 7);
    return FROM_BOTH(a, b, 0, 2, 4, 6) + FROM_BOTH(a, b, 1, 3, 5, 7);
}
INLINE f32x16 fold(f32x16 a, f32x16 b, int level) {
    if (level == 0) return {a.low + a.high, b.low + b.high};
    if (level == 1) return FROM_BOTH(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + FROM_BOTH(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    return FROM_BOTH(a, b, 0, 1, 4, 5, 8, 9, 12, 13) + FROM_BOTH(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
}
INLINE void put_keys(f64x8 v, double* out) { store(out, v); }
INLINE void put_keys(f32x16 v, float* out) {
    store(out, __builtin_shufflevector(v.low, v.high, 0, 2, 4, 6, 8, 10, 12, 14) +
                   __builtin_shufflevector(v.low, v.high, 1, 3, 5, 7, 9, 11, 13, 15));
}
#else
INLINE f64x8 fold(f64x8 a, f64x8 b, int level) {
    if (level == 0)
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    if (level == 1)
        return __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13) +
               __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}
INLINE f32x16 fold(f32x16 a, f32x16 b, int level) {
    if (level == 0)
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    if (level == 1)
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    return __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}
INLINE void put_keys(f64x8 v, double* out) { store(out, v); }
INLINE void put_keys(f32x16 v, float* out) {
    f32x16 sum = __builtin_shufflevector(v, v, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14) +
                 __builtin_shufflevector(v, v, 1, 3, 5, 7, 9, 11, 13, 15, 1, 3, 5, 7, 9, 11, 13, 15);
    store(out, low_half(sum));
}
#endif

// out[r][j] = rows[r] · keys[j] for MR rows and 8 keys, whose columns begin at `first`: lanes over the head dimension, then
// the tree. Keys are stored values or decoded ones: the products and their order are the same.
template <int MR, class R, class T>
static INLINE void eight_keys(const R* rows, const T* const keys[8], int64_t first, const float* scales, int64_t width,
                              R* out, int64_t stride) {
    typedef typename Columns<R>::V V;
    V sum[MR][8];
#pragma GCC unroll 2
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) sum[r][j] = splat(R(0));
    constexpr int halves = Columns<R>::vectors;
    for (int64_t d = 0; d < width; d += PANEL) {
        V row[MR][halves];
#pragma GCC unroll 2
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
            for (int i = 0; i < halves; i++) row[r][i] = load<V>(rows + r * width + d + i * Columns<R>::lanes);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            V key[halves];
            decode_sixteen(keys[j] + first + d, scales[j], key);
#pragma GCC unroll 2
            for (int i = 0; i < halves; i++)
#pragma GCC unroll 2
                for (int r = 0; r < MR; r++) sum[r][j] = multiply_add(row[r][i], key[i], sum[r][j]);
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < MR; r++) {
        V pairs[4], quads[2];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) pairs[j] = fold(sum[r][2 * j], sum[r][2 * j + 1], 0);
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) quads[j] = fold(pairs[2 * j], pairs[2 * j + 1], 1);
        put_keys(fold(quads[0], quads[1], 2), out + r * stride);
    }
}

// Rows times decoded keys [keys][width]; the number of keys is a multiple of 8.
template <class R>
static void row_products(int64_t rows, int64_t keys, const R* row, const R* key, int64_t width, R* out, int64_t stride) {
    const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    for (int64_t j = 0; j < keys; j += 8) {
        const R* eight[8];
        for (int i = 0; i < 8; i++) eight[i] = key + (j + i) * width;
        int64_t r = 0;
        for (; r + 2 <= rows; r += 2) eight_keys<2>(row + r * width, eight, 0, ones, width, out + r * stride + j, stride);
        if (r < rows) eight_keys<1>(row + r * width, eight, 0, ones, width, out + r * stride + j, stride);
    }
}

// The same sums in float32 over keys that are turned, [panel][dim][16]: vectors over keys, so that the tree is additions alone. A lane
// of a key's sum is the chain of the channels LANE, LANE + 16, ...; lanes that are farthest apart are added first.
template <int LANE, int STEP, int MR, int WIDTH>
static INLINE void lanes_from(const float* rows, const float* panel, int64_t dim, int64_t width, f32x16* sum) {
    if constexpr (STEP == 16) {
#pragma GCC unroll 4
        for (int r = 0; r < MR; r++) sum[r] = splat(0.0f);
#pragma GCC unroll 8
        for (int64_t d = LANE; d < (WIDTH ? WIDTH : dim); d += 16) {
            f32x16 keys = load<f32x16>(panel + d * PANEL);
#pragma GCC unroll 4
            for (int r = 0; r < MR; r++)
                sum[r] = multiply_add(splat(rows[r * (WIDTH ? WIDTH : width) + d]), keys, sum[r]);
        }
    } else {
        f32x16 others[MR];
        lanes_from<LANE, 2 * STEP, MR, WIDTH>(rows, panel, dim, width, sum);
        lanes_from<LANE + STEP, 2 * STEP, MR, WIDTH>(rows, panel, dim, width, others);
#pragma GCC unroll 4
        for (int r = 0; r < MR; r++) {
            sum[r] = sum[r] + others[r];
#ifdef ISOBIT_AVX512
            asm volatile("" : "+v"(sum[r]));  // GCC would compute all chains before the sums, and run out of registers
#endif
        }
    }
}

#ifdef ISOBIT_AVX512
constexpr int TOGETHER = 4;  // rows: as many as share a load of keys within the registers
#else
constexpr int TOGETHER = 1;
#endif

template <int WIDTH>
static void turned_products(int64_t rows, int64_t panels, const float* row, const float* keys, int64_t dim, int64_t width,
                            float* out, int64_t stride) {
    for (int64_t p = 0; p < panels; p++, keys += dim * PANEL) {
        int64_t r = 0;
        f32x16 sum[TOGETHER];
        for (; r + TOGETHER <= rows; r += TOGETHER) {
            lanes_from<0, 1, TOGETHER, WIDTH>(row + r * width, keys, dim, width, sum);
            for (int i = 0; i < TOGETHER; i++) store(out + (r + i) * stride + p * PANEL, sum[i]);
        }
        for (; r < rows; r++) {
            lanes_from<0, 1, 1, WIDTH>(row + r * width, keys, dim, width, sum);
            store(out + r * stride + p * PANEL, sum[0]);
        }
    }
}
static void row_products_turned(int64_t rows, int64_t panels, const float* row, const float* keys, int64_t dim,
                                int64_t width, float* out, int64_t stride) {
    switch (dim) {
        case 32: turned_products<32>(rows, panels, row, keys, dim, width, out, stride); break;
        case 64: turned_products<64>(rows, panels, row, keys, dim, width, out, stride); break;
        case 128: turned_products<128>(rows, panels, row, keys, dim, width, out, stride); break;
        default: turned_products<0>(rows, panels, row, keys, dim, width, out, stride);
    }
}

constexpr int64_t AHEAD = 32;  // keys between a prefetch and its use

// Heads of tokens as they are stored.
template <class T>
struct Stored {
    const T* data;
    const float* scales;
    const int64_t* slots;
    int64_t kv_heads, dim, count, scale_step;
    INLINE const T* row(int64_t j, int64_t head) const { return data + (slots[j] * kv_heads + head) * dim; }
    INLINE float scale(int64_t j, int64_t head) const {
        return scales ? scales[(slots[j] * kv_heads + head) * scale_step] : 1.0f;
    }
    INLINE void prefetch_scale(int64_t j, int64_t head) const {
        if (scales && j < count) __builtin_prefetch(scales + (slots[j] * kv_heads + head) * scale_step);
    }
};

// Of a token's rows, from the first of some heads on: the lines, in bytes, that one of these heads asks for early. They come to
// the second cache: the first has no room for so many.
struct Lines {
    int64_t from, to;
    Lines(int64_t head, int64_t bytes) : from(padded(head * bytes, 64)), to(padded((head + 1) * bytes, 64)) {}
    template <class T>
    INLINE void ask(const T* row) const {
        for (int64_t byte = from; byte < to; byte += 64) __builtin_prefetch((const char*)row + byte, 0, 2);
    }
};

// Keys of a chain: in float64 the one chain of an element goes on; in float32 each begins at zero and is added.
template <class R> constexpr int64_t step_of = sizeof(R) == sizeof(float) ? CHAIN : 16;

// Chains that are computed side by side: as many as hide the latency of a multiply-add within the registers.
#ifdef ISOBIT_AVX512
constexpr int SUMS = 8;
#else
constexpr int SUMS = 4;
#endif
constexpr int64_t MIXED = 4 * CHAIN;  // keys whose rows are looked up at a time
template <class R, int EACH>
constexpr int chains_of = sizeof(R) == sizeof(double) || EACH >= SUMS ? 1 : SUMS / EACH < 4 ? SUMS / EACH : 4;

// Where the values of keys are, and those of as many keys after them.
template <class T>
struct Rows {
    const T *now[MIXED], *next[MIXED];
};

// out[MR][NV vectors] with N chains of `count` keys from j on, which are the `at`-th of rows, and their columns from `first`
// on; `lines` are to be asked for of the keys after them.
template <int MR, int NV, int N, class R, class T>
static INLINE void mix_chains(const Stored<T>& stored, const Rows<T>& rows, int64_t at, int64_t head, int64_t j,
                              int64_t count, int64_t first, Lines lines, const R* weights, int64_t stride, R* out) {
    typedef typename Columns<R>::V V;
    constexpr int lanes = Columns<R>::lanes, halves = Columns<R>::vectors;
    constexpr bool single = sizeof(R) == sizeof(float);
    V sum[N][MR][NV];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
#pragma GCC unroll 2
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
            for (int w = 0; w < NV; w++)
                sum[n][r][w] = j && !single ? load<V>(out + r * stored.dim + w * lanes) : splat(R(0));
    for (int64_t k = 0; k < count; k++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const T* value = rows.now[at + n * CHAIN + k] + first;
            lines.ask(rows.next[at + n * CHAIN + k]);
            const float scale = single ? 1.0f : stored.scale(j + k, head);
#pragma GCC unroll 8
            for (int w = 0; w < NV; w += halves) {
                V column[halves];
                decode_sixteen(value + w * lanes, scale, column);
#pragma GCC unroll 2
                for (int i = 0; i < halves; i++)
#pragma GCC unroll 2
                    for (int r = 0; r < MR; r++)
                        sum[n][r][w + i] =
                            multiply_add(splat(weights[r * stride + j + n * CHAIN + k]), column[i], sum[n][r][w + i]);
            }
        }
#pragma GCC unroll 2
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
        for (int w = 0; w < NV; w++) {
            R* target = out + r * stored.dim + w * lanes;
            V total = single && !j ? splat(R(0)) : load<V>(target);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) total = single ? total + sum[n][r][w] : sum[n][r][w];
            store(target, total);
        }
}
