// Both orders with B decoded in registers, tile by tile: nothing is written between a code and its sums. An instruction set
// includes this after ordered_kernel.h, having defined in the anonymous namespace
//
//   Pairs; even_of(pairs), odd_of(pairs)    16 columns of a pair of k in BF16, and its first and second k as a Vec
//   Bf16Source, CodeSource<FOLDED>          bytes; begin(g, panel, k); load(p, first, second), two pairs of k; value(v),
//                                           what even_of and odd_of gave, times B's scale where it is FOLDED
//   FEW, MOST                               rows that are worth it, and rows of a tile
//   PANELS_OF_ONE, PANELS_OF_TWO            panels of a tile of one row, and of two
#pragma once

#include "product/ordered_kernel.h"

namespace {

// MR rows times NP panels, whose codes have one scale for every 128 of K.
template <class Source, Order ORDER, bool SCALED, int MR, int NP>
void tile(const Product& g, int64_t row, int64_t panel, const float* a, int64_t lda, Source& source) {
    const int64_t depth = padded(g.k, DEPTH), stride = depth * PANEL * Source::bytes;
    const uint8_t* b = (const uint8_t*)g.packed + panel * stride;
    Vec total[MR][NP];
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
        for (int p = 0; p < NP; p++) total[r][p] = vzero();
    for (int64_t block = 0; block < depth; block += STEP) {
        const int64_t end = depth - block < STEP ? depth : block + STEP;
        source.begin(g, panel, block);
        Vec sum[MR][NP];
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++) sum[r][p] = SCALED || ORDER == VDP32 ? vzero() : total[r][p];
        for (int64_t k = block; k < end; k += DEPTH) {
            Vec even[MR][NP], odd[MR][NP];  // of `tdp32-v1`
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
                for (int p = 0; p < NP; p++) even[r][p] = odd[r][p] = vzero();
#pragma GCC unroll 2
            for (int64_t i = k; i < k + DEPTH; i += 4) {
#pragma GCC unroll 8
                for (int p = 0; p < NP; p++) {
                    Pairs both[2];
                    source.load(b + p * stride + i * PANEL * Source::bytes, both[0], both[1]);
                    if constexpr (MR <= 2) ask_for<NP, 64 * Source::bytes>(b + p * stride, i * PANEL * Source::bytes, stride);
#pragma GCC unroll 2
                    for (int j = 0; j < 2; j++) {
                        const Vec left = source.value(even_of(both[j])), right = source.value(odd_of(both[j]));
#pragma GCC unroll 8
                        for (int r = 0; r < MR; r++) {
                            const float* x = a + r * lda + i + 2 * j;
                            if constexpr (ORDER == VDP32) {
                                sum[r][p] = fma(vsplat(x[0]), left, fma(vsplat(x[1]), right, sum[r][p]));
                            } else {
                                even[r][p] = fma(vsplat(x[0]), left, even[r][p]);
                                odd[r][p] = fma(vsplat(x[1]), right, odd[r][p]);
                            }
                        }
                    }
                }
            }
            if constexpr (ORDER == VDP32) continue;
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
                for (int p = 0; p < NP; p++) sum[r][p] = add(sum[r][p], add(even[r][p], odd[r][p]));
        }
        alignas(64) float row_scale[MR], column_scale[NP * 16];
        if (SCALED) {
            g.scale_a.fill(row, MR, g.m, block, row_scale);
            g.scale_b.fill(panel * PANEL, NP * PANEL, g.n, block, column_scale);
        }
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++)
                total[r][p] =
                    SCALED ? fma(sum[r][p], mul(vsplat(row_scale[r]), vload(column_scale + p * 16)), total[r][p])
                           : ORDER == VDP32 ? add(total[r][p], sum[r][p]) : sum[r][p];
    }
    alignas(64) float out[NP * 16];
    const int64_t column = panel * PANEL, columns = g.n - column < NP * PANEL ? g.n - column : NP * PANEL;
    for (int r = 0; r < MR; r++) {
        for (int p = 0; p < NP; p++) vstore(out + p * 16, total[r][p]);
        finish(g, row + r, 1, column, columns, out, 0);
    }
}

// All rows times NP panels, MOST at a time: the codes come from the nearest cache again, and A from the second.
template <class Source, Order ORDER, bool SCALED, int NP>
void row_groups(const Product& g, int64_t row, int64_t rows, int64_t panel, const float* a, int64_t lda, Source& source) {
    int64_t r = 0;
#define ISOBIT_ROWS(MR) \
    for (; r + MR <= rows; r += MR) tile<Source, ORDER, SCALED, MR, NP>(g, row + r, panel, a + r * lda, lda, source)
    if constexpr (NP == 1 && MOST > 2) {
        ISOBIT_ROWS(MOST);
        ISOBIT_ROWS(4);
        ISOBIT_ROWS(3);
    }
    ISOBIT_ROWS(2);
    ISOBIT_ROWS(1);
#undef ISOBIT_ROWS
}

// Groups of panels begin at multiples of NP, so that none crosses a block of scales.
template <class Source, Order ORDER, bool SCALED, int NP>
void panel_groups(const Product& g, int64_t row, int64_t rows, int64_t panel0, int64_t panel1, const float* a, int64_t lda) {
    Source source;
    for (int64_t panel = panel0; panel < panel1;)
        if (panel % NP == 0 && panel + NP <= panel1)
            row_groups<Source, ORDER, SCALED, NP>(g, row, rows, panel, a, lda, source), panel += NP;
        else
            row_groups<Source, ORDER, SCALED, 1>(g, row, rows, panel, a, lda, source), panel += 1;
}

template <class Source, Order ORDER, bool SCALED>
void few_or_many(const Product& g, int64_t row, int64_t rows, int64_t panel0, int64_t panel1, const float* a, int64_t lda) {
    if (rows == 1) panel_groups<Source, ORDER, SCALED, PANELS_OF_ONE>(g, row, rows, panel0, panel1, a, lda);
    else if (rows == 2) panel_groups<Source, ORDER, SCALED, PANELS_OF_TWO>(g, row, rows, panel0, panel1, a, lda);
    else panel_groups<Source, ORDER, SCALED, 1>(g, row, rows, panel0, panel1, a, lda);
}

template <class Source, bool SCALED>
void rows_of(const Product& g, int64_t row, int64_t rows, int64_t panel0, int64_t panel1, const float* a, int64_t lda) {
    if (g.order == TDP32) few_or_many<Source, TDP32, SCALED>(g, row, rows, panel0, panel1, a, lda);
    else few_or_many<Source, VDP32, SCALED>(g, row, rows, panel0, panel1, a, lda);
}

bool in_registers(const Product& g, int64_t row, int64_t rows, int64_t panel0, int64_t panel1, const float* a, int64_t lda) {
    if (g.kind_b == E5M2 || g.kind_b == E2M1 || rows > FEW) return false;
    if (g.kind_b == BF16) {
        rows_of<Bf16Source, false>(g, row, rows, panel0, panel1, a, lda);
        return true;
    }
    const Scales& s = g.scale_b;
    if (g.scaled & BLOCKS) {
        rows_of<CodeSource<false>, true>(g, row, rows, panel0, panel1, a, lda);
        return true;
    }
    const bool uniform = (s.block_rows % (PANELS_OF_ONE * PANEL) == 0 || s.block_rows >= g.n) &&
                         (s.block_columns % STEP == 0 || s.block_columns >= g.k);
    if (!(g.scaled & FOLD_B) || !uniform) return false;
    rows_of<CodeSource<true>, false>(g, row, rows, panel0, panel1, a, lda);
    return true;
}

}  // namespace
