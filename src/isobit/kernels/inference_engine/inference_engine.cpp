// The row operators of a separate engine (kernels/inference_engine/definition.py) for BF16: float32 with a second rounding to BF16 between.
//
// Elementwise expressions are those of definition.py, rounding by rounding; the sum of squares has a fixed order of its own.
#include "native/replay.h"
#include "norms/norms.h"

namespace {

// Up to 16 numbers of a row, with zeros beyond it.
template <class T> INLINE f32x16 read_strip(const T* p, int64_t count) {
    if (count >= 16) return decode(p);
    T rest[16] = {0};
    std::memcpy(rest, p, count * sizeof *p);
    return decode(rest);
}
INLINE void write_strip(f32x16 x, uint16_t* p, int64_t count) {
    const u16x16 rounded = to_bf16(x);
    if (count >= 16) store(p, rounded);
    else std::memcpy(p, &rounded, count * sizeof *p);
}

}  // namespace

// summed = x + residual, y = bf16(summed · rstd) · weight: the normalized row is rounded to the weight's type before it.
EXPORT void isobit_separate_rms_norm(int64_t weight_kind, const uint16_t* x, const uint16_t* residual, const void* weight,
                                     int64_t rows, int64_t columns, double eps, uint16_t* y, uint16_t* summed,
                                     float* rstd, int64_t threads) {
    for_each(useful_threads(threads, rows * columns / 4), rows, [&](int64_t r) {
        const uint16_t* row = x + r * columns;
        f32x16 squares[2] = {splat(0.0f), splat(0.0f)};
        for (int64_t i = 0; i < columns; i += 16) {
            f32x16 value = read_strip(row + i, columns - i);
            if (residual) {
                value = as_bf16(value + read_strip(residual + r * columns + i, columns - i));
                write_strip(value, summed + r * columns + i, columns - i);
            }
            squares[i / 16 % 2] = multiply_add(value, value, squares[i / 16 % 2]);
        }
        if (residual) row = summed + r * columns;
        const float mean = lane_sum(squares[0] + squares[1]) / float(columns);
        const float inverse = rstd[r] = 1.0f / std::sqrt(mean + float(eps));
        for (int64_t i = 0; i < columns; i += 16) {
            f32x16 normalized = read_strip(row + i, columns - i) * splat(inverse);
            if (weight_kind == BF16) normalized = as_bf16(normalized);
            const f32x16 factor = weight_kind == BF16 ? read_strip((const uint16_t*)weight + i, columns - i)
                                                      : read_strip((const float*)weight + i, columns - i);
            write_strip(normalized * factor, y + r * columns + i, columns - i);
        }
    });
}
REPLAYED(isobit_separate_rms_norm)

// out = bf16(activation(gate)) · up.
template <Activation A>
static void separate_gate_mul(const uint16_t* gate_up, int64_t rows, int64_t inner, uint16_t* out, int64_t threads) {
    for_each(useful_threads(threads, rows * inner), rows, [&](int64_t r) {
        const uint16_t *gate = gate_up + r * 2 * inner, *up = gate + inner;
        for (int64_t i = 0; i < inner; i += 16) {
            const f32x16 wide = bounded_gate<A>(read_strip(gate + i, inner - i));
            const f32x16 gated = as_bf16((A == SIGMOID ? splat(1.0f) : wide) / (splat(1.0f) + gate_exponential<A, true>(wide)));
            write_strip(gated * bounded_up<A>(read_strip(up + i, inner - i)), out + r * inner + i, inner - i);
        }
    });
}
EXPORT void isobit_separate_gate_mul(int64_t activation, const uint16_t* gate_up, int64_t rows, int64_t inner,
                                     uint16_t* out, int64_t threads) {
    const auto run = activation == SILU        ? separate_gate_mul<SILU>
                     : activation == GELU_TANH ? separate_gate_mul<GELU_TANH>
                     : activation == CLAMPED   ? separate_gate_mul<CLAMPED>
                                               : separate_gate_mul<SIGMOID>;
    run(gate_up, rows, inner, out, threads);
}
REPLAYED(isobit_separate_gate_mul)
