// Operators within a row: RMSNorm, rotary embedding, SiLU gate, forward and backward.
//
// Elementwise expressions are those of the reference backend, rounding by rounding; sums are float64 in a fixed order.
// Arrays are contiguous unless a stride is given.
#include "native.h"

#define FOR_KIND(kind, CALL) \
    if ((kind) == BF16) {    \
        typedef uint16_t T;  \
        CALL;                \
    } else {                 \
        typedef float T;     \
        CALL;                \
    }

static INLINE void round_to(float x, uint16_t* out) { *out = to_bf16(x); }
static INLINE void round_to(float x, float* out) { *out = x; }

// A row's head as double, and zeros up to a multiple of 16.
template <class T>
static INLINE void decode_padded(const T* x, int64_t count, double* out) {
    decode_row(x, count, out);
    for (int64_t i = count; i < padded(count, 16); i++) out[i] = 0.0;
}

template <class T>
static void rms_norm(const T* x, const T* residual, const T* weight, int64_t rows, int64_t columns, double eps, T* y,
                     T* summed, float* rstd, int64_t threads) {
    int64_t width = padded(columns, 16);
#pragma omp parallel num_threads(useful_threads(threads, rows * columns / 2))
    {
        static thread_local Scratch scratch;
        double *wide = scratch.get(2 * width), *scale = wide + width;
        decode_padded(weight, columns, scale);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const T* row = x + r * columns;
            if (residual) {
                const T* other = residual + r * columns;
                T* sum = summed + r * columns;
                int64_t i = 0;
                for (; i + 16 <= columns; i += 16) round_once(decode(row + i) + decode(other + i), sum + i);
                for (; i < columns; i++) round_to(decode_scalar(row[i]) + decode_scalar(other[i]), sum + i);
                row = sum;
            }
            decode_padded(row, columns, wide);
            f64x8 squares[2] = {splat(0.0), splat(0.0)};
            for (int64_t i = 0; i < width; i += 16)
                for (int half = 0; half < 2; half++) {
                    f64x8 value = load<f64x8>(wide + i + 8 * half);
                    squares[half] = multiply_add(value, value, squares[half]);
                }
            float inverse = float(1.0 / std::sqrt(lane_sum(squares[0] + squares[1]) / double(columns) + eps));
            rstd[r] = inverse;
            f64x8 factor = splat(double(inverse));
            for (int64_t i = 0; i < width; i += 8)
                store(wide + i, load<f64x8>(wide + i) * factor * load<f64x8>(scale + i));
            round_row(wide, columns, y + r * columns);
        }
    }
}

EXPORT void isobit_rms_norm(int64_t kind, const void* x, const void* residual, const void* weight, int64_t rows,
                            int64_t columns, double eps, void* y, void* summed, float* rstd, int64_t threads) {
    FOR_KIND(kind, rms_norm((const T*)x, (const T*)residual, (const T*)weight, rows, columns, eps, (T*)y, (T*)summed,
                            rstd, threads))
}

template <class T>
static void rms_norm_backward(const T* dy, const T* summed, const T* weight, const float* rstd, int64_t rows,
                              int64_t columns, T* dx, float* dweight, int64_t threads) {
    int useful = useful_threads(threads, rows * columns);
#pragma omp parallel for num_threads(useful) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const T *g = dy + r * columns, *s = summed + r * columns;
        f64x8 total = splat(0.0);
        double rest = 0.0;
        int64_t i = 0;
        for (; i + 16 <= columns; i += 16) {
            f32x16 product = (decode(g + i) * decode(weight + i)) * (decode(s + i) * splat(rstd[r]));
            total = total + (widen(low_half(product)) + widen(high_half(product)));
        }
        for (; i < columns; i++)
            rest += double((decode_scalar(g[i]) * decode_scalar(weight[i])) * (decode_scalar(s[i]) * rstd[r]));
        float mean = float((lane_sum(total) + rest) / double(columns));
        for (i = 0; i + 16 <= columns; i += 16) {
            f32x16 scaled = decode(g + i) * decode(weight + i), normed = decode(s + i) * splat(rstd[r]);
            round_once(splat(rstd[r]) * (scaled - normed * splat(mean)), dx + r * columns + i);
        }
        for (; i < columns; i++) {
            float scaled = decode_scalar(g[i]) * decode_scalar(weight[i]), normed = decode_scalar(s[i]) * rstd[r];
            round_to(rstd[r] * (scaled - normed * mean), dx + r * columns + i);
        }
    }
    int64_t strips = padded(columns, 64) / 64;
#pragma omp parallel for num_threads(useful) schedule(static)
    for (int64_t strip = 0; strip < strips; strip++) {
        int64_t first = strip * 64, last = first + 64 < columns ? first + 64 : columns;
        double total[64] = {0};
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = first; i < last; i++)
                total[i - first] += double(decode_scalar(dy[r * columns + i]) *
                                           (decode_scalar(summed[r * columns + i]) * rstd[r]));
        for (int64_t i = first; i < last; i++) dweight[i] = float(total[i - first]);
    }
}

EXPORT void isobit_rms_norm_backward(int64_t kind, const void* dy, const void* summed, const void* weight,
                                     const float* rstd, int64_t rows, int64_t columns, void* dx, float* dweight,
                                     int64_t threads) {
    FOR_KIND(kind, rms_norm_backward((const T*)dy, (const T*)summed, (const T*)weight, rstd, rows, columns, (T*)dx,
                                     dweight, threads))
}

template <class T>
static void rotary(const T* x, int64_t row_stride, const float* cosine, const float* sine, const int64_t* positions,
                   int64_t tokens, int64_t heads, int64_t dim, float direction, T* out, int64_t threads) {
    int64_t half = dim / 2;
#pragma omp parallel for num_threads(useful_threads(threads, tokens * heads * dim / 4)) schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cosine + positions[t] * half, *s = sine + positions[t] * half;
        for (int64_t h = 0; h < heads; h++) {
            const T* source = x + t * row_stride + h * dim;
            T* target = out + (t * heads + h) * dim;
            int64_t i = 0;
            for (; i + 16 <= half; i += 16) {
                f32x16 first = decode(source + i), second = decode(source + half + i);
                f32x16 cs = load<f32x16>(c + i), sn = load<f32x16>(s + i) * splat(direction);
                round_once(first * cs - second * sn, target + i);
                round_once(second * cs + first * sn, target + half + i);
            }
            for (; i < half; i++) {
                float first = decode_scalar(source[i]), second = decode_scalar(source[half + i]);
                float sn = s[i] * direction;
                round_to(first * c[i] - second * sn, target + i);
                round_to(second * c[i] + first * sn, target + half + i);
            }
        }
    }
}

EXPORT void isobit_rotary(int64_t kind, const void* x, int64_t row_stride, const float* cosine, const float* sine,
                          const int64_t* positions, int64_t tokens, int64_t heads, int64_t dim, int64_t inverse,
                          void* out, int64_t threads) {
    FOR_KIND(kind, rotary((const T*)x, row_stride, cosine, sine, positions, tokens, heads, dim,
                          inverse ? -1.0f : 1.0f, (T*)out, threads))
}

// exp in float64, rounded to float32: nearly always the float32 nearest to the true value.
static INLINE f32x16 exponential_single(f32x16 x) {
    return join(narrow(exponential(widen(low_half(x)))), narrow(exponential(widen(high_half(x)))));
}
static INLINE f32x16 silu_mul_lanes(f32x16 gate, f32x16 up) {
    return gate / (splat(1.0f) + exponential_single(-gate)) * up;
}

// A row in strips of 16; the last one padded, so that all elements take the same path.
template <class T>
static void silu_mul(const T* gate_up, int64_t rows, int64_t inner, T* out, int64_t threads) {
#pragma omp parallel for num_threads(useful_threads(threads, rows * inner * 2)) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const T *gate = gate_up + r * 2 * inner, *up = gate + inner;
        T* target = out + r * inner;
        int64_t i = 0;
        for (; i + 16 <= inner; i += 16) round_once(silu_mul_lanes(decode(gate + i), decode(up + i)), target + i);
        if (i < inner) {
            T a[16] = {0}, b[16] = {0}, c[16];
            std::memcpy(a, gate + i, (inner - i) * sizeof(T));
            std::memcpy(b, up + i, (inner - i) * sizeof(T));
            round_once(silu_mul_lanes(decode(a), decode(b)), c);
            std::memcpy(target + i, c, (inner - i) * sizeof(T));
        }
    }
}

EXPORT void isobit_silu_mul(int64_t kind, const void* gate_up, int64_t rows, int64_t inner, void* out,
                            int64_t threads) {
    FOR_KIND(kind, silu_mul((const T*)gate_up, rows, inner, (T*)out, threads))
}

template <class T>
static INLINE void silu_mul_backward_lanes(const T* dh, const T* gate, const T* up, T* dgate, T* dup) {
    const f32x16 one = splat(1.0f);
    f32x16 g = decode(gate), wide = decode(dh), sigma = one / (one + exponential_single(-g));
    round_once(wide * decode(up) * (sigma * (one + g * (one - sigma))), dgate);
    round_once(wide * (g * sigma), dup);
}

template <class T>
static void silu_mul_backward(const T* dh, const T* gate_up, int64_t rows, int64_t inner, T* out, int64_t threads) {
#pragma omp parallel for num_threads(useful_threads(threads, rows * inner * 2)) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const T *d = dh + r * inner, *gate = gate_up + r * 2 * inner, *up = gate + inner;
        T *dgate = out + r * 2 * inner, *dup = dgate + inner;
        int64_t i = 0;
        for (; i + 16 <= inner; i += 16) silu_mul_backward_lanes(d + i, gate + i, up + i, dgate + i, dup + i);
        if (i < inner) {
            T in[3][16] = {{0}}, result[2][16];
            size_t bytes = (inner - i) * sizeof(T);
            std::memcpy(in[0], d + i, bytes), std::memcpy(in[1], gate + i, bytes), std::memcpy(in[2], up + i, bytes);
            silu_mul_backward_lanes(in[0], in[1], in[2], result[0], result[1]);
            std::memcpy(dgate + i, result[0], bytes), std::memcpy(dup + i, result[1], bytes);
        }
    }
}

EXPORT void isobit_silu_mul_backward(int64_t kind, const void* dh, const void* gate_up, int64_t rows, int64_t inner,
                                     void* out, int64_t threads) {
    FOR_KIND(kind, silu_mul_backward((const T*)dh, (const T*)gate_up, rows, inner, (T*)out, threads))
}
