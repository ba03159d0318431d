// Operators within a row: quantization, RMSNorm, rotary embedding, SiLU gate, and their backwards.
//
// Elementwise expressions are those of the reference, without fused multiply-add, so they give its bits; sums over a row run
// in eight fixed lanes.
#include "common.h"

namespace {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

struct Float32 {
    typedef float T;
    static inline float load(const float* x) { return *x; }
    static inline void store(float* x, double v) { *x = (float)v; }
    static inline void store_single(float* x, float v) { *x = v; }
};

struct BFloat16 {
    typedef uint16_t T;
    static inline float load(const uint16_t* x) { return bf16_to_float(*x); }
    static inline void store(uint16_t* x, double v) { *x = double_to_bf16(v); }
    static inline void store_single(uint16_t* x, float v) { *x = float_to_bf16(v); }
};

// Round |v| <= 448 to E4M3, to nearest even.
inline uint8_t to_e4m3(float v) {
    uint32_t bits = bits_of(v), magnitude = bits & 0x7fffffff;
    uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    uint32_t subnormal = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);  // one ulp there is 2^-9
    uint32_t code = magnitude >= 0x3c800000 ? normal : subnormal;
    return (uint8_t)(code | (bits >> 24 & 0x80));
}

inline float scale_from(uint32_t amax_bits, bool power_of_two) {
    if (amax_bits == 0) return 1.0f;
    float quotient = float_of(amax_bits) / 448.0f;
    if (!(quotient >= 0x1p-126f)) quotient = 0x1p-126f;
    if (!power_of_two) return quotient;
    uint32_t bits = bits_of(quotient);
    return float_of(((bits >> 23) + ((bits & 0x7fffff) != 0)) << 23);
}

inline uint8_t encode(float x, float scale) {
    float scaled = x / scale;
    scaled = scaled > 448.0f ? 448.0f : scaled;
    scaled = scaled < -448.0f ? -448.0f : scaled;
    return to_e4m3(scaled);
}

template <typename F>
bool quantize_rows(const typename F::T* x, long row_stride, long r0, long r1, long C, long block_columns, bool power_of_two,
                   uint8_t* codes, float* scales, uint32_t* amax) {
    long blocks = (C + block_columns - 1) / block_columns;
    std::memset(amax, 0, blocks * 4);
    for (long r = r0; r < r1; r++) {
        const typename F::T* row = x + r * row_stride;
        if (block_columns == 1) {
            for (long c = 0; c < C; c++) amax[c] = std::max(amax[c], bits_of(F::load(row + c)) & 0x7fffffff);
            continue;
        }
        for (long b = 0; b < blocks; b++) {
            uint32_t most = amax[b];
            for (long c = b * block_columns; c < std::min(C, (b + 1) * block_columns); c++)
                most = std::max(most, bits_of(F::load(row + c)) & 0x7fffffff);
            amax[b] = most;
        }
    }
    bool finite = true;
    for (long b = 0; b < blocks; b++) {
        finite = finite && amax[b] < 0x7f800000;
        scales[b] = scale_from(amax[b], power_of_two);
    }
    for (long r = r0; r < r1; r++) {
        const typename F::T* row = x + r * row_stride;
        if (block_columns == 1) {
            for (long c = 0; c < C; c++) codes[r * C + c] = encode(F::load(row + c), scales[c]);
            continue;
        }
        for (long b = 0; b < blocks; b++) {
            float scale = scales[b];
            for (long c = b * block_columns; c < std::min(C, (b + 1) * block_columns); c++)
                codes[r * C + c] = encode(F::load(row + c), scale);
        }
    }
    return finite;
}

template <typename F>
int quantize(const typename F::T* x, long row_stride, long R, long C, long block_rows, long block_columns, bool power_of_two,
             uint8_t* codes, float* scales, int threads) {
    long row_blocks = (R + block_rows - 1) / block_rows, column_blocks = (C + block_columns - 1) / block_columns;
    int bad = 0;
    bool parallel = threads > 1 && R * C > 1 << 15 && row_blocks > 1;
#pragma omp parallel num_threads(threads) if (parallel) reduction(| : bad)
    {
        Buffer amax(column_blocks / 2 + 1);
#pragma omp for schedule(static)
        for (long i = 0; i < row_blocks; i++) {
            long r0 = i * block_rows, r1 = std::min(R, r0 + block_rows);
            bad |= !quantize_rows<F>(x, row_stride, r0, r1, C, block_columns, power_of_two, codes,
                                     scales + i * column_blocks, (uint32_t*)amax.data);
        }
    }
    return bad;
}

// Sum of squares in eight lanes: lane c % 8, then a fixed tree.
template <typename F>
double sum_of_squares(const typename F::T* x, long C) {
    double lanes[8] = {0};
    long c = 0;
    for (; c + 8 <= C; c += 8)
        for (long l = 0; l < 8; l++) {
            double v = F::load(x + c + l);
            lanes[l] += v * v;
        }
    for (long l = 0; c < C; c++, l++) {
        double v = F::load(x + c);
        lanes[l] += v * v;
    }
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

template <typename F>
void rms_norm(const typename F::T* x, const typename F::T* residual, const typename F::T* weight, double eps, long R, long C,
              typename F::T* y, typename F::T* summed, float* rstd, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && R * C > 1 << 15) schedule(static)
    for (long r = 0; r < R; r++) {
        const typename F::T* row = x + r * C;
        if (residual) {
            for (long c = 0; c < C; c++)
                F::store_single(summed + r * C + c, F::load(row + c) + F::load(residual + r * C + c));
            row = summed + r * C;
        }
        rstd[r] = (float)(1.0 / std::sqrt(sum_of_squares<F>(row, C) / C + eps));
        double scale = rstd[r];
        for (long c = 0; c < C; c++) F::store(y + r * C + c, (double)F::load(row + c) * scale * (double)F::load(weight + c));
    }
}

template <typename F>
void rms_norm_backward(const typename F::T* dy, const typename F::T* summed, const typename F::T* weight, const float* rstd,
                       long R, long C, typename F::T* dx, float* dweight, int threads) {
    bool parallel = threads > 1 && R * C > 1 << 15;
#pragma omp parallel for num_threads(threads) if (parallel) schedule(static)
    for (long r = 0; r < R; r++) {
        const typename F::T *g = dy + r * C, *s = summed + r * C;
        double lanes[8] = {0};
        for (long c = 0; c < C; c++)
            lanes[c & 7] += (double)(F::load(g + c) * F::load(weight + c)) * (double)(F::load(s + c) * rstd[r]);
        double total = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
        float mean = (float)(total / C);
        for (long c = 0; c < C; c++) {
            float normed = F::load(s + c) * rstd[r];
            F::store_single(dx + r * C + c, rstd[r] * (F::load(g + c) * F::load(weight + c) - normed * mean));
        }
    }
    constexpr long CHUNK = 32;  // columns of one task: the rows are always added in ascending order
#pragma omp parallel for num_threads(threads) if (parallel) schedule(static)
    for (long c0 = 0; c0 < C; c0 += CHUNK) {
        long width = std::min(CHUNK, C - c0);
        double sum[CHUNK] = {0};
        for (long r = 0; r < R; r++)
            for (long c = 0; c < width; c++)
                sum[c] += (double)(F::load(dy + r * C + c0 + c) * (F::load(summed + r * C + c0 + c) * rstd[r]));
        for (long c = 0; c < width; c++) dweight[c0 + c] = (float)sum[c];
    }
}

template <typename F>
void rotary(const typename F::T* x, long row_stride, const float* cosine, const float* sine, const int64_t* positions, long T,
            long heads, long D, bool inverse, typename F::T* y, int threads) {
    long half = D / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && T * heads * D > 1 << 15) schedule(static)
    for (long t = 0; t < T; t++) {
        const float *c = cosine + positions[t] * half, *s = sine + positions[t] * half;
        float sign = inverse ? -1.0f : 1.0f;
        for (long h = 0; h < heads; h++) {
            const typename F::T* from = x + t * row_stride + h * D;
            typename F::T* to = y + (t * heads + h) * D;
            for (long i = 0; i < half; i++) {
                float first = F::load(from + i), second = F::load(from + half + i), turn = sign * s[i];
                F::store_single(to + i, first * c[i] - second * turn);
                F::store_single(to + half + i, second * c[i] + first * turn);
            }
        }
    }
}

// sigmoid in float64, by our own exponential
inline double sigmoid(double x) {
    double e = exp_negative(-std::fabs(x));
    return (x >= 0 ? 1.0 : e) / (1.0 + e);
}

template <typename F>
void silu_mul(const typename F::T* gate_up, long T, long I, typename F::T* h, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && T * I > 1 << 13) schedule(static)
    for (long t = 0; t < T; t++)
        for (long i = 0; i < I; i++) {
            double gate = F::load(gate_up + t * 2 * I + i), up = F::load(gate_up + t * 2 * I + I + i);
            F::store(h + t * I + i, gate * sigmoid(gate) * up);
        }
}

template <typename F>
void silu_mul_backward(const typename F::T* dh, const typename F::T* gate_up, long T, long I, typename F::T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && T * I > 1 << 13) schedule(static)
    for (long t = 0; t < T; t++)
        for (long i = 0; i < I; i++) {
            double gate = F::load(gate_up + t * 2 * I + i), up = F::load(gate_up + t * 2 * I + I + i);
            double g = F::load(dh + t * I + i), s = sigmoid(gate);
            F::store(out + t * 2 * I + i, g * up * (s * (1.0 + gate * (1.0 - s))));
            F::store(out + t * 2 * I + I + i, g * (gate * s));
        }
}

template <typename F>
int kv_write(const typename F::T* x, long row_stride, long T, long heads, long D, const int64_t* slots, int quantized,
             int power_of_two, void* data, float* scale) {
    int bad = 0;
    for (long t = 0; t < T; t++)
        for (long h = 0; h < heads; h++) {
            const typename F::T* from = x + t * row_stride + h * D;
            long to = slots[t] * heads + h;
            if (!quantized) {
                std::memcpy((typename F::T*)data + to * D, from, D * sizeof(typename F::T));
                continue;
            }
            uint32_t amax;
            bad |= !quantize_rows<F>(from, 0, 0, 1, D, D, power_of_two, (uint8_t*)data + to * D, scale + to, &amax);
        }
    return bad;
}

}  // namespace

typedef const uint16_t* B;
typedef const float* S;

extern "C" {

int isobit_quantize(const void* x, int bf16, long row_stride, long R, long C, long block_rows, long block_columns,
                    int power_of_two, uint8_t* codes, float* scales, int threads) {
    if (bf16) return quantize<BFloat16>((B)x, row_stride, R, C, block_rows, block_columns, power_of_two, codes, scales, threads);
    return quantize<Float32>((S)x, row_stride, R, C, block_rows, block_columns, power_of_two, codes, scales, threads);
}

void isobit_rms_norm(const void* x, const void* residual, const void* weight, int bf16, double eps, long R, long C, void* y,
                     void* summed, float* rstd, int threads) {
    if (bf16)
        rms_norm<BFloat16>((B)x, (B)residual, (B)weight, eps, R, C, (uint16_t*)y, (uint16_t*)summed, rstd, threads);
    else
        rms_norm<Float32>((S)x, (S)residual, (S)weight, eps, R, C, (float*)y, (float*)summed, rstd, threads);
}

void isobit_rms_norm_backward(const void* dy, const void* summed, const void* weight, const float* rstd, int bf16, long R,
                              long C, void* dx, float* dweight, int threads) {
    if (bf16) rms_norm_backward<BFloat16>((B)dy, (B)summed, (B)weight, rstd, R, C, (uint16_t*)dx, dweight, threads);
    else rms_norm_backward<Float32>((S)dy, (S)summed, (S)weight, rstd, R, C, (float*)dx, dweight, threads);
}

void isobit_rotary(const void* x, int bf16, long row_stride, const float* cosine, const float* sine, const int64_t* positions,
                   long T, long heads, long D, int inverse, void* y, int threads) {
    if (bf16) rotary<BFloat16>((B)x, row_stride, cosine, sine, positions, T, heads, D, inverse, (uint16_t*)y, threads);
    else rotary<Float32>((S)x, row_stride, cosine, sine, positions, T, heads, D, inverse, (float*)y, threads);
}

void isobit_silu_mul(const void* gate_up, int bf16, long T, long I, void* h, int threads) {
    if (bf16) silu_mul<BFloat16>((B)gate_up, T, I, (uint16_t*)h, threads);
    else silu_mul<Float32>((S)gate_up, T, I, (float*)h, threads);
}

void isobit_silu_mul_backward(const void* dh, const void* gate_up, int bf16, long T, long I, void* out, int threads) {
    if (bf16) silu_mul_backward<BFloat16>((B)dh, (B)gate_up, T, I, (uint16_t*)out, threads);
    else silu_mul_backward<Float32>((S)dh, (S)gate_up, T, I, (float*)out, threads);
}

int isobit_kv_write(const void* x, int bf16, long row_stride, long T, long heads, long D, const int64_t* slots, int quantized,
                    int power_of_two, void* data, float* scale) {
    if (bf16) return kv_write<BFloat16>((B)x, row_stride, T, heads, D, slots, quantized, power_of_two, data, scale);
    return kv_write<Float32>((S)x, row_stride, T, heads, D, slots, quantized, power_of_two, data, scale);
}

}  // extern "C"
