// `vdp32-v1` with AVX512-BF16: VDPBF16PS is its definition. A's rows are made BF16 pairs of k; B's codes are decoded in
// registers for few rows, and for many once into memory.
#include "product/ordered.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#include "product/ordered_avx512.h"
#include "product/ordered_kernel.h"
#include "product/ordered_pairs.h"

namespace {

constexpr int64_t FEW = 96, MOST = 8;  // rows for which codes are decoded in registers, and rows of a tile

INLINE Vec dot(Vec c, uint32_t pair_of_a, __m512i pairs) {
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_set1_epi32((int)pair_of_a), (__m512bh)pairs);
}

// MR rows times NP panels that begin at `b`. a[r * lda + k / 2] are pairs of k.
template <class Source, bool SCALED, int MR, int NP>
void tile(const Product& g, int64_t row, int64_t panel, const uint8_t* b, const uint32_t* a, int64_t lda, Source& source) {
    const int64_t depth = padded(g.k, DEPTH), stride = depth * PANEL * Source::bytes;
    alignas(64) float total[MR][NP * 16] = {};
    for (int64_t block = 0; block < depth; block += STEP) {
        const int64_t end = depth - block < STEP ? depth : block + STEP;
        source.begin(g, panel, block);
        Vec sum[MR][NP];
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++) sum[r][p] = vzero();
#pragma GCC unroll 2
        for (int64_t i = block; i < end; i += 4) {
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++) {
                __m512i first, second;
                source.load(b + p * stride + i * PANEL * Source::bytes, first, second);
                if constexpr (MR <= 2) ask_for<NP, 64 * Source::bytes>(b + p * stride, i * PANEL * Source::bytes, stride);
#pragma GCC unroll 8
                for (int r = 0; r < MR; r++) sum[r][p] = dot(sum[r][p], a[r * lda + i / 2], first);
#pragma GCC unroll 8
                for (int r = 0; r < MR; r++) sum[r][p] = dot(sum[r][p], a[r * lda + i / 2 + 1], second);
            }
        }
        alignas(64) float row_scale[MR], column_scale[NP * 16];
        if (SCALED) {
            g.scale_a.fill(row, MR, g.m, block, row_scale);
            g.scale_b.fill(panel * PANEL, NP * PANEL, g.n, block, column_scale);
        }
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++) {
                const Vec before = vload(total[r] + p * 16);
                vstore(total[r] + p * 16,
                       SCALED ? fma(sum[r][p], mul(vsplat(row_scale[r]), vload(column_scale + p * 16)), before)
                              : add(before, sum[r][p]));
            }
    }
    const int64_t column = panel * PANEL, columns = g.n - column < NP * PANEL ? g.n - column : NP * PANEL;
    finish(g, row, MR, column, columns, total[0], NP * 16);
}

// Some rows times NP panels: as few tiles as there can be.
template <class Source, bool SCALED, int NP>
void row_groups(const Product& g, int64_t row, int64_t rows, int64_t panel, const uint8_t* b, const uint32_t* a,
                int64_t lda, Source& source) {
    int64_t r = 0;
#define ISOBIT_ROWS(MR) \
    for (; r + MR <= rows; r += MR) tile<Source, SCALED, MR, NP>(g, row + r, panel, b, a + r * lda, lda, source)
    if constexpr (NP <= 2) { ISOBIT_ROWS(MOST); }
    ISOBIT_ROWS(4);
    ISOBIT_ROWS(2);
    ISOBIT_ROWS(1);
#undef ISOBIT_ROWS
}

// All rows of a chunk times all panels, read as they are packed. Groups of panels begin at multiples of NP, so that none
// crosses a block of scales.
template <class Source, bool SCALED, int NP>
void as_packed(const Product& g, int64_t row, int64_t rows, int64_t panel0, int64_t panel1, const uint32_t* a, int64_t lda) {
    Source source;
    for (int64_t panel = panel0; panel < panel1;) {
        const uint8_t* b = (const uint8_t*)g.packed + packed_offset(g, panel, 0) * Source::bytes;
        if (panel % NP == 0 && panel + NP <= panel1)
            row_groups<Source, SCALED, NP>(g, row, rows, panel, b, a, lda, source), panel += NP;
        else
            row_groups<Source, SCALED, 1>(g, row, rows, panel, b, a, lda, source), panel += 1;
    }
}

// The same with two panels at a time decoded into `pairs` [2][depth / 2][16][2], with scratch of a block.
template <bool SCALED>
void decoded(const Product& g, int64_t row, int64_t rows, int64_t panel0, int64_t panel1, const uint32_t* a, int64_t lda,
             uint16_t* pairs, float* block) {
    const int64_t depth = padded(g.k, DEPTH);
    Bf16Source source;
    for (int64_t panel = panel0; panel < panel1; panel += 2) {
        const int64_t panels = panel1 - panel < 2 ? 1 : 2;
        for (int64_t p = 0; p < panels; p++)
            for (int64_t k = 0; k < depth; k += STEP) {
                const int64_t count = depth - k < STEP ? depth - k : STEP;
                pairs_of_panel(g, panel + p, k, count, block, pairs + (p * depth + k) * PANEL);
            }
        if (panels == 2) row_groups<Bf16Source, SCALED, 2>(g, row, rows, panel, (uint8_t*)pairs, a, lda, source);
        else row_groups<Bf16Source, SCALED, 1>(g, row, rows, panel, (uint8_t*)pairs, a, lda, source);
    }
}

// A's rows as pairs of BF16, with their scales where they are folded: out[r * depth / 2 + k / 2].
void pairs_of_a(const Product& g, int64_t row, int64_t rows, int64_t depth, uint32_t* out, float* line) {
    constexpr int64_t AT_ONCE = 16;  // a transposed view is read by 16 rows
    for (int64_t r = 0; r < rows; r += AT_ONCE) {
        const int64_t some = rows - r < AT_ONCE ? rows - r : AT_ONCE;
        decode_a(g, row + r, some, line, depth);
        for (int64_t k = 0; k < some * depth; k += 32)
            _mm512_storeu_si512(out + (r * depth + k) / 2, upper_halves(vload(line + k), vload(line + k + 16)));
    }
}

// Whether the codes of up to 4 panels have one scale for every 128 of K.
bool uniform(const Product& g) {
    const Scales& s = g.scale_b;
    return (s.block_rows % (4 * PANEL) == 0 || s.block_rows >= g.n) && (s.block_columns % STEP == 0 || s.block_columns >= g.k);
}

template <class Source, bool SCALED>
void few_rows(const Product& g, int64_t row, int64_t rows, int64_t panel0, int64_t panel1, const uint32_t* a, int64_t lda) {
    if (rows <= 3) as_packed<Source, SCALED, 4>(g, row, rows, panel0, panel1, a, lda);
    else as_packed<Source, SCALED, 2>(g, row, rows, panel0, panel1, a, lda);
}

void bf16_part(const Product& g, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    static thread_local Scratch scratch;
    const int64_t depth = padded(g.k, DEPTH);
    int64_t chunk = (1 << 18) / depth / 16 * 16;  // rows of A whose pairs stay within half a megabyte
    chunk = chunk < 32 ? 32 : chunk > 512 ? 512 : chunk;
    if (chunk > row1 - row0) chunk = row1 - row0;
    float* line = (float*)scratch.get((16 * depth + STEP * PANEL + chunk * depth / 2 + PANEL * depth) / 2 + 48);
    float* block = line + 16 * depth;
    uint32_t* a = (uint32_t*)(block + STEP * PANEL);
    uint16_t* pairs = (uint16_t*)(a + padded(chunk * depth / 2, 16));
    for (int64_t row = row0; row < row1; row += chunk) {
        const int64_t rows = row1 - row < chunk ? row1 - row : chunk;
        pairs_of_a(g, row, rows, depth, a, line);
        if (g.kind_b == BF16)
            few_rows<Bf16Source, false>(g, row, rows, panel0, panel1, a, depth / 2);
        else if (g.scaled & BLOCKS && g.kind_b == E4M3 && rows <= FEW)
            few_rows<CodeSource<false>, true>(g, row, rows, panel0, panel1, a, depth / 2);
        else if (g.scaled & FOLD_B && g.kind_b == E4M3 && rows <= FEW && uniform(g))
            few_rows<CodeSource<true>, false>(g, row, rows, panel0, panel1, a, depth / 2);
        else if (g.scaled & BLOCKS)
            decoded<true>(g, row, rows, panel0, panel1, a, depth / 2, pairs, block);
        else
            decoded<false>(g, row, rows, panel0, panel1, a, depth / 2, pairs, block);
    }
}

bool in_registers(const Product&, int64_t, int64_t, int64_t, int64_t, const float*, int64_t) { return false; }

}  // namespace

const OrderedPart ordered_bf16 = bf16_part;
#else
const OrderedPart ordered_bf16 = nullptr;
#endif
