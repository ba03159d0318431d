// A product and what adapters of low rank add to it: total[row][lo..hi) += scale * (B · u), u = A · x rounded to BF16, of
// every row by its own adapter; then rounded to BF16. A and B are packed for the ordered products, whose sums they are; times the scale and the sum
// are float32 operations that keep subnormal numbers.
#pragma once

#include "product/product.h"

// B of columns lo to hi, whose u are the next `rank` of its adapter's. Up to rank 32 K is padded to pairs: [panel][rank / 2][16
// columns][2]; beyond, as a product's operand is packed.
struct LowRankPart {
    const void* b;
    int64_t rank, lo, hi;
};

// One adapter's factors of a weight: the A of all parts one after the other, and their B. The first `whole` ranks are packed as
// a product's operand; the others, of which there are at most 8, in half as many bytes: [K / 64][16 pairs][2 blocks of
// 32][8 ranks][2].
struct LowRankFactors {
    const void* a;
    int64_t ranks, whole;
    const LowRankPart* parts;
    int64_t count;
    double scale;
};

// Rows rows[offsets[i]] to rows[offsets[i + 1]] of x [T, k] and of total [T, columns] are of adapters[i * adapter_step],
// or of none where that is null. `product`: the one to float32 that they are added to; null: `total` has it already. x in BF16; null: the product's, E4M3 codes by rows.
// `out` [T, columns] in BF16 is the sums, rounded.
struct LowRank {
    const Product* product;
    const void* x;
    int64_t x_row, rows_of_x, k;
    float* total;
    void* out;
    int64_t columns;
    const int64_t* rows;
    const int64_t* offsets;
    const LowRankFactors* const* adapters;
    int64_t adapter_step, count, threads;
    int64_t isa, isa_of_few, order;  // the path for many rows of an adapter, and for few
};
