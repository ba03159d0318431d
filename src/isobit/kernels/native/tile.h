// The inner loops that products and attention share: C[rows, 16 columns a panel] (+)= A · B with A's elements broadcast.
//
// Every element of C is one chain of multiply-adds in ascending k, whatever the tile: so tiles of 8, 4, 2 and 1 rows
// give the same bits, and a row's result does not depend on which rows stand beside it.
#pragma once

#include "native/native.h"

template <class R> struct Columns;
template <> struct Columns<double> { typedef f64x8 V; static constexpr int lanes = 8, vectors = 2; };
template <> struct Columns<float> { typedef f32x16 V; static constexpr int lanes = 16, vectors = 1; };

constexpr int64_t PANEL = 16;

// What becomes of a tile's sums: they replace C, continue it (the chain goes on from C), are added to it, or are added
// after a multiplication by (row scale · column scale), rounding the product and the sum.
enum Finish { REPLACE, CONTINUE, ADD, ADD_SCALED };
struct Factors {
    const double *row, *column;
};

// MR rows times NP panels. a[r][k] at a + r*lda + k, or if A is TURNED at a + k*lda + r; b[p][k][0..15] at
// b + p*panel + k*ldb; c[r][p][0..15] at c + r*ldc + p*16.
template <Finish F, int MR, int NP, bool TURNED, class R>
static void tile(const R* a, int64_t lda, const R* b, int64_t ldb, int64_t panel, int64_t count, R* c, int64_t ldc,
                 const double* row_factors, const double* column_factors) {
    typedef typename Columns<R>::V V;
    constexpr int vectors = Columns<R>::vectors, lanes = Columns<R>::lanes, width = NP * vectors;
    V sum[MR][width];
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
        for (int w = 0; w < width; w++) sum[r][w] = F == CONTINUE ? load<V>(c + r * ldc + w * lanes) : splat(R(0));
    for (int64_t k = 0; k < count; k++) {
        V column[width];
#pragma GCC unroll 8
        for (int w = 0; w < width; w++)
            column[w] = load<V>(b + (w / vectors) * panel + k * ldb + (w % vectors) * lanes);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) {
            V broadcast = splat(TURNED ? a[k * lda + r] : a[r * lda + k]);
#pragma GCC unroll 8
            for (int w = 0; w < width; w++) sum[r][w] = multiply_add(broadcast, column[w], sum[r][w]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
        for (int w = 0; w < width; w++) {
            R* target = c + r * ldc + w * lanes;
            if constexpr (F == ADD_SCALED)
                store(target, load<V>(target) + sum[r][w] * (splat(row_factors[r]) * load<V>(column_factors + w * lanes)));
            else if constexpr (F == ADD)
                store(target, load<V>(target) + sum[r][w]);
            else
                store(target, sum[r][w]);
        }
}

template <Finish F, int MR, int NP, bool TURNED, class R>
static void tile_panels(int64_t panels, const R* a, int64_t lda, const R* b, int64_t ldb, int64_t panel, int64_t count,
                        R* c, int64_t ldc, Factors factors) {
    int64_t p = 0;
    for (; p + NP <= panels; p += NP)
        tile<F, MR, NP, TURNED, R>(a, lda, b + p * panel, ldb, panel, count, c + p * PANEL, ldc, factors.row,
                           factors.column + p * PANEL);
    for (; p < panels; p++)
        tile<F, MR, 1, TURNED, R>(a, lda, b + p * panel, ldb, panel, count, c + p * PANEL, ldc, factors.row,
                          factors.column + p * PANEL);
}

// Rows and panels of the largest tile, and of those of 4, 2 and 1 rows: as many sums as the registers hold.
#ifdef ISOBIT_PAIRS
template <class R> constexpr int MOST = 4 / Columns<R>::vectors;
template <class R> constexpr int WIDE = 1;
template <class R> constexpr int NEXT = 2 / Columns<R>::vectors;
#else
template <class R> constexpr int MOST = 8;
template <class R> constexpr int WIDE = 2 / Columns<R>::vectors;
template <class R> constexpr int NEXT = 4;
#endif

// Tiles with enough independent chains to hide the latency of a multiply-add, within the registers of the machine.
template <Finish F, bool TURNED = false, class R>
static void tile_product(int64_t rows, int64_t panels, const R* a, int64_t lda, const R* b, int64_t ldb, int64_t panel,
                         int64_t count, R* c, int64_t ldc, Factors factors = {nullptr, nullptr}) {
#define ISOBIT_TILES(MR, NP)                                                                      \
    tile_panels<F, MR, NP, TURNED, R>(panels, a, lda, b, ldb, panel, count, c, ldc, factors);     \
    rows -= MR, a += TURNED ? MR : MR * lda, c += MR * ldc, factors.row += MR
    while (rows >= MOST<R>) {
        ISOBIT_TILES(MOST<R>, WIDE<R>);
    }
    if (rows >= 4) {
        ISOBIT_TILES(4, 2);
    }
    if (rows >= 2) {
        ISOBIT_TILES(2, NEXT<R>);
    }
    if (rows >= 1) {
        ISOBIT_TILES(1, NEXT<R>);
    }
#undef ISOBIT_TILES
}

constexpr int64_t CHAIN = 32;

// C += A · B. In float64 the chain of C goes on; in float32 every 32 of k are a chain from zero that is added to C, so
// that its error grows with count / 32.
template <bool TURNED = false, class R>
static void accumulate(int64_t rows, int64_t panels, const R* a, int64_t lda, const R* b, int64_t ldb, int64_t count, R* c,
                       int64_t ldc) {
    if constexpr (sizeof(R) == sizeof(double)) {
        tile_product<CONTINUE, TURNED>(rows, panels, a, lda, b, ldb, PANEL, count, c, ldc);
    } else {
        for (int64_t k = 0; k < count; k += CHAIN)
            tile_product<ADD, TURNED>(rows, panels, a + (TURNED ? k * lda : k), lda, b + k * ldb, ldb, PANEL,
                                      count - k < CHAIN ? count - k : CHAIN, c, ldc);
    }
}

// ---- transposition of 16 rows into a panel [count][16] ----

template <class T> struct Bytes16;
#define INTERLEAVES(T, N, LOW, HIGH)                                                            \
    template <> struct Bytes16<T> {                                                             \
        typedef T V __attribute__((vector_size(16)));                                           \
        static constexpr int lanes = N;                                                         \
        static INLINE V low(V a, V b) { return __builtin_shufflevector(a, b, LOW); }            \
        static INLINE V high(V a, V b) { return __builtin_shufflevector(a, b, HIGH); }          \
    };
#define LIST(...) __VA_ARGS__
INTERLEAVES(uint8_t, 16, LIST(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
            LIST(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31))
INTERLEAVES(uint16_t, 8, LIST(0, 8, 1, 9, 2, 10, 3, 11), LIST(4, 12, 5, 13, 6, 14, 7, 15))
INTERLEAVES(float, 4, LIST(0, 4, 1, 5), LIST(2, 6, 3, 7))
#undef LIST
#undef INTERLEAVES
template <> struct Bytes16<int8_t> : Bytes16<uint8_t> {};

template <class T>
INLINE void transpose_rows(const T* const rows[16], int64_t count, T* out) {
    typedef typename Bytes16<T>::V V;
    constexpr int lanes = Bytes16<T>::lanes;
    int64_t k = 0;
    for (; k + lanes <= count; k += lanes)
        for (int group = 0; group < 16; group += lanes) {
            V now[lanes], next[lanes];
#pragma GCC unroll 16
            for (int i = 0; i < lanes; i++) now[i] = load<V>(rows[group + i] + k);
#pragma GCC unroll 4
            for (int round = lanes; round > 1; round /= 2) {
#pragma GCC unroll 16
                for (int i = 0; i < lanes / 2; i++) {
                    next[2 * i] = Bytes16<T>::low(now[i], now[i + lanes / 2]);
                    next[2 * i + 1] = Bytes16<T>::high(now[i], now[i + lanes / 2]);
                }
#pragma GCC unroll 16
                for (int i = 0; i < lanes; i++) now[i] = next[i];
            }
#pragma GCC unroll 16
            for (int i = 0; i < lanes; i++) store(out + (k + i) * PANEL + group, now[i]);
        }
    for (; k < count; k++)
        for (int i = 0; i < 16; i++) out[k * PANEL + i] = rows[i][k];
}
