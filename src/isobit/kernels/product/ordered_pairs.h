// A panel of codes or nibbles as pairs of BF16 numbers, with AVX-512.
#pragma once

#include "product/ordered_avx512.h"
#include "product/ordered_kernel.h"

namespace {

// Rounded to BF16 as they are paired.
INLINE __m512i rounded_pairs(Vec even, Vec odd) {
#ifdef __AVX512BF16__
    return _mm512_permutexvar_epi16(PAIRING, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
#else
    const __m512i half = _mm512_set1_epi32(0x7fff), one = _mm512_set1_epi32(1);
    __m512i a = _mm512_castps_si512(even), b = _mm512_castps_si512(odd);
    a = _mm512_add_epi32(a, _mm512_add_epi32(half, _mm512_and_si512(_mm512_srli_epi32(a, 16), one)));
    b = _mm512_add_epi32(b, _mm512_add_epi32(half, _mm512_and_si512(_mm512_srli_epi32(b, 16), one)));
    return pair_up(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b));
#endif
}

// A code of two to a byte times its scale, rounded to BF16, is the scale or 1.5 times the scale, rounded, with another
// exponent and a sign: an addition of integers, unless it is zero, and as long as none is subnormal or infinite.
enum Multiple { ONCE = 1, MORE = 2 };

// What a code adds to the multiple of the scale that its two lowest bits name, less that name; of a zero all that it is.
// Twice, since the fifth bit of an index is another code's.
alignas(64) constexpr uint16_t TERMS[32] = {
#define ISOBIT_TERMS(SIGN) \
    SIGN, uint16_t(SIGN - 0x80) + ONCE, SIGN + ONCE, SIGN + MORE, SIGN + 0x80 + ONCE, SIGN + 0x80 + MORE, \
    SIGN + 0x100 + ONCE, SIGN + 0x100 + MORE
    ISOBIT_TERMS(0), ISOBIT_TERMS(0x8000), ISOBIT_TERMS(0), ISOBIT_TERMS(0x8000)
#undef ISOBIT_TERMS
};

// The multiples of all scales under a tensor's one number, less their names, as lower and upper bytes.
class Multiples {
    __m512i once[2][2], more[2][2];  // of bytes: [lower, upper][64 of the codes]
    float common = 0.0f;

    static void bytes_of(float number, float factor, int name, __m512i (&out)[2][2]) {
        alignas(64) uint8_t bytes[2][128], codes[16];
        for (int i = 0; i < 128; i += 16) {
            for (int j = 0; j < 16; j++) codes[j] = uint8_t(i + j);
            Vec value = mul(decode16(codes, E4M3), vsplat(number));
            if (i == 0) value = _mm512_mask_mov_ps(value, 1, vsplat(1.0f));
            value = mul(value, vsplat(factor));
            const __m512i bits = _mm512_sub_epi16(rounded_pairs(value, value), _mm512_set1_epi16(short(name)));
            _mm_store_si128((__m128i*)(bytes[0] + i), _mm512_cvtepi32_epi8(bits));
            _mm_store_si128((__m128i*)(bytes[1] + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 8)));
        }
        for (int i = 0; i < 4; i++) out[i / 2][i % 2] = _mm512_load_si512(bytes[i / 2] + 64 * (i % 2));
    }
    static INLINE __m512i looked_up(const __m512i (&table)[2], __m512i codes) {
        return _mm512_permutex2var_epi8(table[0], codes, table[1]);
    }

  public:
    bool holds = false;

    void of(float number) {
        if (number == common) return;
        common = number, holds = number >= 0x1p-116f && number <= 0x1p115f;
        bytes_of(number, 1.0f, ONCE, once), bytes_of(number, 1.5f, MORE, more);
    }
    // Of four scales of each of 16 rows, [row][4], as pairs of the same number.
    INLINE void of_scales(__m512i codes, __m512i (&first)[4], __m512i (&second)[4]) const {
        const __m512i lower[2] = {looked_up(once[0], codes), looked_up(more[0], codes)};
        const __m512i upper[2] = {looked_up(once[1], codes), looked_up(more[1], codes)};
        __m512i at = _mm512_set_epi32(0x7c3c7c3c, 0x78387838, 0x74347434, 0x70307030, 0x6c2c6c2c, 0x68286828, 0x64246424,
                                      0x60206020, 0x5c1c5c1c, 0x58185818, 0x54145414, 0x50105010, 0x4c0c4c0c, 0x48084808,
                                      0x44044404, 0x40004000);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++, at = _mm512_add_epi8(at, _mm512_set1_epi8(1))) {
            first[i] = _mm512_permutex2var_epi8(lower[0], at, upper[0]);
            second[i] = _mm512_permutex2var_epi8(lower[1], at, upper[1]);
        }
    }
};

// Of a tensor's number; a thread keeps those of the last one.
INLINE const Multiples& multiples_of(float number) {
    static thread_local Multiples multiples;
    multiples.of(number);
    return multiples;
}

// Eight codes of 16 rows as four vectors of pairs, by the multiples of their rows' scales: put(pair + i, vector).
template <class Put>
INLINE void pairs_of_eight(__m512i eight, __m512i once, __m512i more, int64_t pair, const Put& put) {
    const __m512i terms = _mm512_load_si512(TERMS);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i from = _mm512_set1_epi64(0x2424202004040000 + i * 0x0808080808080808);
        const __m512i term = _mm512_permutexvar_epi16(_mm512_multishift_epi64_epi8(from, eight), terms);
        const __m512i value = _mm512_mask_add_epi16(term, _mm512_test_epi16_mask(term, _mm512_set1_epi16(ONCE)), term, once);
        put(pair + i, _mm512_mask_add_epi16(value, _mm512_test_epi16_mask(term, _mm512_set1_epi16(MORE)), term, more));
    }
}

// A panel's STEP of K from k on, all within K, as pairs of BF16 numbers, codes times scales: put(pair, [16][2]) for pairs 0
// to 63. In a number of 32 bits are eight codes of a row, or four scales; the next panel's are asked for. False, and
// nothing done, where numbers may be subnormal or infinite, or a scale is negative or no number.
template <class Put>
INLINE bool pairs_of_block(const Product& g, int64_t panel, int64_t k, const Put& put) {
    if (g.kind_b != E2M1 || k + STEP > g.k) return false;
    const Multiples& multiples = multiples_of(*g.common);
    if (!multiples.holds) return false;
    alignas(64) uint32_t codes[16][PANEL];
    alignas(64) uint64_t eight[PANEL];  // scales of a row
    const int64_t first = panel * PANEL, there = g.n - first < PANEL ? g.n - first : PANEL;
    const uint8_t* from = (const uint8_t*)g.packed + (first * g.k + k) / 2;
    const uint8_t* scale = g.small_scales + (first * g.k + k) / PANEL;
    const int64_t row = g.k / 2, scale_row = g.k / PANEL;
    const uint8_t* next = from + PANEL * row;
    __m512i x[16];
#pragma GCC unroll 16
    for (int64_t i = 0; i < PANEL; i++) {
        x[i] = _mm512_loadu_si512(from);
        std::memcpy(eight + i, scale, 8);
        if (i + 1 < there) from += row, scale += scale_row;
    }
    for (int64_t line = 0; line < STEP; line += 64) __builtin_prefetch(g.small_scales + (panel + 1) * g.k + k + line);
    store_turned(x, codes);
    const __m512i low = _mm512_load_si512(eight), high = _mm512_load_si512(eight + 8);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i scales[2] = {_mm512_permutex2var_epi32(low, even, high),
                               _mm512_permutex2var_epi32(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high)};
    for (int64_t part = 0; part < 2; part++)
        if (_mm512_cmpge_epu8_mask(scales[part], _mm512_set1_epi8(0x7f))) return false;
#pragma GCC unroll 2
    for (int64_t part = 0; part < 2; part++) {
        __m512i once[4], more[4];
        multiples.of_scales(scales[part], once, more);
#pragma GCC unroll 4
        for (int64_t j = 0; j < 8; j++, next += row) {
            __builtin_prefetch(next);  // no processor sees that 16 rows go on
            pairs_of_eight(_mm512_load_si512(codes[8 * part + j]), once[j / 2], more[j / 2], 32 * part + 4 * j, put);
        }
    }
    return true;
}

// `count` of K of a panel, at most STEP, as BF16 pairs: [count / 2][16][2]; by way of `values` where codes need it.
void pairs_of_panel(const Product& g, int64_t panel, int64_t k, int64_t count, float* values, uint16_t* out) {
    const auto put = [&](int64_t pair, __m512i pairs) { _mm512_storeu_si512(out + pair * 2 * PANEL, pairs); };
    if (count == STEP && pairs_of_block(g, panel, k, put)) return;
    decode_b(g, panel, k, count, values);
    for (int64_t i = 0; i < count; i += 2)
        _mm512_storeu_si512(out + i * PANEL, pair_up(vload(values + i * PANEL), vload(values + (i + 1) * PANEL)));
}

}  // namespace
