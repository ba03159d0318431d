// The quantizer's parts: largest magnitude, scale, code. The definition is isobit.precision.quantize, bit for bit.
#pragma once

#include "native/native.h"

constexpr float LARGEST = 448.0f, LARGEST_INT8 = 127.0f;

INLINE f32x16 magnitude(f32x16 x) { return (f32x16)((u32x16)x & 0x7fffffff); }
INLINE f32x16 larger(f32x16 a, f32x16 b) {  // of two magnitudes; as integers, so that NaN wins
    i32x16 greater = (i32x16)a > (i32x16)b;
    return (f32x16)(((i32x16)a & greater) | ((i32x16)b & ~greater));
}
INLINE uint32_t magnitude_bits(float x) { return bits_of<uint32_t>(x) & 0x7fffffff; }
INLINE bool is_finite(uint32_t bits) { return bits < 0x7f800000; }

// Bits of the largest magnitude of a contiguous run; NaN and infinity come out as themselves.
template <class T>
INLINE uint32_t run_amax(const T* x, int64_t count) {
    f32x16 most = splat(0.0f);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) most = larger(most, magnitude(decode(x + i)));
    most = larger(most, join(high_half(most), low_half(most)));
    uint32_t result = 0;
    for (int lane = 0; lane < 8; lane++) {
        uint32_t bits = bits_of<uint32_t>(most[lane]);
        result = bits > result ? bits : result;
    }
    for (; i < count; i++) {
        uint32_t bits = magnitude_bits(decode_scalar(x[i]));
        result = bits > result ? bits : result;
    }
    return result;
}

// amax / largest, at least 2^-126; for UE8M0 the next power of two at or above it; 1 for a block of zeros.
INLINE float scale_of(uint32_t amax_bits, int64_t power_of_two, float largest = LARGEST) {
    if (amax_bits == 0) return 1.0f;
    float quotient = bits_of<float>(amax_bits) / largest;
    if (quotient < 0x1p-126f) quotient = 0x1p-126f;
    if (!power_of_two) return quotient;
    uint32_t bits = bits_of<uint32_t>(quotient);
    return bits_of<float>((bits & 0x7fffff) ? (bits & 0x7f800000) + 0x800000 : bits);
}

// Clamp to ±448, then round to nearest, ties to even; codes in the low bytes of the lanes.
INLINE u32x16 encode(f32x16 scaled) {
    u32x16 sign = ((u32x16)scaled >> 24) & 0x80;
    u32x16 bits = (u32x16)scaled & 0x7fffffff;
    u32x16 over = (u32x16)(bits > 0x43e00000u);  // 448
    bits = (bits & ~over) | (over & 0x43e00000u);
    u32x16 normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    u32x16 subnormal = (u32x16)((f32x16)bits + 0x1p14f) & 0xff;  // a step of 2^14's last bit is 2^-9
    u32x16 is_small = (u32x16)(bits < 0x3c800000u);               // 2^-6
    return (subnormal & is_small) | (normal & ~is_small) | sign;
}
// The same to ±127 and to whole numbers: below 2^22 the last bit of x + 1.5 * 2^23 is 1.
INLINE u32x16 encode_int8(f32x16 scaled) {
    u32x16 sign = (u32x16)scaled & 0x80000000, bits = (u32x16)scaled & 0x7fffffff;
    u32x16 over = (u32x16)(bits > 0x42fe0000u);  // 127
    bits = (bits & ~over) | (over & 0x42fe0000u);
    return (u32x16)((f32x16)(bits | sign) + 0x1.8p23f) & 0xff;
}
template <Kind Form>
INLINE u32x16 encode_as(f32x16 scaled) { return Form == INT8 ? encode_int8(scaled) : encode(scaled); }
INLINE void put_codes(uint8_t* out, u32x16 codes) { store(out, to_bytes(codes)); }

// x / scale. The inverse of a power of two is exact, and the multiplication rounds as the division does.
template <bool PowerOfTwo>
INLINE f32x16 divide(f32x16 x, f32x16 scale, f32x16 inverse) {
    return PowerOfTwo ? x * inverse : x / scale;
}

// A contiguous matrix as sixteen float32 values from an even place of a row, zeros beyond its end.
template <class T>
struct Plain {
    const T* data;
    int64_t columns;
    INLINE f32x16 read(int64_t row, int64_t column) const {
        const T* p = data + row * columns + column;
        if (columns - column >= 16) return decode(p);
        T line[16];
        std::memset(line, 0, sizeof line);
        std::memcpy(line, p, (columns - column) * sizeof(T));
        return decode(line);
    }
};
// The same of E4M3 codes: code times scale in float32. Columns of a block: one, a multiple of 16, or all.
struct Coded {
    const uint8_t* data;
    int64_t columns;
    const float* scales;
    int64_t block_rows, block_columns;
    INLINE f32x16 scale(int64_t row, int64_t column) const {
        if (block_columns == 1) return Plain<float>{scales, columns}.read(row / block_rows, column);
        int64_t blocks = (columns + block_columns - 1) / block_columns;
        return splat(scales[row / block_rows * blocks + column / block_columns]);
    }
    INLINE f32x16 read(int64_t row, int64_t column) const {
        return Plain<uint8_t>{data, columns}.read(row, column) * scale(row, column);
    }
};

// Codes of a contiguous run under one scale.
template <bool PowerOfTwo, Kind Form = E4M3, class T>
INLINE void encode_run(const T* x, int64_t count, float scale, uint8_t* out) {
    const f32x16 divisor = splat(scale), inverse = splat(1.0f / scale);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        put_codes(out + i, encode_as<Form>(divide<PowerOfTwo>(decode(x + i), divisor, inverse)));
    if (i < count) {
        float rest[16] = {0};
        uint8_t codes[16];
        for (int64_t j = i; j < count; j++) rest[j - i] = decode_scalar(x[j]);
        put_codes(codes, encode_as<Form>(divide<PowerOfTwo>(load<f32x16>(rest), divisor, inverse)));
        for (int64_t j = i; j < count; j++) out[j] = codes[j - i];
    }
}
