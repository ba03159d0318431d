// d log p(token) / d logits: ((v == token) - softmax(logits)[v]) · factor, rounded to BF16, in the memory of the logits.
//
// The softmax is PyTorch's on AVX-512, bit for bit, where `native.py` finds it so: the exponential is Sleef's of 1 unit
// (Shibata and Petrogalli 2020, arXiv 2001.09258), and sums have 16 lanes. In one call a row stays in the second cache.
#include "native/native.h"

// e^x of x <= 0, NaN of NaN: x = n ln 2 + s. In two steps times 2^n, so that subnormal numbers are rounded once.
static INLINE f32x16 exponential_of_softmax(f32x16 x) {
    const float magic = 0x1.8p23f;
    const f32x16 shifted = x * 1.442695040888963407359924681001892137f + magic, n = shifted - magic;
    f32x16 s = multiply_add(n, splat(-0.693145751953125f), x);
    s = multiply_add(n, splat(-1.428606765330187045e-06f), s);
    f32x16 u = splat(0.000198527617612853646278381f);
    const float terms[] = {0.00139304355252534151077271f, 0.00833336077630519866943359f, 0.0416664853692054748535156f,
                           0.166666671633720397949219f, 0.5f};
#pragma GCC unroll 5
    for (int i = 0; i < 5; i++) u = multiply_add(u, s, splat(terms[i]));
    u = multiply_add(s * s, u, s) + 1.0f;
    const i32x16 whole = (i32x16)shifted - (i32x16)splat(magic), half = whole >> 1;
    u = u * (f32x16)((half + 127) << 23) * (f32x16)((whole - half + 127) << 23);
    const i32x16 gone = x < -104.0f;
    return (f32x16)((i32x16)u & ~gone);
}

// Sixteen of a row of `count` from i on; `none` beyond its end.
static INLINE f32x16 load_row(const float* x, int64_t i, int64_t count, float none) {
    if (i + 16 <= count) return load<f32x16>(x + i);
    float rest[16];
    for (int64_t j = 0; j < 16; j++) rest[j] = i + j < count ? x[i + j] : none;
    return load<f32x16>(rest);
}
template <class T, class V>
static INLINE void store_row(T* x, int64_t i, int64_t count, V values) {
    if (i + 16 <= count) return store(x + i, values);
    T rest[16];
    store(rest, values);
    std::memcpy(x + i, rest, (count - i) * sizeof *x);
}

// exp(x - max x) in the place of a row x; returns 1 / their sum.
static float exponentials(float* x, int64_t count) {
    f32x16 most = splat(-INFINITY), sums = splat(0.0f);
    i32x16 unordered = {};
    for (int64_t i = 0; i < count; i += 16) {
        const f32x16 some = load_row(x, i, count, -INFINITY);
        most = larger_of(some, most), unordered |= some != some;
    }
    float peak = -INFINITY;
    for (int lane = 0; lane < 16; lane++) peak = unordered[lane] || peak != peak ? NAN : most[lane] > peak ? most[lane] : peak;
    for (int64_t i = 0; i < count; i += 16) {
        const f32x16 found = exponential_of_softmax(load_row(x, i, count, -INFINITY) - splat(peak));
        store_row(x, i, count, found);
        sums = i == 0 ? found : sums + found;  // beyond the end it is 0
    }
    return 1.0f / lane_sum(sums);
}

// `out` may be the beginning of the row itself: nothing is written before it was read.
static void gradient_row(const float* p, float whole, int64_t token, float factor, int64_t count, uint16_t* out) {
    const uint16_t chosen = to_bf16((-(p[token] * whole) + 1.0f) * factor);
    for (int64_t i = 0; i < count; i += 16)
        store_row(out, i, count, to_bf16(-(load_row(p, i, count, 0.0f) * splat(whole)) * splat(factor)));
    out[token] = chosen;
}

// x [rows, count], in place.
EXPORT void isobit_softmax(float* x, int64_t rows, int64_t count, int64_t threads) {
    for_each(useful_threads(threads, rows * count / 2), rows, [&](int64_t r) {
        float* row = x + r * count;
        const float whole = exponentials(row, count);
        for (int64_t i = 0; i < count; i += 16)
            store_row(row, i, count, load_row(row, i, count, 0.0f) * splat(whole));
    });
}

// x [rows, count]: logits, or their probabilities. Rows of the result are 2 · count apart, in the same memory.
EXPORT void isobit_logits_gradient(float* x, int64_t probabilities, const int64_t* tokens, const float* factor,
                                   int64_t rows, int64_t count, int64_t threads) {
    for_each(useful_threads(threads, rows * count / 2), rows, [&](int64_t r) {
        float* row = x + r * count;
        const float whole = probabilities ? 1.0f : exponentials(row, count);
        gradient_row(row, whole, tokens[r], factor[r], count, (uint16_t*)row);
    });
}
