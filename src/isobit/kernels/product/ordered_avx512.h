// Decoding with AVX-512 and VBMI: 64 codes to 64 BF16 numbers by two lookups of bytes.
#pragma once

#include "product/ordered.h"

#include <immintrin.h>

namespace {

// The upper and the lower bytes of the BF16 values of E4M3's 128 magnitudes, times a power of two.
struct Table {
    __m512i low[2], high[2];
    void make(float scale) {
        alignas(64) uint8_t bytes[2][128];
        for (int i = 0; i < 128; i += 16) {
            const __m512i magnitude = _mm512_add_epi32(
                _mm512_set1_epi32(i), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
            const __m512 normal = _mm512_castsi512_ps(
                _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23)));
            const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(magnitude), _mm512_set1_ps(0x1p-9f));
            __m512 value = _mm512_mask_mov_ps(normal, _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8)), small);
            const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(value, _mm512_set1_ps(scale)));
            _mm_store_si128((__m128i*)(bytes[0] + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 16)));
            _mm_store_si128((__m128i*)(bytes[1] + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 24)));
        }
        for (int i = 0; i < 2; i++) {
            low[i] = _mm512_load_si512(bytes[0] + 64 * i);
            high[i] = _mm512_load_si512(bytes[1] + 64 * i);
        }
    }
};

// 64 codes as they are packed, to the first and the second pair of k of 16 columns.
INLINE void decode_pairs(__m512i codes, const Table& table, __m512i& first, __m512i& second) {
    const __m512i low = _mm512_permutex2var_epi8(table.low[0], codes, table.low[1]);
    __m512i high = _mm512_permutex2var_epi8(table.high[0], codes, table.high[1]);
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0x78);  // the sign: a ^ (b & c)
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
}
INLINE __m512 even_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
INLINE __m512 odd_of(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}

typedef __m512 Vec;
INLINE Vec vzero() { return _mm512_setzero_ps(); }
INLINE Vec vsplat(float x) { return _mm512_set1_ps(x); }
INLINE Vec vload(const float* p) { return _mm512_loadu_ps(p); }
INLINE void vstore(float* p, Vec v) { _mm512_storeu_ps(p, v); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }

constexpr int TILE_ROWS = 6, TILE_PANELS = 2;

INLINE Vec decode16(const uint8_t* p, int64_t kind) {
    const __m128i codes = _mm_loadu_si128((const __m128i*)p);
    if (kind != E4M3)  // E5M2 codes are the upper bytes of float16 numbers
        return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8));
    const __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);  // off by 2^-8
    return mul(_mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16((short)0xbf80))), vsplat(256.0f));
}
INLINE Vec decode16(const uint16_t* p, int64_t) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
INLINE void split(const uint16_t* p, Vec& even, Vec& odd) {
    const __m512i pairs = _mm512_loadu_si512(p);
    even = even_of(pairs), odd = odd_of(pairs);
}
const Table& unscaled() {
    static const Table table = [] {
        Table t;
        t.make(1.0f);
        return t;
    }();
    return table;
}
INLINE void decode_quad(const uint8_t* p, Vec* v) {
    __m512i first, second;
    decode_pairs(_mm512_loadu_si512(p), unscaled(), first, second);
    v[0] = even_of(first), v[1] = odd_of(first), v[2] = even_of(second), v[3] = odd_of(second);
}

// 32 float32 numbers that are BF16 numbers, without their lower halves.
[[maybe_unused]] INLINE __m512i upper_halves(Vec low, Vec high) {
    const __m256i a = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(low), 16));
    const __m256i b = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(high), 16));
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}
[[maybe_unused]] INLINE __m512i pair_up(Vec even, Vec odd) {
    const __m512i upper = _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32((int)0xffff0000));
    return _mm512_or_si512(upper, _mm512_srli_epi32(_mm512_castps_si512(even), 16));
}

// Two of 16 numbers, one after the other, to pairs.
#define PAIRING                                                                                                      \
    _mm512_setr_epi32(0x00100000, 0x00110001, 0x00120002, 0x00130003, 0x00140004, 0x00150005, 0x00160006, 0x00170007, \
                      0x00180008, 0x00190009, 0x001a000a, 0x001b000b, 0x001c000c, 0x001d000d, 0x001e000e, 0x001f000f)

// 16 times 16 numbers of 32 bits, turned.
[[maybe_unused]] INLINE void store_turned(__m512i (&x)[16], void* out) {
    __m512i y[16], *rows = (__m512i*)out;
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2)
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)  // x[i + j]: rows j, 4 + j, 8 + j, 12 + j of columns i to i + 3
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512i low = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88), high = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
        const __m512i more = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
        const __m512i most = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
        _mm512_storeu_si512(rows + j, _mm512_shuffle_i32x4(low, more, 0x88));
        _mm512_storeu_si512(rows + 8 + j, _mm512_shuffle_i32x4(low, more, 0xdd));
        _mm512_storeu_si512(rows + 4 + j, _mm512_shuffle_i32x4(high, most, 0x88));
        _mm512_storeu_si512(rows + 12 + j, _mm512_shuffle_i32x4(high, most, 0xdd));
    }
}

// Where a tile reads B: BF16 pairs, or codes that a table decodes with their scale.
struct Bf16Source {
    static constexpr int64_t bytes = 2;
    INLINE void begin(const Product&, int64_t, int64_t) {}
    INLINE void load(const uint8_t* p, __m512i& first, __m512i& second) const {
        first = _mm512_loadu_si512(p), second = _mm512_loadu_si512(p + 64);
    }
    INLINE Vec value(Vec v) const { return v; }
};
template <bool FOLDED>
struct CodeSource {
    static constexpr int64_t bytes = 1;
    Table table;
    float made = 0.0f;
    INLINE void begin(const Product& g, int64_t panel, int64_t k) {
        float scale = 1.0f;
        if (FOLDED) g.scale_b.fill(panel * PANEL, 1, g.n, k, &scale);
        if (scale != made) table.make(scale), made = scale;
    }
    INLINE void load(const uint8_t* p, __m512i& first, __m512i& second) const {
        decode_pairs(_mm512_loadu_si512(p), table, first, second);
    }
    INLINE Vec value(Vec v) const { return v; }  // the table has the scale
};

}  // namespace
