// RMSNorm and the gate of a row, in float64 inside (`exact`, `fast`) or in float32 (`bitwise`, the order `rows32-v1`
// of kernels/norms/float32.py); and a row's quantization.
#pragma once

#include "native/pointwise.h"
#include "quantize/quantize.h"

constexpr int64_t LANES = 64;  // of a sum over the channels in float32

// How the rows of an operator's result are quantized, if at all: E4M3, blocks of `block` columns.
struct Quantized {
    uint8_t* codes;
    float* scales;
    int64_t block, power_of_two;
};

// The operators, which the self-test calls too (norms.cpp).
EXPORT int64_t isobit_rms_norm(int64_t kind, int64_t weight_kind, int64_t single, const void* x, const void* residual,
                               const void* weight, int64_t rows, int64_t columns, double eps, void* y, void* summed, float* rstd, void* codes,
                               void* scales, int64_t block, int64_t power_of_two, int64_t threads);
EXPORT int64_t isobit_gate_mul(int64_t activation, int64_t kind, int64_t single, const void* gate_up, int64_t rows,
                               int64_t inner, void* out, void* codes, void* scales, int64_t block, int64_t power_of_two, int64_t threads);

// Columns as the norm of a row computes them, with zeros after the last.
template <class R> constexpr int64_t norm_width(int64_t columns) {
    return padded(columns, sizeof(R) == sizeof(float) ? LANES : 16);
}
template <class R, class T>
static INLINE void decode_padded(const T* x, int64_t columns, R* out) {
    decode_row(x, columns, out);
    for (int64_t i = columns; i < norm_width<R>(columns); i++) out[i] = R(0);
}

// The weight of a norm, of its own kind.
template <class R>
static INLINE void decode_weight(int64_t kind, const void* weight, int64_t columns, R* out) {
    FOR_KIND(kind, decode_padded((const T*)weight, columns, out))
}

// 1 / sqrt(mean of squares + eps) of a row that is padded.
static INLINE float inverse_rms(const double* x, int64_t columns, double eps) {
    f64x8 squares[2] = {splat(0.0), splat(0.0)};
    for (int64_t i = 0; i < norm_width<double>(columns); i += 16)
        for (int half = 0; half < 2; half++) {
            f64x8 value = load<f64x8>(x + i + 8 * half);
            squares[half] = multiply_add(value, value, squares[half]);
        }
    return float(1.0 / std::sqrt(lane_sum(squares[0] + squares[1]) / double(columns) + eps));
}
static INLINE float inverse_rms(const float* x, int64_t columns, double eps) {
    f32x16 squares[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    for (int64_t i = 0; i < norm_width<float>(columns); i += LANES)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
            f32x16 value = load<f32x16>(x + i + 16 * part);
            squares[part] = multiply_add(value, value, squares[part]);
        }
    const float sum = lane_sum((squares[0] + squares[2]) + (squares[1] + squares[3]));
    const float mean = sum / float(columns) + float(eps);
    return mean < INFINITY ? 1.0f / std::sqrt(mean) : NAN;  // not 0, so that weights that blew up are noticed
}

// x · factor · weight of 16 columns, rounded once from float64, or after each multiplication.
template <class T>
static INLINE void scale_sixteen(const double* x, float factor, const double* weight, T* out) {
    const f64x8 wide = splat(double(factor));
    round_once(load<f64x8>(x) * wide * load<f64x8>(weight), load<f64x8>(x + 8) * wide * load<f64x8>(weight + 8), out);
}
template <class T>
static INLINE void scale_sixteen(const float* x, float factor, const float* weight, T* out) {
    round_once(load<f32x16>(x) * splat(factor) * load<f32x16>(weight), out);
}

// summed = x + residual, rounded; y = summed · rstd · weight. `weight` and `wide` are padded; returns rstd.
template <class R, class T>
static float rms_norm_row(const T* x, const T* residual, T* summed, const R* weight, int64_t columns, double eps, R* wide,
                          T* y) {
    if (residual) {
        int64_t i = 0;
        for (; i + 16 <= columns; i += 16) round_once(decode(x + i) + decode(residual + i), summed + i);
        for (; i < columns; i++) round_to(decode_scalar(x[i]) + decode_scalar(residual[i]), summed + i);
        x = summed;
    }
    decode_padded(x, columns, wide);
    const float rstd = inverse_rms(wide, columns, eps);
    int64_t i = 0;
    for (; i + 16 <= columns; i += 16) scale_sixteen(wide + i, rstd, weight + i, y + i);
    if (i < columns) {
        T last[16];
        scale_sixteen(wide + i, rstd, weight + i, last);
        std::memcpy(y + i, last, (columns - i) * sizeof(T));
    }
    return rstd;
}

// Activations of gates: x / (1 + exp(-k)) with k = x, or 2 sqrt(2 / pi) (x + 0.044715 x^3), or 1.702 x of gates that are at
// most 7, whose ups are at most 7 from 0, and 1 more; or 1 / (1 + exp(-x)).
enum Activation : int64_t { SILU = 0, GELU_TANH = 1, CLAMPED = 2, SIGMOID = 3 };
constexpr float SLOPE = 1.702f, LIMIT = 7.0f;  // of the third
constexpr double GELU[3] = {1.5957691216057308, 0.07135481627260025, 0.21406444881780076};
constexpr float FAR = 16.0f;  // beyond it GELU's k says no more

static INLINE f32x16 at_most(f32x16 x, float most) {
    const i32x16 high = x > most;
    return (f32x16)(((i32x16)splat(most) & high) | ((i32x16)x & ~high));
}
static INLINE f32x16 at_least(f32x16 x, float least) {
    const i32x16 low = x < least;
    return (f32x16)(((i32x16)splat(least) & low) | ((i32x16)x & ~low));
}
static INLINE f32x16 no_farther(f32x16 x) { return at_least(at_most(x, FAR), -FAR); }

// A gate and an up as they are multiplied, and where a gradient ends.
template <Activation A>
static INLINE f32x16 bounded_gate(f32x16 x) { return A == CLAMPED ? at_most(x, LIMIT) : x; }
template <Activation A>
static INLINE f32x16 bounded_up(f32x16 x) {
    return A == CLAMPED ? at_least(at_most(x, LIMIT), -LIMIT) + splat(1.0f) : x;
}
template <Activation A>
static INLINE f32x16 gate_gradient(f32x16 gradient, f32x16 gate) {
    return A == CLAMPED ? (f32x16)((i32x16)gradient & ~(gate > LIMIT)) : gradient;
}
template <Activation A>
static INLINE f32x16 up_gradient(f32x16 gradient, f32x16 up) {
    return A == CLAMPED ? (f32x16)((i32x16)gradient & ~(up > LIMIT) & ~(up < -LIMIT)) : gradient;
}
// k, or x k' with the third number of GELU in place of the second: in float32 with one rounding of the sum.
static INLINE f32x16 gelu_terms(f32x16 x, double second) {
    return x * multiply_add(x * x, splat(float(second)), splat(float(GELU[0])));
}
static INLINE f64x8 gelu_terms(f64x8 x, double second) { return x * (splat(GELU[0]) + splat(second) * (x * x)); }

// exp(-k), of float64 rounded to float32: nearly always the float32 nearest to the true value; or of float32.
template <Activation A, bool Single>
static INLINE f32x16 gate_exponential(f32x16 x) {
    if (A == GELU_TANH) x = no_farther(x);
    if (A == CLAMPED) x = x * SLOPE;
    if (Single) return exponential(A == GELU_TANH ? -gelu_terms(x, GELU[1]) : -x);
    f64x8 low = widen(low_half(x)), high = widen(high_half(x));
    if (A == GELU_TANH) low = gelu_terms(low, GELU[1]), high = gelu_terms(high, GELU[1]);
    return join(narrow(exponential(-low)), narrow(exponential(-high)));
}
// x k'.
template <Activation A, bool Single>
static INLINE f32x16 gate_slope(f32x16 x) {
    if (A == SILU || A == SIGMOID) return x;
    if (A == CLAMPED) return x * SLOPE;
    x = no_farther(x);
    if (Single) return gelu_terms(x, GELU[2]);
    return join(narrow(gelu_terms(widen(low_half(x)), GELU[2])), narrow(gelu_terms(widen(high_half(x)), GELU[2])));
}
template <Activation A, bool Single>
static INLINE f32x16 gate_mul_lanes(f32x16 gate, f32x16 up) {
    gate = bounded_gate<A>(gate);
    const f32x16 below = splat(1.0f) + gate_exponential<A, Single>(gate);
    return A == SIGMOID ? up / below : gate / below * bounded_up<A>(up);
}

// A row in strips of 16; the last one padded, so that all elements take the same path.
template <Activation A, bool Single, class T>
static void gate_mul_row(const T* gate, const T* up, int64_t inner, T* out) {
    int64_t i = 0;
    for (; i + 16 <= inner; i += 16) round_once(gate_mul_lanes<A, Single>(decode(gate + i), decode(up + i)), out + i);
    if (i < inner) {
        T a[16] = {0}, b[16] = {0}, c[16];
        std::memcpy(a, gate + i, (inner - i) * sizeof(T));
        std::memcpy(b, up + i, (inner - i) * sizeof(T));
        round_once(gate_mul_lanes<A, Single>(decode(a), decode(b)), c);
        std::memcpy(out + i, c, (inner - i) * sizeof(T));
    }
}

// Codes and scales of row r. Returns false on NaN or infinity.
template <class T>
static bool quantize_row(const Quantized& to, const T* x, int64_t r, int64_t columns) {
    const int64_t blocks = (columns + to.block - 1) / to.block;
    uint8_t* codes = to.codes + r * columns;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t first = b * to.block, count = columns - first < to.block ? columns - first : to.block;
        const uint32_t amax = run_amax(x + first, count);
        if (!is_finite(amax)) return false;
        const float scale = to.scales[r * blocks + b] = scale_of(amax, to.power_of_two);
        if (to.power_of_two) encode_run<true>(x + first, count, scale, codes + first);
        else encode_run<false>(x + first, count, scale, codes + first);
    }
    return true;
}
