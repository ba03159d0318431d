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

INLINE __m512i joined(const __m128i (&part)[8], int first) {
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(part[first]), part[first + 1], 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(part[first + 2]), part[first + 3], 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// A panel's STEP of K from k on, as they are stored: in a number of 32 bits are eight codes of a row, or four scales.
struct Stored {
    alignas(64) uint32_t codes[16][PANEL];
    __m512i scales[2];

    INLINE void read(const Product& g, int64_t panel, int64_t k) {
        const int64_t first = panel * PANEL, there = g.n - first < PANEL ? g.n - first : PANEL;
        const uint8_t* from = (const uint8_t*)g.packed + (first * g.k + k) / 2;
        const uint8_t* scale = g.small_scales + (first * g.k + k) / PANEL;
        __m512i x[16];
        __m128i eight[8];  // scales of two rows; not by way of memory, where a load of several stores waits for them
#pragma GCC unroll 16
        for (int64_t i = 0; i < PANEL; i++) {
            x[i] = _mm512_loadu_si512(from);
            if (i % 2 == 0) eight[i / 2] = _mm_loadl_epi64((const __m128i*)scale);
            else eight[i / 2] = _mm_castpd_si128(_mm_loadh_pd(_mm_castsi128_pd(eight[i / 2]), (const double*)scale));
            if (i + 1 < there) from += g.k / 2, scale += g.k / PANEL;
        }
        store_turned(x, codes);
        const __m512i low = joined(eight, 0), high = joined(eight, 4);
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        scales[0] = _mm512_permutex2var_epi32(low, even, high);
        scales[1] = _mm512_permutex2var_epi32(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high);
    }
    // Whether a scale is negative or no number.
    INLINE bool strange() const {
        return _mm512_cmpge_epu8_mask(_mm512_max_epu8(scales[0], scales[1]), _mm512_set1_epi8(0x7f)) != 0;
    }
};

// NP panels' STEP of K from k on, all within K, as pairs of BF16 numbers, codes times scales: put(panel, pair, [16][2]) for
// pairs 0 to 63; the next panels' are asked for. False, and nothing done, where numbers may be subnormal or infinite, or a
// scale is negative or no number.
template <int NP, class Put>
INLINE bool pairs_of_block(const Product& g, int64_t panel, int64_t k, const Put& put) {
    if (g.kind_b != E2M1 || k + STEP > g.k) return false;
    const Multiples& multiples = multiples_of(*g.common);
    if (!multiples.holds) return false;
    Stored stored[NP];
    const uint8_t* next[NP];
#pragma GCC unroll 2
    for (int p = 0; p < NP; p++) {
        stored[p].read(g, panel + p, k);
        next[p] = (const uint8_t*)g.packed + ((panel + NP + p) * PANEL * g.k + k) / 2;
        for (int64_t line = 0; line < STEP; line += 64)
            __builtin_prefetch(g.small_scales + (panel + NP + p) * g.k + k + line);
    }
    for (int p = 0; p < NP; p++)
        if (stored[p].strange()) return false;
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
        __m512i once[NP][4], more[NP][4];
        for (int p = 0; p < NP; p++) multiples.of_scales(stored[p].scales[part], once[p], more[p]);
#pragma GCC unroll 4
        for (int j = 0; j < 8; j++)
#pragma GCC unroll 2
            for (int p = 0; p < NP; p++) {
                __builtin_prefetch(next[p]);  // no processor sees that 16 rows go on
                next[p] += g.k / 2;
                const auto put_here = [&](int64_t pair, __m512i pairs) { put(p, pair, pairs); };
                const __m512i eight = _mm512_load_si512(stored[p].codes[8 * part + j]);
                pairs_of_eight(eight, once[p][j / 2], more[p][j / 2], 32 * part + 4 * j, put_here);
            }
    }
    return true;
}

// `count` of K of a panel, at most STEP, as BF16 pairs: [count / 2][16][2]; by way of `values` where codes need it.
void pairs_of_panel(const Product& g, int64_t panel, int64_t k, int64_t count, float* values, uint16_t* out) {
    const auto put = [&](int, int64_t pair, __m512i pairs) { _mm512_storeu_si512(out + pair * 2 * PANEL, pairs); };
    if (count == STEP && pairs_of_block<1>(g, panel, k, put)) return;
    decode_b(g, panel, k, count, values);
    for (int64_t i = 0; i < count; i += 2)
        _mm512_storeu_si512(out + i * PANEL, pair_up(vload(values + i * PANEL), vload(values + (i + 1) * PANEL)));
}

}  // namespace
