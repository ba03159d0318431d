// Number formats, roundings and elementary functions that the native operators share, on vectors of `vectors.h`.
//
// Everything is compiled with -ffp-contract=off: a multiplication followed by an addition rounds twice unless it is
// written as `multiply_add`.
#pragma once

#include "native/threads.h"
#include "native/vectors.h"

#include <cstdlib>

#define EXPORT extern "C" __attribute__((visibility("default")))

enum Kind : int64_t { E4M3 = 0, BF16 = 1, FP32 = 2, E5M2 = 3, INT8 = 4, E2M1 = 5 };

// ---- decoding ----

// E4M3 code to float: the code is the top byte of a float16 but for the sign, off by a factor 2^8. NaN codes do not occur.
INLINE float decode_scalar(uint8_t code) {
    uint32_t magnitude = code & 0x7f;
    float value = magnitude < 8 ? float(magnitude) * 0x1p-9f : bits_of<float>((magnitude << 20) + (120u << 23));
    return code & 0x80 ? -value : value;
}
INLINE float decode_scalar(int8_t code) { return float(code); }
INLINE float decode_scalar(uint16_t code) { return bits_of<float>(uint32_t(code) << 16); }
INLINE float decode_scalar(float value) { return value; }

// Codes times 2^-8, which F16C gives at once.
INLINE f32x16 decode_off(const uint8_t* p) {
#if defined(ISOBIT_AVX512)
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    return (f32x16)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80)));
#elif defined(ISOBIT_PAIRS)
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    wide = _mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80));
    return {(f32x8)_mm256_cvtph_ps(_mm256_castsi256_si128(wide)),
            (f32x8)_mm256_cvtph_ps(_mm256_extracti128_si256(wide, 1))};
#else
    u32x16 code = __builtin_convertvector(load<u8x16>(p), u32x16), magnitude = code & 0x7f;
    f32x16 normal = (f32x16)((magnitude << 20) + (112u << 23));
    f32x16 small = __builtin_convertvector((i32x16)magnitude, f32x16) * 0x1p-17f;
    i32x16 is_small = (i32x16)(magnitude < 8);
    u32x16 value = ((u32x16)small & (u32x16)is_small) | ((u32x16)normal & ~(u32x16)is_small);
    return (f32x16)(value | ((code & 0x80) << 24));
#endif
}
INLINE f32x16 decode(const uint8_t* p) { return decode_off(p) * 256.0f; }
INLINE f32x16 decode(const uint16_t* p) {
    return (f32x16)(widen(load<u16x16>(p)) << 16);
}
INLINE f32x16 decode(const float* p) { return load<f32x16>(p); }
INLINE f32x16 decode(const int8_t* p) {
#if defined(ISOBIT_AVX512)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(ISOBIT_PAIRS)
    const __m128i codes = _mm_loadu_si128((const __m128i*)p);
    return {(f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
            (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
#else
    return __builtin_convertvector(__builtin_convertvector(load<i8x16>(p), i32x16), f32x16);
#endif
}
INLINE f32x16 decode_off(const int8_t* p) { return decode(p); }

// The E4M3 codes of E2M1's, which are in the low four bits: sign, two bits of exponent, one of mantissa; 0.5 is the only
// subnormal number.
INLINE u8x16 e4m3_of_e2m1(u8x16 code) {
    u8x16 magnitude = code & 7, small = (u8x16)(magnitude < 2);
    return ((((magnitude << 2) + 0x30) & ~small) | ((magnitude * 0x30) & small)) | ((code & 8) << 4);
}

// What `decode_off` leaves for the scale: E4M3 codes are off by 2^8, INT8's are as they should be.
template <class T> constexpr float OFF = 1.0f;
template <> constexpr float OFF<uint8_t> = 256.0f;

// Sixteen stored values as vectors of the arithmetic. In float64, codes times their row's scale, rounded to float32;
// the 2^8 that an E4M3 code is off by goes into the scale: both factors stay exact, so the one rounding is the same. In
// float32 what `decode_off` gives, without the scale.
template <class T>
INLINE void decode_sixteen(const T* p, float scale, f64x8* out) {
    f32x16 value;
    if constexpr (sizeof(T) > 1) value = decode(p);
    else value = decode_off(p) * splat(scale * OFF<T>);
    out[0] = widen(low_half(value)), out[1] = widen(high_half(value));
}
INLINE void decode_sixteen(const double* p, float, f64x8* out) { out[0] = load<f64x8>(p), out[1] = load<f64x8>(p + 8); }
template <class T>
INLINE void decode_sixteen(const T* p, float, f32x16* out) {
    if constexpr (sizeof(T) > 1) out[0] = decode(p);
    else out[0] = decode_off(p);
}

INLINE void put(double* p, f32x16 v) {
    store(p, widen(low_half(v)));
    store(p + 8, widen(high_half(v)));
}
INLINE void put(float* p, f32x16 v) { store(p, v); }

// `count` elements, contiguous, to double or float.
template <class R, class T>
INLINE void decode_row(const T* p, int64_t count, R* out) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) put(out + i, decode(p + i));
    for (; i < count; i++) out[i] = decode_scalar(p[i]);
}

// ---- rounding ----

INLINE uint16_t to_bf16(float x) {
    uint32_t bits = bits_of<uint32_t>(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE u16x16 to_bf16(f32x16 x) {
    u32x16 bits = (u32x16)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 nan = (u32x16)((bits & 0x7fffffff) > 0x7f800000);
    return narrow((rounded & ~nan) | (nan & 0x7fc0));
}
INLINE f32x16 as_bf16(f32x16 x) { return (f32x16)(widen(to_bf16(x)) << 16); }
// One rounding from float64: through float32 rounded to odd, after which the second rounding is what one would have been.
INLINE f32x8 round_to_odd(f64x8 x) {
    f32x8 single = narrow(x);
    f64x8 back = widen(single);
    u64x8 magnitude_back = (u64x8)back & ~(1ull << 63), magnitude = (u64x8)x & ~(1ull << 63);
    u32x8 bits = bits_of<u32x8>(single);
    u32x8 above = narrow((u64x8)(magnitude_back > magnitude));
    u32x8 inexact = narrow((u64x8)(magnitude_back != magnitude));
    u32x8 finite = (u32x8)((bits & 0x7f800000) != 0x7f800000);
    u32x8 odd = (bits + above) | (inexact & 1);  // above is -1 where the cast went away from zero
    return bits_of<f32x8>((odd & finite) | (bits & ~finite));
}
INLINE void round_once(f64x8 low, f64x8 high, uint16_t* out) {
    store(out, to_bf16(join(round_to_odd(low), round_to_odd(high))));
}
INLINE void round_once(f64x8 low, f64x8 high, float* out) { store(out, join(narrow(low), narrow(high))); }
INLINE void round_once(f32x16 x, uint16_t* out) { store(out, to_bf16(x)); }
INLINE void round_once(f32x16 x, float* out) { store(out, x); }

// `count` values of a row, from double or float to the result's type.
template <class T>
INLINE void round_row(const double* x, int64_t count, T* out) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) round_once(load<f64x8>(x + i), load<f64x8>(x + i + 8), out + i);
    if (i < count) {
        double rest[16] = {0};
        T rounded[16];
        for (int64_t j = i; j < count; j++) rest[j - i] = x[j];
        round_once(load<f64x8>(rest), load<f64x8>(rest + 8), rounded);
        for (int64_t j = i; j < count; j++) out[j] = rounded[j - i];
    }
}
template <class T>
INLINE void round_row(const float* x, int64_t count, T* out) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) round_once(load<f32x16>(x + i), out + i);
    if (i < count) {
        float rest[16] = {0};
        T rounded[16];
        for (int64_t j = i; j < count; j++) rest[j - i] = x[j];
        round_once(load<f32x16>(rest), rounded);
        for (int64_t j = i; j < count; j++) out[j] = rounded[j - i];
    }
}

// ---- exp ----

// e^x: x = n ln 2 + r, Taylor to r^13 (remainder below 2^-57 for |r| <= ln 2 / 2). 0 below -708; error about 1 ulp.
INLINE f64x8 exponential(f64x8 x) {
    const double magic = 0x1.8p52;
    i64x8 tiny = x < -708.0, huge = x > 709.0;
    x = (f64x8)(((i64x8)splat(709.0) & huge) | ((i64x8)x & ~huge));
    f64x8 shifted = x * 1.4426950408889634 + magic;
    f64x8 n = shifted - magic;
    f64x8 r = multiply_add(n, splat(-6.93147180369123816490e-01), x);
    r = multiply_add(n, splat(-1.90821492927058770002e-10), r);
    f64x8 p = splat(1.0 / 6227020800.0);
    const double terms[] = {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
                            1.0 / 5040.0,      1.0 / 720.0,      1.0 / 120.0,     1.0 / 24.0,     1.0 / 6.0,
                            0.5,               1.0,              1.0};
#pragma GCC unroll 13
    for (int i = 0; i < 13; i++) p = multiply_add(p, r, splat(terms[i]));
    i64x8 exponent = ((i64x8)shifted - (i64x8)splat(magic) + 1023) << 52;
    return (f64x8)((i64x8)(p * (f64x8)exponent) & ~tiny);
}
// The same in float32: Taylor to r^7 (remainder below 2^-27); 0 below -87. Its relative error is below 2^-22.
INLINE f32x16 exponential(f32x16 x) {
    const float magic = 0x1.8p23f;
    i32x16 tiny = x < -87.0f, huge = x > 88.0f;
    x = (f32x16)(((i32x16)splat(88.0f) & huge) | ((i32x16)x & ~huge));
    f32x16 shifted = x * 1.44269504f + magic;
    f32x16 n = shifted - magic;
    f32x16 r = multiply_add(n, splat(-0.693359375f), x);
    r = multiply_add(n, splat(2.12194440e-4f), r);
    f32x16 p = splat(1.0f / 5040.0f);
    const float terms[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
#pragma GCC unroll 7
    for (int i = 0; i < 7; i++) p = multiply_add(p, r, splat(terms[i]));
    i32x16 exponent = ((i32x16)shifted - (i32x16)splat(magic) + 127) << 23;
    return (f32x16)((i32x16)(p * (f32x16)exponent) & ~tiny);
}

// ln x of a positive number, in plain float64 operations, so that no library's version matters: x = m 2^e with m between
// 1/sqrt 2 and sqrt 2, s = (m - 1) / (m + 1), and 2 (s + s^3 / 3 + ... + s^21 / 21), whose remainder is below 2^-56.
INLINE double logarithm(double x) {
    if (!(x > 0 && x < INFINITY)) return x;
    uint64_t bits = bits_of<uint64_t>(x);
    int64_t exponent = int64_t(bits >> 52) - 1022;
    double m = bits_of<double>((bits & ((1ull << 52) - 1)) | (1022ull << 52));
    if (m < 0.70710678118654752) m = m + m, exponent--;
    double s = (m - 1.0) / (m + 1.0), square = s * s, sum = 1.0 / 21.0;
    const double terms[] = {1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0,
                            1.0 / 9.0,  1.0 / 7.0,  1.0 / 5.0,  1.0 / 3.0,  1.0};
    for (double term : terms) sum = sum * square + term;
    return double(exponent) * 0.69314718055994531 + (s + s) * sum;
}

// ---- scratch and threads ----

namespace {  // files are compiled for different instruction sets: each has its own copy

// Memory of one thread, kept between calls.
struct Scratch {
    double* data = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(data); }
    double* get(size_t doubles) {
        if (doubles > size) {
            std::free(data);
            size = doubles + doubles / 4;
            void* memory = nullptr;
            if (posix_memalign(&memory, 64, size * sizeof(double)) != 0) std::abort();
            data = static_cast<double*>(memory);
        }
        return data;
    }
};

}  // namespace

INLINE int64_t padded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Threads for `work` elementary steps (about a nanosecond each): a parallel region must be worth its start.
INLINE int useful_threads(int64_t threads, int64_t work) { return work < 12000 ? 1 : int(threads); }
