// What the two products share: their arguments, grids of scales, and panels of 16 of B's rows.
#pragma once

#include "native/tile.h"

constexpr int64_t STEP = 128;  // block of K: the scaling group, and what is decoded at a time

// A grid of scales: row r and the block of columns that begins at k.
struct Scales {
    const float* data;
    int64_t block_rows, block_columns, row_stride, column_stride;
    // The scales of rows first..first+count (zeros from `end` on) at column k.
    template <class R>
    INLINE void fill(int64_t first, int64_t count, int64_t end, int64_t k, R* out) const {
        const float* column = data + k / block_columns * column_stride;
        int64_t block = first / block_rows, left = block_rows - first % block_rows;
        for (int64_t i = 0; i < count; i++) {
            out[i] = first + i < end ? column[block * row_stride] : R(0);
            if (--left == 0) left = block_rows, block++;
        }
    }
};

struct Product {
    int64_t kind_a, m, n, k;
    const void* a;
    int64_t a_row, a_column;
    int64_t kind_b;
    const void* packed;
    const void* bias;
    int64_t bias_kind;
    void* out;
    int64_t out_kind, threads;
    int64_t scaled;  // `exact`: whether both operands have scales; `bitwise`: FOLD_A, FOLD_B or BLOCKS
    Scales scale_a, scale_b;
    int64_t isa, order;  // of `bitwise`: an index into ordered.cpp's paths, and an Order
    // Where kind_b is E2M1, `packed` are B's rows as they are stored, two codes to a byte, with E4M3 scales for 16
    // columns that are multiplied by one number; the scale of byte 0 is 1.
    const uint8_t* small_scales;
    const float* common;
    // Where `packed` is null, B itself, of BF16: its element of row n and place k is b[n + k * b_column].
    const void* b;
    int64_t b_column;
    int64_t adds;  // of `bitwise`: the float32 result is added to what `out` has
};

// body(first row, last row, first panel, last panel) for the cells of a product that threads share: bands of rows, or
// where there are `few` rows, of panels. A cell decodes its rows of A once, and panels of B once for some hundred rows:
// so bands are cut into pieces of BAND rows at most, and runs of panels where decoding A is nothing.
constexpr int64_t BAND = 512;
template <class Body>
inline void in_cells(const Product& g, int64_t threads, int64_t row_grain, int64_t panel_grain, const Body& body,
                     int64_t few = 127) {
    const int64_t panels = padded(g.n, PANEL) / PANEL;
    if (g.m > few || (panels < 2 * threads && g.m >= 16)) {
        const int64_t pieces = ((g.m + threads - 1) / threads + BAND - 1) / BAND, all = threads * pieces;
        for_ranges(threads, g.m, padded((g.m + all - 1) / all, row_grain),
                   [&](int64_t first, int64_t last) { body(first, last, 0, panels); }, pieces);
    } else {
        for_ranges(threads, panels, panel_grain, [&](int64_t first, int64_t last) { body(0, g.m, first, last); },
                   g.m <= 8 ? 4 : 1);
    }
}

template <class T>
static void pack_panel(const T* b, int64_t n, int64_t k, int64_t row_stride, int64_t column_stride, int64_t p, T* out) {
    int64_t first = p * PANEL, rows = n - first < PANEL ? n - first : PANEL;
    const T* source = b + first * row_stride;
    if (rows == PANEL && column_stride == 1) {
        const T* pointers[16];
        for (int i = 0; i < 16; i++) pointers[i] = source + i * row_stride;
        transpose_rows(pointers, k, out);
        return;
    }
    if (rows == PANEL && row_stride == 1) {
        for (int64_t j = 0; j < k; j++) std::memcpy(out + j * PANEL, source + j * column_stride, PANEL * sizeof(T));
        return;
    }
    for (int64_t j = 0; j < k; j++)
        for (int64_t i = 0; i < PANEL; i++)
            out[j * PANEL + i] = i < rows ? source[i * row_stride + j * column_stride] : T(0);
}
