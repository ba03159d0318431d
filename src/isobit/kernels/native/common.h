// What the native kernels share: number formats, one correct rounding, an exponential of our own, scratch memory.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

typedef double v8 __attribute__((vector_size(64), aligned(8)));

inline double bf16_to_double(uint16_t code) {
    uint32_t bits = (uint32_t)code << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float bf16_to_float(uint16_t code) {
    uint32_t bits = (uint32_t)code << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Round to nearest even from float32.
inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// One rounding: through float32 rounded to odd (Boldo and Melquiond 2008).
inline uint16_t double_to_bf16(double value) {
    float single = (float)value;
    uint32_t bits;
    std::memcpy(&bits, &single, 4);
    double back = single;
    if (back != value && std::isfinite(single)) {
        if (std::fabs(back) > std::fabs(value)) bits--;
        bits |= 1;
        std::memcpy(&single, &bits, 4);
    }
    return float_to_bf16(single);
}

// Scratch memory, 64-byte aligned.
struct Buffer {
    double* data;
    explicit Buffer(long count) : data((double*)std::aligned_alloc(64, (count * sizeof(double) + 63) / 64 * 64 + 64)) {}
    ~Buffer() { std::free(data); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
};

// exp(x) for x <= 0, by x = n ln 2 + r and a polynomial of degree 13 in r: the same bits in any context, error below 2^-51.
inline double exp_negative(double x) {
    if (!(x > -708.0)) return x != x ? x : 0.0;
    double n = std::nearbyint(x * 1.4426950408889634);
    double r = x - n * 0.693147180369123816490;
    r = r - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    int64_t bits = ((int64_t)n + 1023) << 52;
    double power;
    std::memcpy(&power, &bits, 8);
    return p * power;
}
