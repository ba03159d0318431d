// Sixteen floats, or eight doubles, as one value: the width that every sum is defined by, whatever the registers.
//
// Vectors are GCC/clang vector extensions of 64 bytes, so that the order of every sum is the same on AVX-512, AVX2 and
// NEON; intrinsics appear only where a conversion has no portable spelling. With AVX2 a vector is a pair of registers,
// written out here: GCC keeps vectors that no register holds in memory, and moves them through it at every operator.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__) && !defined(ISOBIT_PORTABLE)
#include <immintrin.h>
#define ISOBIT_X86 1
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define ISOBIT_AVX512 1
#elif defined(__FMA__) && defined(__F16C__)
#define ISOBIT_PAIRS 1
#endif
#endif

#define INLINE inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi"

typedef float f32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

template <class To, class From>
INLINE To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

#ifdef ISOBIT_PAIRS

typedef double f64x4 __attribute__((vector_size(32)));
typedef int64_t i64x4 __attribute__((vector_size(32)));
typedef uint64_t u64x4 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));

// Two registers of elements T, with the operators of a vector.
template <class T, class H>
struct Pair {
    H low, high;
    static constexpr int half = sizeof(H) / sizeof(T);
    INLINE T operator[](int64_t i) const { return i < half ? low[i] : high[i - half]; }
    INLINE T& operator[](int64_t i) { return reinterpret_cast<T*>(this)[i]; }
    template <class T2, class H2>
    INLINE explicit operator Pair<T2, H2>() const { return {(H2)low, (H2)high}; }
    INLINE Pair operator~() const { return {~low, ~high}; }
    INLINE Pair operator-() const { return {-low, -high}; }
    template <class B> INLINE Pair& operator+=(B b) { return *this = *this + b; }
    template <class B> INLINE Pair& operator|=(B b) { return *this = *this | b; }
};
template <class V> constexpr bool is_pair = false;
template <class T, class H> constexpr bool is_pair<Pair<T, H>> = true;
typedef Pair<double, f64x4> f64x8;
typedef Pair<int64_t, i64x4> i64x8;
typedef Pair<uint64_t, u64x4> u64x8;
typedef Pair<float, f32x8> f32x16;
typedef Pair<int32_t, i32x8> i32x16;
typedef Pair<uint32_t, u32x8> u32x16;

#define ISOBIT_OPERATOR(OP)                                                                                         \
    template <class T, class H>                                                                                     \
    INLINE Pair<T, H> operator OP(Pair<T, H> a, Pair<T, H> b) { return {a.low OP b.low, a.high OP b.high}; }         \
    template <class T, class H, class S, class = std::enable_if_t<std::is_arithmetic<S>::value>>                     \
    INLINE Pair<T, H> operator OP(Pair<T, H> a, S b) { return {a.low OP T(b), a.high OP T(b)}; }                     \
    template <class T, class H, class S, class = std::enable_if_t<std::is_arithmetic<S>::value>>                     \
    INLINE Pair<T, H> operator OP(S a, Pair<T, H> b) { return {T(a) OP b.low, T(a) OP b.high}; }
ISOBIT_OPERATOR(+) ISOBIT_OPERATOR(-) ISOBIT_OPERATOR(*) ISOBIT_OPERATOR(/)
ISOBIT_OPERATOR(&) ISOBIT_OPERATOR(|) ISOBIT_OPERATOR(^) ISOBIT_OPERATOR(<<) ISOBIT_OPERATOR(>>)
#undef ISOBIT_OPERATOR

// Masks: -1 where it holds.
INLINE i32x16 mask(i32x8 low, i32x8 high) { return {low, high}; }
INLINE i64x8 mask(i64x4 low, i64x4 high) { return {low, high}; }
#define ISOBIT_COMPARISON(OP)                                                                                       \
    template <class T, class H>                                                                                     \
    INLINE auto operator OP(Pair<T, H> a, Pair<T, H> b) { return mask(a.low OP b.low, a.high OP b.high); }           \
    template <class T, class H, class S, class = std::enable_if_t<std::is_arithmetic<S>::value>>                     \
    INLINE auto operator OP(Pair<T, H> a, S b) { return mask(a.low OP T(b), a.high OP T(b)); }
ISOBIT_COMPARISON(<) ISOBIT_COMPARISON(>) ISOBIT_COMPARISON(>=) ISOBIT_COMPARISON(==) ISOBIT_COMPARISON(!=)
#undef ISOBIT_COMPARISON

template <class V, class T>
INLINE V load(const T* p) {
    V v;
    if constexpr (is_pair<V>) {
        std::memcpy(&v.low, p, sizeof v.low);
        std::memcpy(&v.high, (const char*)p + sizeof v.low, sizeof v.high);
    } else {
        std::memcpy(&v, p, sizeof v);
    }
    return v;
}
template <class V, class T>
INLINE void store(T* p, V v) {
    if constexpr (is_pair<V>) {
        std::memcpy(p, &v.low, sizeof v.low);
        std::memcpy((char*)p + sizeof v.low, &v.high, sizeof v.high);
    } else {
        std::memcpy(p, &v, sizeof v);
    }
}
INLINE f64x8 splat(double x) { return {f64x4{x, x, x, x}, f64x4{x, x, x, x}}; }
INLINE f32x16 splat(float x) { return {f32x8{x, x, x, x, x, x, x, x}, f32x8{x, x, x, x, x, x, x, x}}; }
INLINE u64x8 ascending() { return {u64x4{0, 1, 2, 3}, u64x4{4, 5, 6, 7}}; }

INLINE f32x8 low_half(f32x16 v) { return v.low; }
INLINE f32x8 high_half(f32x16 v) { return v.high; }
INLINE f32x16 join(f32x8 low, f32x8 high) { return {low, high}; }

// Of the first half of the result lanes of a, of the second those of b: at these places of the whole vector.
#define FROM_BOTH(a, b, ...)                                         \
    decltype(a) { __builtin_shufflevector((a).low, (a).high, __VA_ARGS__), \
                  __builtin_shufflevector((b).low, (b).high, __VA_ARGS__) }

#else

typedef double f64x8 __attribute__((vector_size(64)));
typedef int64_t i64x8 __attribute__((vector_size(64)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

template <class V, class T>
INLINE V load(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V, class T>
INLINE void store(T* p, V v) {
    std::memcpy(p, &v, sizeof v);
}
INLINE f64x8 splat(double x) { return f64x8{x, x, x, x, x, x, x, x}; }
INLINE f32x16 splat(float x) { return f32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE u64x8 ascending() { return u64x8{0, 1, 2, 3, 4, 5, 6, 7}; }

INLINE f32x8 low_half(f32x16 v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE f32x8 high_half(f32x16 v) { return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE f32x16 join(f32x8 low, f32x8 high) {
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

#endif

// The larger of each two numbers; b where one of them is NaN.
INLINE f32x16 larger_of(f32x16 a, f32x16 b) {
#if defined(ISOBIT_AVX512)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(ISOBIT_PAIRS)
    return {(f32x8)_mm256_max_ps((__m256)a.low, (__m256)b.low), (f32x8)_mm256_max_ps((__m256)a.high, (__m256)b.high)};
#else
    i32x16 greater = a > b;
    return (f32x16)(((i32x16)a & greater) | ((i32x16)b & ~greater));
#endif
}
INLINE f64x8 larger_of(f64x8 a, f64x8 b) {
#if defined(ISOBIT_AVX512)
    return (f64x8)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(ISOBIT_PAIRS)
    return {(f64x4)_mm256_max_pd((__m256d)a.low, (__m256d)b.low), (f64x4)_mm256_max_pd((__m256d)a.high, (__m256d)b.high)};
#else
    i64x8 greater = a > b;
    return (f64x8)(((i64x8)a & greater) | ((i64x8)b & ~greater));
#endif
}

// a * b + c. Of float numbers always in one rounding: where no instruction does it, in double, in which the product is
// exact; the sum is rounded to odd there, so that the rounding to float is the only one that counts.
INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    double product = double(a) * double(b), sum = product + double(c);
    double part = sum - product, error = (product - (sum - part)) + (double(c) - part);
    uint64_t bits = bits_of<uint64_t>(sum);
    if (error != 0 && !(bits & 1) && error - error == 0) bits += (error > 0) == (sum > 0) ? 1 : -1;
    return float(bits_of<double>(bits));
#endif
}
INLINE f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
#if defined(ISOBIT_AVX512)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(ISOBIT_PAIRS)
    return {(f32x8)_mm256_fmadd_ps((__m256)a.low, (__m256)b.low, (__m256)c.low),
            (f32x8)_mm256_fmadd_ps((__m256)a.high, (__m256)b.high, (__m256)c.high)};
#else
    f32x16 out;
    for (int i = 0; i < 16; i++) out[i] = multiply_add(a[i], b[i], c[i]);
    return out;
#endif
}
// Of double numbers in one rounding where the machine has the instruction.
INLINE f64x8 multiply_add(f64x8 a, f64x8 b, f64x8 c) {
#if defined(ISOBIT_AVX512)
    return (f64x8)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(ISOBIT_PAIRS)
    return {(f64x4)_mm256_fmadd_pd((__m256d)a.low, (__m256d)b.low, (__m256d)c.low),
            (f64x4)_mm256_fmadd_pd((__m256d)a.high, (__m256d)b.high, (__m256d)c.high)};
#else
    return a * b + c;
#endif
}

// Conversions of lanes, and of masks to half their width. GCC 12 splits the portable spelling into halves, at two to six
// times the instructions.
#if defined(ISOBIT_AVX512)
INLINE f64x8 widen(f32x8 v) { return (f64x8)_mm512_cvtps_pd((__m256)v); }
INLINE f32x8 narrow(f64x8 v) { return (f32x8)_mm512_cvtpd_ps((__m512d)v); }
INLINE f64x8 to_double(u32x8 v) { return (f64x8)_mm512_cvtepu32_pd((__m256i)v); }
INLINE u32x16 widen(u16x16 v) { return (u32x16)_mm512_cvtepu16_epi32((__m256i)v); }
INLINE u16x16 narrow(u32x16 v) { return (u16x16)_mm512_cvtepi32_epi16((__m512i)v); }
INLINE u8x16 to_bytes(u32x16 v) { return (u8x16)_mm512_cvtepi32_epi8((__m512i)v); }
INLINE u32x8 narrow(u64x8 v) { return __builtin_convertvector(v, u32x8); }
#elif defined(ISOBIT_PAIRS)
INLINE f64x8 widen(f32x8 v) {
    return {(f64x4)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)),
            (f64x4)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1))};
}
INLINE f32x8 narrow(f64x8 v) {
    return (f32x8)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)v.high), _mm256_cvtpd_ps((__m256d)v.low));
}
INLINE u32x8 narrow(u64x8 v) {  // the low halves of each number
    return (u32x8)__builtin_shufflevector((u32x8)v.low, (u32x8)v.high, 0, 2, 4, 6, 8, 10, 12, 14);
}
INLINE f64x8 to_double(u32x8 v) {  // below 2^32: the last bits of 2^52 + v
    const u64x4 low = (u64x4)_mm256_cvtepu32_epi64(_mm256_castsi256_si128((__m256i)v));
    const u64x4 high = (u64x4)_mm256_cvtepu32_epi64(_mm256_extracti128_si256((__m256i)v, 1));
    const uint64_t magic = 0x4330000000000000ull;
    return {(f64x4)(low | magic) - 0x1p52, (f64x4)(high | magic) - 0x1p52};
}
INLINE u32x16 widen(u16x16 v) {
    return {(u32x8)_mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)v)),
            (u32x8)_mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)v, 1))};
}
INLINE u16x16 narrow(u32x16 v) {
    v = v & 0xffff;
    return (u16x16)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)v.low, (__m256i)v.high), 0xd8);
}
INLINE u8x16 to_bytes(u32x16 v) {
    const __m256i words = (__m256i)narrow(v & 0xff);
    return (u8x16)_mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
#else
INLINE f64x8 widen(f32x8 v) { return __builtin_convertvector(v, f64x8); }
INLINE f32x8 narrow(f64x8 v) { return __builtin_convertvector(v, f32x8); }
INLINE f64x8 to_double(u32x8 v) { return __builtin_convertvector(v, f64x8); }
INLINE u32x16 widen(u16x16 v) { return __builtin_convertvector(v, u32x16); }
INLINE u16x16 narrow(u32x16 v) { return __builtin_convertvector(v, u16x16); }
INLINE u8x16 to_bytes(u32x16 v) { return __builtin_convertvector(v, u8x16); }
INLINE u32x8 narrow(u64x8 v) { return __builtin_convertvector(v, u32x8); }
#endif

// One fixed tree: the order of a sum over lanes.
INLINE double lane_sum(f64x8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
INLINE float lane_sum(f32x16 v) {
    f32x8 h = low_half(v) + high_half(v);
    return ((h[0] + h[4]) + (h[2] + h[6])) + ((h[1] + h[5]) + (h[3] + h[7]));
}
