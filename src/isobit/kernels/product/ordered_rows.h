// Rows of A as tiles of BF16 numbers, [rows / 16][K / 32][16][32], from what is stored, turned, or decoded: a tile is what
// AMX's instruction reads, and its rows are pairs of k. Fewer than 16 rows are tiles of so many, or one more: a row's
// numbers 1 KiB apart would all be in the same few sets of the first cache, and lost to what is read beside them.
#pragma once

#include "product/ordered_avx512.h"

namespace {

constexpr int64_t TALL = 16, TILE = TALL * DEPTH;  // rows of a tile, and BF16 numbers in it

INLINE __m512i scaled(__m512i pairs, Vec factor) {
    return pair_up(mul(even_of(pairs), factor), mul(odd_of(pairs), factor));
}

// Two rows of 32 of a tile, each of 16 at `low` and 16 at `high`, the second row `stride` further; times factors of the
// 16 pairs of either row.
INLINE void tile_rows(const uint16_t* low, const uint16_t* high, int64_t stride, int64_t, const Vec*, uint16_t* out) {
    for (int r = 0; r < 2; r++, low += stride, high += stride, out += DEPTH) {
        _mm256_storeu_si256((__m256i*)out, _mm256_loadu_si256((const __m256i*)low));
        _mm256_storeu_si256((__m256i*)(out + 16), _mm256_loadu_si256((const __m256i*)high));
    }
}
INLINE void tile_rows(const uint8_t* low, const uint8_t* high, int64_t stride, int64_t kind, const Vec* factor,
                      uint16_t* out) {
    if (kind != E4M3) {
        for (int r = 0; r < 2; r++, low += stride, high += stride, out += DEPTH) {
            __m512i pairs = upper_halves(decode16(low, kind), decode16(high, kind));
            _mm512_storeu_si512(out, factor ? scaled(pairs, factor[r]) : pairs);
        }
        return;
    }
    __m256i codes[2];  // not by way of memory: a load of what several stores have written waits for them
    for (int r = 0; r < 2; r++)
        codes[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(low + r * stride))),
                                           _mm_loadu_si128((const __m128i*)(high + r * stride)), 1);
    __m512i first, second;  // the lower and the upper eight of each 16
    decode_pairs(_mm512_inserti64x4(_mm512_castsi256_si512(codes[0]), codes[1], 1), unscaled(), first, second);
    const __m512i rows[2] = {_mm512_permutex2var_epi64(first, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second),
                             _mm512_permutex2var_epi64(first, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), second)};
    for (int r = 0; r < 2; r++) _mm512_storeu_si512(out + r * DEPTH, factor ? scaled(rows[r], factor[r]) : rows[r]);
}

// A tile of a transposed view, whose places of K are `column` apart: pairs of K, and then their 16 times 16 turned.
INLINE void turned_tile(const uint16_t* a, int64_t column, uint16_t* out) {
    __m512i x[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        const __m256i even = _mm256_loadu_si256((const __m256i*)(a + 2 * i * column));
        const __m256i odd = _mm256_loadu_si256((const __m256i*)(a + (2 * i + 1) * column));
        x[i] = _mm512_permutexvar_epi16(PAIRING, _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1));
    }
    store_turned(x, out);
}

// Rows of A from `row` on, at most 16, and [first, last) of K as tiles of `tall` rows; what is beyond K is zero.
template <class T>
void tiles_of(const Product& g, const T* a, int64_t row, int64_t rows, int64_t first, int64_t last, int64_t tall,
              uint16_t* out) {
    alignas(64) T turned[2][TALL * 16], edge[TALL][DEPTH];
    alignas(64) float scale[2][TALL] = {};
    const bool fold = g.scaled & FOLD_A;
    const int64_t run = g.scale_a.block_columns;
    for (int64_t k = first; k < last; k += DEPTH, out += tall * DEPTH) {
        const T *low = a + row * g.a_row + k * g.a_column, *high = low + 16;
        int64_t stride = g.a_row;
        if constexpr (sizeof(T) == 2)
            if (k + DEPTH <= g.k && g.a_column != 1 && g.a_row == 1 && rows == TALL) {
                turned_tile(low, g.a_column, out);
                continue;
            }
        if (k + DEPTH > g.k || (g.a_column != 1 && (g.a_row != 1 || rows < TALL))) {
            std::memset(edge, 0, sizeof edge);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t j = 0; j < DEPTH && k + j < g.k; j++) edge[r][j] = low[r * g.a_row + j * g.a_column];
            low = edge[0], high = low + 16, stride = DEPTH;
        } else if (g.a_column != 1) {  // a transposed view
            const T* runs[16];
            for (int half = 0; half < 2; half++) {
                for (int i = 0; i < 16; i++) runs[i] = low + (16 * half + i) * g.a_column;
                transpose_rows(runs, TALL, turned[half]);
            }
            low = turned[0], high = turned[1], stride = 16;
        }
        if (fold && (k == first || run % DEPTH != 0 || k % run == 0)) {
            g.scale_a.fill(row, rows, g.m, k, scale[0]);
            g.scale_a.fill(row, rows, g.m, k + 16 < g.k ? k + 16 : k, scale[1]);
        }
        for (int64_t r = 0; r < padded(rows, 2); r += 2) {
            Vec factor[2];
            for (int i = 0; fold && i < 2; i++)
                factor[i] = _mm512_mask_blend_ps(0xff00, vsplat(scale[0][r + i]), vsplat(scale[1][r + i]));
            const int64_t next = r + 1 < rows ? stride : 0;  // the last of an odd number twice
            tile_rows(low + r * stride, high + r * stride, next, g.kind_a, fold ? factor : nullptr, out + r * DEPTH);
        }
    }
}

// `rows` of them as [rows / tall][K / 32][tall][32].
void pack_a(const Product& g, int64_t row, int64_t rows, int64_t first, int64_t last, int64_t tall, uint16_t* out) {
    for (int64_t r = 0; r < rows; r += tall, out += (last - first) * tall) {
        const int64_t count = rows - r < tall ? rows - r : tall;
        if (count < tall && rows > tall) std::memset(out, 0, (last - first) * tall * sizeof *out);
        if (g.kind_a == BF16) tiles_of(g, (const uint16_t*)g.a, row + r, count, first, last, tall, out);
        else tiles_of(g, (const uint8_t*)g.a, row + r, count, first, last, tall, out);
    }
}

}  // namespace
