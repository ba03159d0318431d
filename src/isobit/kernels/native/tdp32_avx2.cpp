// `tdp32-v1` with AVX2, FMA and F16C: a vector of 16 is two registers.
#include "tdp32.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace {

struct Vec {
    __m256 low, high;
};
INLINE Vec vzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE Vec vsplat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Vec vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void vstore(float* p, Vec v) { _mm256_storeu_ps(p, v.low), _mm256_storeu_ps(p + 8, v.high); }
INLINE Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }

constexpr int TILE_ROWS = 2;

// E4M3 codes in words as float16, off by 2^-8; E5M2 codes are the upper bytes of float16 numbers.
INLINE __m256i halves(__m128i codes) {
    return _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16((short)0xbf80));
}
INLINE Vec widen16(__m256i half) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}
INLINE Vec decode16(const uint8_t* p, int64_t kind) {
    __m128i codes = _mm_loadu_si128((const __m128i*)p);
    if (kind == E4M3) return mul(widen16(halves(codes)), vsplat(256.0f));
    return widen16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8));
}
INLINE Vec decode16(const uint16_t* p, int64_t) {
    __m256i x = _mm256_loadu_si256((const __m256i*)p);
    __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(x));
    __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
INLINE void split(const uint16_t* p, Vec& even, Vec& odd) {
    __m256i low = _mm256_loadu_si256((const __m256i*)p), high = _mm256_loadu_si256((const __m256i*)(p + 16));
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(low, upper)), _mm256_castsi256_ps(_mm256_and_si256(high, upper))};
}
// Of two vectors of pairs for 4 columns each, the first or the second of every pair: 8 columns in order.
template <int WHICH>
INLINE __m256 unzip(__m256 a, __m256 b) {
    __m256d mixed = _mm256_castps_pd(_mm256_shuffle_ps(a, b, WHICH ? 0xdd : 0x88));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(mixed, 0xd8));
}
INLINE void decode_quad(const uint8_t* p, Vec* v) {
    Vec run[4];  // of 4 columns: low the first pair of k, high the second
    for (int i = 0; i < 4; i++) run[i] = mul(widen16(halves(_mm_loadu_si128((const __m128i*)p + i))), vsplat(256.0f));
    v[0] = {unzip<0>(run[0].low, run[1].low), unzip<0>(run[2].low, run[3].low)};
    v[1] = {unzip<1>(run[0].low, run[1].low), unzip<1>(run[2].low, run[3].low)};
    v[2] = {unzip<0>(run[0].high, run[1].high), unzip<0>(run[2].high, run[3].high)};
    v[3] = {unzip<1>(run[0].high, run[1].high), unzip<1>(run[2].high, run[3].high)};
}

}  // namespace

#include "tdp32_kernel.h"

namespace {
bool in_registers(const Product&, int64_t, int64_t, int64_t, int64_t, const float*, int64_t) { return false; }
}  // namespace

const Tdp32Part tdp32_avx2 = tdp_part;
#else
const Tdp32Part tdp32_avx2 = nullptr;
#endif
