// Rows of B with two codes to a byte, as they are stored, 16 at a time.
#pragma once

#include "product/product.h"

// A panel's [k, k + count), of at most STEP: the codes of pairs of k, and the scales of every 16 of k.
struct Nibbles {
    alignas(64) uint8_t pairs[STEP / 2][PANEL];
    alignas(64) float scale[STEP / PANEL][PANEL];
};

// Rows that there are not are the last one's; beyond K codes are zero and scales one.
static inline void read_nibbles(const Product& g, int64_t panel, int64_t k, int64_t count, Nibbles& out) {
    const int64_t there = g.k - k < count ? (g.k - k > 0 ? g.k - k : 0) : count;
    const uint8_t *codes[PANEL], *scales[PANEL];
    alignas(16) uint8_t turned[STEP / PANEL][PANEL] = {};
    for (int64_t i = 0; i < PANEL; i++) {
        const int64_t row = panel * PANEL + i < g.n ? panel * PANEL + i : g.n - 1;
        codes[i] = (const uint8_t*)g.packed + (row * g.k + k) / 2;
        scales[i] = g.small_scales + (row * g.k + k) / PANEL;
    }
    transpose_rows(codes, there / 2, out.pairs[0]);
    transpose_rows(scales, there / PANEL, turned[0]);
    std::memset(out.pairs[0] + there / 2 * PANEL, 0, (count - there) / 2 * PANEL);
    for (int64_t i = 0; i < (count + PANEL - 1) / PANEL; i++) {
        store(out.scale[i], decode(turned[i]) * *g.common);
        for (int64_t j = 0; j < PANEL; j++)
            if (turned[i][j] == 0) out.scale[i][j] = 1.0f;
    }
}
