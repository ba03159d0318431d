// The loops of both orders over vectors of 16 columns. A file for an instruction set includes this after it has defined
//
//   Vec; zero(), splat(x), load(p), store(p, v), fma(a, b, c), add(a, b), mul(a, b)   of 16 floats
//   decode16(p, kind)      16 codes or BF16 numbers in a row
//   split(p, even, odd)    16 pairs of BF16 numbers
//   decode_quad(p, v)      E4M3 codes of 4 consecutive k and 16 columns, as they are packed
//
// in the anonymous namespace, and then defines `in_registers`. Every path computes the same operations on an element, in
// the same order.
#pragma once

#include "product/nibbles.h"
#include "product/ordered.h"

namespace {

constexpr int64_t WIDE = 2;  // panels of B that are decoded together

// Whether it has computed these rows with B decoded in registers, tile by tile; a[r * lda + k] are A's values.
bool in_registers(const Product& g, int64_t row, int64_t rows, int64_t panel0, int64_t panel1, const float* a, int64_t lda);

// A's rows as float32, without scales: out[r * stride + k], zeros up to the next multiple of 32.
template <class T>
void decode_rows(const Product& g, const T* a, int64_t rows, float* out, int64_t stride) {
    int64_t k = 0;
    if (g.a_column == 1) {
        for (; k + 16 <= g.k; k += 16)
            for (int64_t r = 0; r < rows; r++) vstore(out + r * stride + k, decode16(a + r * g.a_row + k, g.kind_a));
    } else if (g.a_row == 1) {
        static thread_local Scratch scratch;
        T* turned = (T*)scratch.get(rows * PANEL * sizeof(T) / sizeof(double) + 8);
        for (; k + 16 <= g.k; k += 16) {  // a transposed view: 16 of its columns are 16 runs
            const T* runs[PANEL];
            for (int64_t i = 0; i < PANEL; i++) runs[i] = a + (k + i) * g.a_column;
            transpose_rows(runs, rows, turned);
            for (int64_t r = 0; r < rows; r++)
                vstore(out + r * stride + k, decode16(turned + r * PANEL, g.kind_a));
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t j = k; j < g.k; j++) out[r * stride + j] = one(a[r * g.a_row + j * g.a_column], g.kind_a);
        for (int64_t j = g.k; j < padded(g.k, DEPTH); j++) out[r * stride + j] = 0.0f;
    }
}

void decode_a(const Product& g, int64_t row, int64_t rows, float* out, int64_t stride) {
    if (g.kind_a == BF16)
        decode_rows(g, (const uint16_t*)g.a + row * g.a_row, rows, out, stride);
    else
        decode_rows(g, (const uint8_t*)g.a + row * g.a_row, rows, out, stride);
    if (!(g.scaled & FOLD_A)) return;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < g.k; k += g.scale_a.block_columns) {
            float scale;
            g.scale_a.fill(row + r, 1, g.m, k, &scale);
            int64_t end = k + g.scale_a.block_columns < g.k ? k + g.scale_a.block_columns : g.k, j = k;
            float* line = out + r * stride;
            for (; j + 16 <= end; j += 16) vstore(line + j, mul(vload(line + j), vsplat(scale)));
            for (; j < end; j++) line[j] *= scale;
        }
}

// What `decode_b` makes of nibbles: codes times scales, rounded to BF16.
void decode_nibbles(const Product& g, int64_t panel, int64_t k, int64_t count, float* out) {
    alignas(16) uint8_t codes[2][PANEL];
    Nibbles nibbles;
    read_nibbles(g, panel, k, count, nibbles);
    for (int64_t j = 0; j < count; j += 2, out += 2 * PANEL) {
        const u8x16 pair = load<u8x16>(nibbles.pairs[j / 2]);
        store(codes[0], e4m3_of_e2m1(pair & 15)), store(codes[1], e4m3_of_e2m1(pair >> 4));
        for (int64_t i = 0; i < 2; i++) {
            vstore(out + i * PANEL, mul(decode16(codes[i], E4M3), vload(nibbles.scale[j / PANEL])));
            store(out + i * PANEL, as_bf16(load<f32x16>(out + i * PANEL)));
        }
    }
}

// A panel's `count` rows of k, a multiple of 32, as float32: out[k][16]; times B's scales where they are folded, and
// where B has nibbles.
void decode_b(const Product& g, int64_t panel, int64_t k, int64_t count, float* out) {
    if (g.kind_b == E2M1) return decode_nibbles(g, panel, k, count, out);
    if (g.kind_b == BF16) {
        const uint16_t* p = (const uint16_t*)g.packed + packed_offset(g, panel, k);
        for (int64_t i = 0; i < count; i += 2, p += 32) {
            Vec even, odd;
            split(p, even, odd);
            vstore(out + i * 16, even), vstore(out + i * 16 + 16, odd);
        }
        return;
    }
    const uint8_t* p = (const uint8_t*)g.packed + packed_offset(g, panel, k);
    const bool fold = g.scaled & FOLD_B;
    const bool changes = fold && g.scale_b.block_columns < g.k && g.scale_b.block_columns < count;  // at a multiple of 16
    const int64_t run = changes ? g.scale_b.block_columns : count;
    for (int64_t start = 0; start < count; start += run) {
        const int64_t end = start + run < count ? start + run : count;
        alignas(64) float scale[16];
        if (fold && k + start < g.k) g.scale_b.fill(panel * PANEL, PANEL, g.n, k + start, scale);
        else for (float& s : scale) s = 1.0f;
        const Vec factor = vload(scale);
        for (int64_t i = start; i < end; i += 4, p += 64, out += 64) {
            Vec v[4];
            if (g.kind_b == E4M3) {
                decode_quad(p, v);
            } else {
                alignas(64) float values[4][16];
                for (int j = 0; j < 64; j++)
                    values[j / 8 % 2 * 2 + j % 2][j / 16 * 4 + j % 8 / 2] = one(p[j], g.kind_b);
                for (int j = 0; j < 4; j++) v[j] = vload(values[j]);
            }
            for (int j = 0; j < 4; j++) vstore(out + j * 16, fold ? mul(v[j], factor) : v[j]);
        }
    }
}

// The even or the odd chain of `tdp32-v1` over 32 of K. One after the other, since both at once have more sums than AVX2 has registers.
template <int MR, int NP>
INLINE void chain(const float* a, int64_t lda, const float* b, Vec (&sum)[MR][NP]) {
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
        for (int p = 0; p < NP; p++) sum[r][p] = vzero();
#pragma GCC unroll 4
    for (int64_t i = 0; i < DEPTH; i += 2) {
        Vec right[NP];
#pragma GCC unroll 8
        for (int p = 0; p < NP; p++) right[p] = vload(b + p * STEP * PANEL + i * PANEL);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
            Vec x = vsplat(a[r * lda + i]);
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++) sum[r][p] = fma(x, right[p], sum[r][p]);
        }
    }
}

// The chain of `vdp32-v1` over `count` of K, at most 128.
template <int MR, int NP>
INLINE void pair_chain(const float* a, int64_t lda, const float* b, int64_t count, Vec (&sum)[MR][NP]) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; i++) {
        const int64_t k = i ^ 1;  // of each pair the second first
        Vec right[NP];
#pragma GCC unroll 8
        for (int p = 0; p < NP; p++) right[p] = vload(b + p * STEP * PANEL + k * PANEL);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
            Vec x = vsplat(a[r * lda + k]);
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++) sum[r][p] = fma(x, right[p], sum[r][p]);
        }
    }
}

// MR rows times NP panels over `count` of K, at most 128. a[r][k] at a + r * lda + k; b[p][k][16] with panels STEP * 16
// apart; c[r][p][16] with rows ldc apart.
template <Order ORDER, bool SCALED, int MR, int NP>
void ordered_tile(const float* a, int64_t lda, const float* b, int64_t count, float* c, int64_t ldc, const float* row_scale,
              const float* column_scale) {
    Vec sum[MR][NP];
    for (int r = 0; r < MR; r++)
        for (int p = 0; p < NP; p++) sum[r][p] = SCALED || ORDER == VDP32 ? vzero() : vload(c + r * ldc + p * 16);
    if constexpr (ORDER == VDP32) pair_chain<MR, NP>(a, lda, b, count, sum);
    else for (int64_t k = 0; k < count; k += DEPTH) {
        Vec even[MR][NP], odd[MR][NP];
        chain<MR, NP>(a + k, lda, b + k * PANEL, even);
        chain<MR, NP>(a + k + 1, lda, b + (k + 1) * PANEL, odd);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++) sum[r][p] = add(sum[r][p], add(even[r][p], odd[r][p]));
    }
    for (int r = 0; r < MR; r++)
        for (int p = 0; p < NP; p++) {
            float* target = c + r * ldc + p * 16;
            if (SCALED) sum[r][p] = fma(sum[r][p], mul(vsplat(row_scale[r]), vload(column_scale + p * 16)), vload(target));
            else if (ORDER == VDP32) sum[r][p] = add(vload(target), sum[r][p]);
            vstore(target, sum[r][p]);
        }
}

template <Order ORDER, bool SCALED, int MR>
void ordered_rows(int64_t panels, const float* a, int64_t lda, const float* b, int64_t count, float* c, int64_t ldc,
              const float* row_scale, const float* column_scale) {
    int64_t p = 0;
    for (; p + TILE_PANELS <= panels; p += TILE_PANELS)
        ordered_tile<ORDER, SCALED, MR, TILE_PANELS>(a, lda, b + p * STEP * PANEL, count, c + p * PANEL, ldc, row_scale,
                                                     column_scale + p * PANEL);
    for (; p < panels; p++)
        ordered_tile<ORDER, SCALED, MR, 1>(a, lda, b + p * STEP * PANEL, count, c + p * PANEL, ldc, row_scale,
                                           column_scale + p * PANEL);
}

template <Order ORDER, bool SCALED>
void ordered_block(int64_t rows, int64_t panels, const float* a, int64_t lda, const float* b, int64_t count, float* c,
                   int64_t ldc, const float* row_scale, const float* column_scale) {
    int64_t r = 0;
#define ISOBIT_ROWS(MR)                                                                                       \
    for (; r + MR <= rows; r += MR)                                                                           \
        ordered_rows<ORDER, SCALED, MR>(panels, a + r * lda, lda, b, count, c + r * ldc, ldc, row_scale + r,  \
                                        column_scale)
    ISOBIT_ROWS(TILE_ROWS);
    if constexpr (TILE_ROWS > 4) { ISOBIT_ROWS(4); }
    ISOBIT_ROWS(2);
    ISOBIT_ROWS(1);
#undef ISOBIT_ROWS
}

// Subnormal numbers are kept, so not inlined into the products' scope.
__attribute__((noinline)) void add_rows(const Product& g, int64_t row, int64_t rows, int64_t column, int64_t columns,
                                        const float* sums, int64_t stride) {
    for (int64_t r = 0; r < rows; r++, sums += stride) {
        float* out = (float*)g.out + (row + r) * g.n + column;
        int64_t j = 0;
        for (; j + 16 <= columns; j += 16) vstore(out + j, add(vload(out + j), vload(sums + j)));
        for (; j < columns; j++) out[j] += sums[j];
    }
}

// Rows of sums, plus the bias, rounded to the type of the result; or added to it.
void finish(const Product& g, int64_t row, int64_t rows, int64_t column, int64_t columns, float* sums, int64_t stride) {
    if (g.adds) {
        const Keeping keeping;
        return add_rows(g, row, rows, column, columns, sums, stride);
    }
    for (int64_t r = row; r < row + rows; r++, sums += stride) {
        for (int64_t j = 0; g.bias && j < columns; j++)
            sums[j] += g.bias_kind == BF16 ? decode_scalar(((const uint16_t*)g.bias)[column + j])
                                           : ((const float*)g.bias)[column + j];
        if (g.out_kind == BF16)
            round_row(sums, columns, (uint16_t*)g.out + r * g.n + column);
        else
            round_row(sums, columns, (float*)g.out + r * g.n + column);
    }
}

[[maybe_unused]] void ordered_part(const Product& g, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    static thread_local Scratch scratch;
    const bool scaled = g.scaled & BLOCKS;
    const auto block = g.order == TDP32 ? scaled ? ordered_block<TDP32, true> : ordered_block<TDP32, false>
                                        : scaled ? ordered_block<VDP32, true> : ordered_block<VDP32, false>;
    const int64_t depth = padded(g.k, DEPTH), lda = depth + 16, blocks = (depth + STEP - 1) / STEP, ldc = WIDE * PANEL;
    int64_t chunk = (1 << 17) / depth / 8 * 8;  // rows of A whose float32 values stay within half a megabyte
    chunk = chunk < 32 ? 32 : chunk > 256 ? 256 : chunk;
    if (chunk > row1 - row0) chunk = row1 - row0;
    float* a = (float*)scratch.get((chunk * (lda + ldc + blocks) + ldc * (STEP + 1)) / 2 + 16);
    float *b = a + padded(chunk * lda, 16), *c = b + ldc * STEP, *column_scale = c + chunk * ldc;
    float* row_scale = column_scale + ldc;
    for (int64_t row = row0; row < row1; row += chunk) {
        const int64_t rows = row1 - row < chunk ? row1 - row : chunk;
        decode_a(g, row, rows, a, lda);
        if (in_registers(g, row, rows, panel0, panel1, a, lda)) continue;
        for (int64_t s = 0; scaled && s < blocks; s++)
            g.scale_a.fill(row, rows, g.m, s * STEP, row_scale + s * chunk);
        for (int64_t panel = panel0; panel < panel1; panel += WIDE) {
            const int64_t panels = panel1 - panel < WIDE ? panel1 - panel : WIDE, column = panel * PANEL;
            std::memset(c, 0, rows * ldc * sizeof(float));
            for (int64_t s = 0; s < blocks; s++) {
                const int64_t k = s * STEP, count = depth - k < STEP ? depth - k : STEP;
                for (int64_t p = 0; p < panels; p++) decode_b(g, panel + p, k, count, b + p * STEP * PANEL);
                if (scaled) g.scale_b.fill(column, panels * PANEL, g.n, k, column_scale);
                block(rows, panels, a + k, lda, b, count, c, ldc, row_scale + s * chunk, column_scale);
            }
            const int64_t columns = g.n - column < panels * PANEL ? g.n - column : panels * PANEL;
            finish(g, row, rows, column, columns, c, ldc);
        }
    }
}

}  // namespace
