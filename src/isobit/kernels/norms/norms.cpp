// Operators within a row: RMSNorm and gates, forward and backward.
//
// Elementwise expressions are those of the reference backend, rounding by rounding; sums are float64 in a fixed order, or
// where `single` is set float32 in the order `rows32-v1` (kernels/norms/float32.py). Arrays are contiguous.
#include <atomic>

#include "native/pointwise.h"
#include "native/replay.h"
#include "norms/norms.h"
#include "native/tile.h"

template <class R, class T>
static bool rms_norm(const T* x, const T* residual, int64_t weight_kind, const void* weight, int64_t rows,
                     int64_t columns, double eps, T* y, T* summed, float* rstd, const Quantized& to, int64_t threads) {
    const int64_t width = norm_width<R>(columns);
    std::atomic<bool> good{true};
    for_ranges(useful_threads(threads, rows * columns / 2), rows, 1, [&](int64_t first, int64_t last) {
        static thread_local Scratch scratch;
        R *wide = (R*)scratch.get(3 * width), *scale = wide + width;
        T* own = (T*)(scale + width);
        decode_weight(weight_kind, weight, columns, scale);
        for (int64_t r = first; r < last; r++) {
            const int64_t at = r * columns;
            T* target = to.codes ? own : y + at;
            rstd[r] = rms_norm_row(x + at, residual ? residual + at : nullptr, summed + at, scale, columns, eps, wide,
                                   target);
            if (to.codes && !quantize_row(to, target, r, columns)) good = false;
        }
    }, 1);
    return good;
}

// y, or with `codes` its quantization. Returns 1 where that meets NaN or infinity.
EXPORT int64_t isobit_rms_norm(int64_t kind, int64_t weight_kind, int64_t single, const void* x, const void* residual,
                               const void* weight, int64_t rows, int64_t columns, double eps, void* y, void* summed, float* rstd, void* codes,
                               void* scales, int64_t block, int64_t power_of_two, int64_t threads) {
    const Quantized to{(uint8_t*)codes, (float*)scales, block, power_of_two};
    bool good = true;
#define CALL(R)                                                                                                       \
    good = rms_norm<R>((const T*)x, (const T*)residual, weight_kind, weight, rows, columns, eps, (T*)y, (T*)summed, rstd, \
                       to, threads)
    FOR_KIND(kind, if (single) CALL(float); else CALL(double))
#undef CALL
    return !good;
}
REPLAYED(isobit_rms_norm)

// The mean of dy · w · n over a row, with n = s · rstd; products are float32.
template <class T>
static float mean_product(const T* g, const T* s, const float* weight, float rstd, int64_t columns, double) {
    f64x8 total = splat(0.0);
    double rest = 0.0;
    int64_t i = 0;
    for (; i + 16 <= columns; i += 16) {
        f32x16 product = (decode(g + i) * decode(weight + i)) * (decode(s + i) * splat(rstd));
        total = total + (widen(low_half(product)) + widen(high_half(product)));
    }
    for (; i < columns; i++) rest += double((decode_scalar(g[i]) * weight[i]) * (decode_scalar(s[i]) * rstd));
    return float((lane_sum(total) + rest) / double(columns));
}
template <class T>
static float mean_product(const T* g, const T* s, const float* weight, float rstd, int64_t columns, float) {
    f32x16 total[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    T last[2][LANES];
    for (int64_t i = 0; i < columns; i += LANES) {
        const T* part[2] = {g + i, s + i};
        for (int k = 0; k < 2 && columns - i < LANES; k++) {
            std::memset(last[k], 0, sizeof last[k]);
            std::memcpy(last[k], part[k], (columns - i) * sizeof(T));
            part[k] = last[k];
        }
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            f32x16 scaled = decode(part[0] + 16 * k) * decode(weight + i + 16 * k);
            total[k] = multiply_add(scaled, decode(part[1] + 16 * k) * splat(rstd), total[k]);
        }
    }
    return lane_sum((total[0] + total[2]) + (total[1] + total[3])) / float(columns);
}

// The weight's gradient of up to 64 columns: dy · n summed over the rows.
template <class T>
static void column_sums(const T* dy, const T* summed, const float* rstd, int64_t rows, int64_t columns, int64_t count,
                        double, float* out) {
    double total[64] = {0};
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < count; i++)
            total[i] += double(decode_scalar(dy[r * columns + i]) * (decode_scalar(summed[r * columns + i]) * rstd[r]));
    for (int64_t i = 0; i < count; i++) out[i] = float(total[i]);
}
template <class T>
static void column_sums(const T* dy, const T* summed, const float* rstd, int64_t rows, int64_t columns, int64_t count,
                        float, float* out) {
    float total[64] = {0};
    T padded_row[2][16] = {{0}};
    for (int64_t r = 0; r < rows; r += CHAIN)
        for (int64_t c = 0; c < count; c += 16) {
            const int64_t width = count - c < 16 ? count - c : 16;
            f32x16 sum = splat(0.0f);
            for (int64_t i = r; i < r + CHAIN && i < rows; i++) {
                const T *a = dy + i * columns + c, *b = summed + i * columns + c;
                if (width < 16) {
                    std::memcpy(padded_row[0], a, width * sizeof(T)), std::memcpy(padded_row[1], b, width * sizeof(T));
                    a = padded_row[0], b = padded_row[1];
                }
                sum = multiply_add(decode(a), decode(b) * splat(rstd[i]), sum);
            }
            store(total + c, load<f32x16>(total + c) + sum);
        }
    std::memcpy(out, total, count * sizeof(float));
}

template <class R, class T>
static void rms_norm_backward(const T* dy, const T* summed, const float* weight, const float* rstd, int64_t rows,
                              int64_t columns, T* dx, float* dweight, int64_t threads) {
    int useful = useful_threads(threads, rows * columns);
    for_each(useful, rows, [&](int64_t r) {
        const T *g = dy + r * columns, *s = summed + r * columns;
        const float mean = mean_product(g, s, weight, rstd[r], columns, R(0));
        int64_t i = 0;
        for (; i + 16 <= columns; i += 16) {
            f32x16 scaled = decode(g + i) * decode(weight + i), normed = decode(s + i) * splat(rstd[r]);
            round_once(splat(rstd[r]) * (scaled - normed * splat(mean)), dx + r * columns + i);
        }
        for (; i < columns; i++) {
            float scaled = decode_scalar(g[i]) * weight[i], normed = decode_scalar(s[i]) * rstd[r];
            round_to(rstd[r] * (scaled - normed * mean), dx + r * columns + i);
        }
    });
    int64_t strips = padded(columns, 64) / 64;
    for_each(useful, strips, [&](int64_t strip) {
        const int64_t first = strip * 64, count = columns - first < 64 ? columns - first : 64;
        column_sums(dy + first, summed + first, rstd, rows, columns, count, R(0), dweight + first);
    });
}

EXPORT void isobit_rms_norm_backward(int64_t kind, int64_t weight_kind, int64_t single, const void* dy,
                                     const void* summed, const void* weight, const float* rstd, int64_t rows,
                                     int64_t columns, void* dx, float* dweight, int64_t threads) {
    static thread_local Scratch scratch;
    float* wide = (float*)scratch.get(norm_width<float>(columns));
    decode_weight(weight_kind, weight, columns, wide);
#define CALL(R) \
    rms_norm_backward<R>((const T*)dy, (const T*)summed, wide, rstd, rows, columns, (T*)dx, dweight, threads)
    FOR_KIND(kind, if (single) CALL(float); else CALL(double))
#undef CALL
}

template <Activation A, bool Single, class T>
static bool gate_mul(const T* gate_up, int64_t rows, int64_t inner, T* out, const Quantized& to, int64_t threads) {
    std::atomic<bool> good{true};
    for_each(useful_threads(threads, rows * inner * 2), rows, [&](int64_t r) {
        static thread_local Scratch scratch;
        const T* gate = gate_up + r * 2 * inner;
        T* target = to.codes ? (T*)scratch.get(inner) : out + r * inner;
        gate_mul_row<A, Single>(gate, gate + inner, inner, target);
        if (to.codes && !quantize_row(to, target, r, inner)) good = false;
    });
    return good;
}

// activation(gate) · up, or with `codes` its quantization. Returns 1 where that meets NaN or infinity.
#define FOR_ACTIVATION(CALL)                \
    if (activation == SILU) {               \
        if (single) CALL(SILU, true);       \
        else CALL(SILU, false);             \
    } else if (activation == GELU_TANH) {   \
        if (single) CALL(GELU_TANH, true);  \
        else CALL(GELU_TANH, false);        \
    } else if (activation == CLAMPED) {     \
        if (single) CALL(CLAMPED, true);    \
        else CALL(CLAMPED, false);          \
    } else {                                \
        if (single) CALL(SIGMOID, true);    \
        else CALL(SIGMOID, false);          \
    }

EXPORT int64_t isobit_gate_mul(int64_t activation, int64_t kind, int64_t single, const void* gate_up, int64_t rows,
                               int64_t inner, void* out, void* codes, void* scales, int64_t block, int64_t power_of_two, int64_t threads) {
    const Quantized to{(uint8_t*)codes, (float*)scales, block, power_of_two};
    bool good = true;
#define CALL(A, SINGLE) good = gate_mul<A, SINGLE>((const T*)gate_up, rows, inner, (T*)out, to, threads)
    FOR_KIND(kind, FOR_ACTIVATION(CALL))
#undef CALL
    return !good;
}
REPLAYED(isobit_gate_mul)

template <Activation A, bool Single, class T>
static INLINE void gate_mul_backward_lanes(const T* dh, const T* gate, const T* up, T* dgate, T* dup) {
    const f32x16 one = splat(1.0f);
    const f32x16 given = decode(gate), more = decode(up), g = bounded_gate<A>(given), wide = decode(dh);
    const f32x16 sigma = one / (one + gate_exponential<A, Single>(g));
    const f32x16 rest = one - sigma;
    const f32x16 slope = sigma * (A == SIGMOID ? rest : one + gate_slope<A, Single>(g) * rest);
    round_once(gate_gradient<A>(wide * bounded_up<A>(more) * slope, given), dgate);
    round_once(up_gradient<A>(wide * (A == SIGMOID ? sigma : g * sigma), more), dup);
}

template <Activation A, bool Single, class T>
static void gate_mul_backward(const T* dh, const T* gate_up, int64_t rows, int64_t inner, T* out, int64_t threads) {
    for_each(useful_threads(threads, rows * inner * 2), rows, [&](int64_t r) {
        const T *d = dh + r * inner, *gate = gate_up + r * 2 * inner, *up = gate + inner;
        T *dgate = out + r * 2 * inner, *dup = dgate + inner;
        int64_t i = 0;
        for (; i + 16 <= inner; i += 16) gate_mul_backward_lanes<A, Single>(d + i, gate + i, up + i, dgate + i, dup + i);
        if (i < inner) {
            T in[3][16] = {{0}}, result[2][16];
            size_t bytes = (inner - i) * sizeof(T);
            std::memcpy(in[0], d + i, bytes), std::memcpy(in[1], gate + i, bytes), std::memcpy(in[2], up + i, bytes);
            gate_mul_backward_lanes<A, Single>(in[0], in[1], in[2], result[0], result[1]);
            std::memcpy(dgate + i, result[0], bytes), std::memcpy(dup + i, result[1], bytes);
        }
    });
}

EXPORT void isobit_gate_mul_backward(int64_t activation, int64_t kind, int64_t single, const void* dh,
                                     const void* gate_up, int64_t rows, int64_t inner, void* out, int64_t threads) {
#define CALL(A, SINGLE) gate_mul_backward<A, SINGLE>((const T*)dh, (const T*)gate_up, rows, inner, (T*)out, threads)
    FOR_KIND(kind, FOR_ACTIVATION(CALL))
#undef CALL
}
