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

// Values of nibbles, which are the lowest four bits of 16 indices.
INLINE Vec value_of(__m512i nibbles) {
    return _mm512_permutexvar_ps(nibbles, _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                                         -1.5f, -2.0f, -3.0f, -4.0f, -6.0f));
}

// A panel's STEP of K from k on, all within K, as pairs of BF16 numbers, codes times scales: [STEP / 2][16][2]. In a
// number of 32 bits are eight codes of a row, or four scales.
void pairs_of_block(const Product& g, int64_t panel, int64_t k, uint16_t* out) {
    alignas(64) uint32_t codes[16][PANEL];
    int64_t row[PANEL];
    __m512i x[16];
    for (int64_t i = 0; i < PANEL; i++) {
        row[i] = (panel * PANEL + i < g.n ? panel * PANEL + i : g.n - 1) * g.k + k;
        const uint8_t* from = (const uint8_t*)g.packed + row[i] / 2;
        x[i] = _mm512_loadu_si512(from);
        __builtin_prefetch(from + PANEL / 2 * g.k);  // the next panel's: no processor sees that 16 rows go on
    }
    for (int64_t line = 0; line < STEP; line += 64) __builtin_prefetch(g.small_scales + (panel + 1) * g.k + k + line);
    store_turned(x, codes);
    const Vec common = vsplat(*g.common), tiny = vsplat(0x1p-9f);
    for (int64_t part = 0; part < 2; part++) {
        alignas(64) uint32_t scales[PANEL];
        for (int64_t i = 0; i < PANEL; i++) std::memcpy(scales + i, g.small_scales + row[i] / PANEL + 4 * part, 4);
        __m512i four = _mm512_load_si512(scales);
        for (int64_t j = 0; j < 4; j++, four = _mm512_srli_epi32(four, 8)) {
            const __m512i code = _mm512_and_si512(four, _mm512_set1_epi32(0xff));
            const Vec normal = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(code, 20), _mm512_set1_epi32(120 << 23)));
            const __mmask16 small = _mm512_cmplt_epi32_mask(code, _mm512_set1_epi32(8));
            Vec scale = mul(_mm512_mask_mul_ps(normal, small, _mm512_cvtepi32_ps(code), tiny), common);
            scale = _mm512_mask_mov_ps(scale, _mm512_testn_epi32_mask(code, code), vsplat(1.0f));
#pragma GCC unroll 2
            for (int64_t half = 0; half < 2; half++) {
                const __m512i eight = _mm512_load_si512(codes[8 * part + 2 * j + half]);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++, out += 2 * PANEL) {
                    const Vec even = mul(value_of(_mm512_srli_epi32(eight, 8 * i)), scale);
                    const Vec odd = mul(value_of(_mm512_srli_epi32(eight, 8 * i + 4)), scale);
                    _mm512_storeu_si512(out, rounded_pairs(even, odd));
                }
            }
        }
    }
}

// `count` of K of a panel, at most STEP, as BF16 pairs: [count / 2][16][2]; by way of `values` where codes need it.
void pairs_of_panel(const Product& g, int64_t panel, int64_t k, int64_t count, float* values, uint16_t* out) {
    if (g.kind_b == E2M1 && count == STEP && k + STEP <= g.k) return pairs_of_block(g, panel, k, out);
    decode_b(g, panel, k, count, values);
    for (int64_t i = 0; i < count; i += 2)
        _mm512_storeu_si512(out + i * PANEL, pair_up(vload(values + i * PANEL), vload(values + (i + 1) * PANEL)));
}

}  // namespace
