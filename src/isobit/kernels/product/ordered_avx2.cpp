// Both orders with AVX2, FMA and F16C: a vector of 16 is two registers. B is decoded in registers for one or two rows.
#include "product/ordered.h"

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

constexpr int TILE_ROWS = 6, TILE_PANELS = 1;

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
struct Pairs {
    __m256i low, high;
};
INLINE __m256 evens(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
INLINE __m256 odds(__m256i x) {
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
}
INLINE Vec even_of(Pairs x) { return {evens(x.low), evens(x.high)}; }
INLINE Vec odd_of(Pairs x) { return {odds(x.low), odds(x.high)}; }
INLINE void split(const uint16_t* p, Vec& even, Vec& odd) {
    const Pairs pairs = {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))};
    even = even_of(pairs), odd = odd_of(pairs);
}
INLINE __m256i eight(char a, char b, char c, char d, char e, char f, char g, char h) {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(a, b, c, d, e, f, g, h, 0, 0, 0, 0, 0, 0, 0, 0));
}
// 32 codes as they are packed, to the first and the second pair of k of 8 columns in BF16. A normal number's bits are its
// code's, moved; the 8 others are looked up.
INLINE void decode_pairs(const uint8_t* p, __m256i& first, __m256i& second) {
    const __m256i codes = _mm256_loadu_si256((const __m256i*)p);
    const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
    const __m256i small = _mm256_cmpgt_epi8(_mm256_set1_epi8(8), magnitude);
    __m256i low = _mm256_and_si256(_mm256_slli_epi16(codes, 4), _mm256_set1_epi8((char)0xf0));
    __m256i high = _mm256_and_si256(_mm256_srli_epi16(magnitude, 4), _mm256_set1_epi8(0x0f));
    high = _mm256_add_epi8(high, _mm256_set1_epi8(0x3c));  // the exponent's bias: (127 - 7) << 7
    const __m256i upper = eight(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c);  // of 0 to 7 times 2^-9
    const __m256i lower = eight(0, 0, (char)0x80, (char)0xc0, 0, 0x20, 0x40, 0x60);
    low = _mm256_blendv_epi8(low, _mm256_shuffle_epi8(lower, magnitude), small);
    high = _mm256_blendv_epi8(high, _mm256_shuffle_epi8(upper, magnitude), small);
    high = _mm256_or_si256(high, _mm256_and_si256(codes, _mm256_set1_epi8((char)0x80)));
    first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
}
INLINE void decode_quad(const uint8_t* p, Vec* v) {
    Pairs first, second;
    decode_pairs(p, first.low, second.low), decode_pairs(p + 32, first.high, second.high);
    v[0] = even_of(first), v[1] = odd_of(first), v[2] = even_of(second), v[3] = odd_of(second);
}

// More rows share what is decoded for them once, in memory.
constexpr int64_t FEW = 2, MOST = 2, PANELS_OF_ONE = 1, PANELS_OF_TWO = 1;

struct Bf16Source {
    static constexpr int64_t bytes = 2;
    INLINE void begin(const Product&, int64_t, int64_t) {}
    INLINE void load(const uint8_t* p, Pairs& first, Pairs& second) const {
        const __m256i* q = (const __m256i*)p;
        first = {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
        second = {_mm256_loadu_si256(q + 2), _mm256_loadu_si256(q + 3)};
    }
    INLINE Vec value(Vec v) const { return v; }
};
template <bool FOLDED>
struct CodeSource {
    static constexpr int64_t bytes = 1;
    Vec factor;
    INLINE void begin(const Product& g, int64_t panel, int64_t k) {
        float scale = 1.0f;
        if (FOLDED) g.scale_b.fill(panel * PANEL, 1, g.n, k, &scale);
        factor = vsplat(scale);
    }
    INLINE void load(const uint8_t* p, Pairs& first, Pairs& second) const {
        decode_pairs(p, first.low, second.low), decode_pairs(p + 32, first.high, second.high);
    }
    INLINE Vec value(Vec v) const { return FOLDED ? mul(v, factor) : v; }
};

}  // namespace

#include "product/ordered_registers.h"

const OrderedPart ordered_avx2 = ordered_part;
#else
const OrderedPart ordered_avx2 = nullptr;
#endif
