// `vdp32-v1` with AVX512-BF16: VDPBF16PS is its definition. A's rows are made BF16 pairs of k; B's codes are decoded in
// registers where one tile has all rows, and for more of them once a block, which stays in the first cache.
#include "product/ordered.h"

#include <type_traits>

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#include "product/ordered_avx512.h"
#include "product/ordered_kernel.h"
#include "product/ordered_pairs.h"
#include "product/ordered_rows.h"

namespace {

constexpr int64_t MOST = 8;  // rows of a tile

INLINE Vec dot(Vec c, uint32_t pair_of_a, __m512i pairs) {
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_set1_epi32((int)pair_of_a), (__m512bh)pairs);
}

// Codes under powers of two that change within 128 of K or from one column to the next, such as those of MXFP8: the unscaled
// table, and then an addition to the exponents of all that is not zero.
struct ShiftedSource {
    static constexpr int64_t bytes = 1;
    const Table& table = unscaled();
    __m512i added[4][STEP / DEPTH];
    // False where a scale is none, or a product might be subnormal or infinite.
    bool begin(const Product& g, int64_t panel, int64_t panels, int64_t k) {
        for (int64_t p = 0; p < panels; p++)
            for (int64_t i = 0; i < STEP / DEPTH && k + i * DEPTH < g.k; i++) {
                alignas(64) float scale[PANEL];
                const int64_t first = (panel + p) * PANEL;
                g.scale_b.fill(first, PANEL, g.n, k + i * DEPTH, scale);
                for (int64_t j = g.n - first; j < PANEL; j++) scale[j] = 1.0f;
                const __m512i bits = _mm512_load_si512(scale), least = _mm512_set1_epi32(27 << 23);
                if (_mm512_test_epi32_mask(bits, _mm512_set1_epi32((int)0x807fffff)) ||
                    _mm512_cmpgt_epu32_mask(_mm512_sub_epi32(bits, least), _mm512_set1_epi32(200 << 23)))
                    return false;
                const __m512i more = _mm512_sub_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(127 << 7));
                added[p][i] = _mm512_or_si512(_mm512_slli_epi32(more, 16), _mm512_and_si512(more, _mm512_set1_epi32(0xffff)));
            }
        return true;
    }
    INLINE void load(const uint8_t* p, __m512i& first, __m512i& second) const {
        decode_pairs(_mm512_loadu_si512(p), table, first, second);
    }
    INLINE __m512i shifted(__m512i pairs, int p, int64_t i) const {
        return _mm512_mask_add_epi16(pairs, _mm512_test_epi16_mask(pairs, _mm512_set1_epi16(0x7fff)), pairs, added[p][i / DEPTH]);
    }
};
template <class Source>
INLINE bool begins(Source& source, const Product& g, int64_t panel, int64_t, int64_t k) {
    source.begin(g, panel, k);
    return true;
}
INLINE bool begins(ShiftedSource& source, const Product& g, int64_t panel, int64_t panels, int64_t k) {
    return source.begin(g, panel, panels, k);
}

// A block of up to 128 of K: tiles of `tall` rows of A, `a_step` apart; panels of B, `stride` bytes apart, from `at` on, and
// room for their pairs [4][STEP / 2][16][2]; and the scales of rows and columns.
struct Block {
    const uint16_t* a;
    const uint8_t* b;
    uint16_t* pairs;
    int64_t tall, a_step, stride, at, count;
    const float *row_scale, *column_scale;
};

// What MR rows from `row` on and NP panels have over a block, added to total[row][NP * 16].
template <bool SCALED, int MR, int NP>
INLINE void add_block(const Block& block, const Vec (&sum)[MR][NP], int64_t row, float* total) {
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
        for (int p = 0; p < NP; p++) {
            float* to = total + ((row + r) * NP + p) * PANEL;
            if constexpr (SCALED) {
                const Vec scale = mul(vsplat(block.row_scale[row + r]), vload(block.column_scale + p * PANEL));
                vstore(to, fma(sum[r][p], scale, vload(to)));
            } else {
                vstore(to, add(vload(to), sum[r][p]));
            }
        }
}

// Where a tile's B is, and what becomes of it: in memory, so that it asks for more; there too, and it keeps the pairs that it
// has decoded for the rows after it; or among those pairs.
enum From { MEMORY, MEMORY_KEPT, KEPT };

// MR rows from `row` on, all of one tile of A, times NP panels over a block, added to total[row][NP * 16].
template <class Source, bool SCALED, int MR, int NP, From FROM>
INLINE void tile(const Source& source, const Block& block, int64_t row, float* total) {
    const uint32_t* a = (const uint32_t*)(block.a + row / TALL * block.a_step + row % TALL * DEPTH);
    const int64_t next = block.tall * DEPTH / 2;
    Vec sum[MR][NP];
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
        for (int p = 0; p < NP; p++) sum[r][p] = vzero();
#pragma GCC unroll 2
    for (int64_t i = 0; i < block.count; i += 4) {
        const uint32_t* pair = a + i / DEPTH * next + i % DEPTH / 2;
#pragma GCC unroll 8
        for (int p = 0; p < NP; p++) {
            const uint8_t* panel = block.b + p * block.stride;
            const int64_t at = block.at + i * PANEL * Source::bytes;
            __m512i first, second;
            source.load(panel + at, first, second);
            if constexpr (std::is_same_v<Source, ShiftedSource>)
                first = source.shifted(first, p, i), second = source.shifted(second, p, i);
            if constexpr (FROM == MEMORY_KEPT) {
                uint16_t* to = block.pairs + (p * STEP + i) * PANEL;
                _mm512_storeu_si512(to, first), _mm512_storeu_si512(to + 2 * PANEL, second);
            }
            if constexpr (FROM != KEPT) ask_for<NP, 64 * Source::bytes>(panel, at, block.stride);
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) sum[r][p] = dot(sum[r][p], pair[r * DEPTH / 2], first);
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++) sum[r][p] = dot(sum[r][p], pair[r * DEPTH / 2 + 1], second);
        }
    }
    add_block<SCALED, MR, NP>(block, sum, row, total);
}

// The first MR rows times NP panels of four-bit codes over a block, multiplied as they are decoded, between what is decoded
// next; it keeps the pairs for rows after these. False, and nothing done, where they are not to be decoded so.
template <bool SCALED, int NP, int MR, bool KEEPS>
INLINE bool decoded_tile(const Product& g, const Block& block, int64_t panel, int64_t k, float* total) {
    const uint32_t* a = (const uint32_t*)block.a;
    const int64_t next = block.tall * DEPTH / 2;
    uint16_t* pairs_out = block.pairs;
    Vec sum[MR][NP];
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
        for (int p = 0; p < NP; p++) sum[r][p] = vzero();
    const auto put = [&](int p, int64_t pair, __m512i pairs) {
        const uint32_t* of_a = a + pair / (DEPTH / 2) * next + pair % (DEPTH / 2);
        if constexpr (KEEPS) _mm512_storeu_si512(pairs_out + (p * STEP + 2 * pair) * PANEL, pairs);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) sum[r][p] = dot(sum[r][p], of_a[r * DEPTH / 2], pairs);
    };
    if (!pairs_of_block<NP>(g, panel, k, put)) return false;
    add_block<SCALED, MR, NP>(block, sum, 0, total);
    return true;
}

// As many of the first rows as a tile has. Of fewer than four, sums would wait for each other without a second panel.
template <bool SCALED, int NP>
int64_t decoded_rows(const Product& g, const Block& block, int64_t rows, int64_t panel, int64_t k, float* total) {
#define ISOBIT_DECODED(MR, KEEPS) decoded_tile<SCALED, NP, MR, KEEPS>(g, block, panel, k, total) ? MR : 0
    if constexpr (NP == 1) {
        if (rows > MOST) return ISOBIT_DECODED(MOST, true);
        if (rows == MOST) return ISOBIT_DECODED(MOST, false);
        if (rows >= 4) return ISOBIT_DECODED(4, true);
    } else if (rows > 3) {
        return 0;  // two panels' sums of so many would have no registers left
    }
    if (rows == 3) return ISOBIT_DECODED(3, false);
    if (rows == 2) return ISOBIT_DECODED(2, false);
    return ISOBIT_DECODED(1, false);
#undef ISOBIT_DECODED
}

// Rows from r on, a multiple of 4, times NP panels over a block: as few tiles as there can be.
template <class Source, bool SCALED, int NP, From FROM>
INLINE void tiles(const Source& source, const Block& block, int64_t r, int64_t rows, float* total) {
#define ISOBIT_ROWS(MR) \
    for (; r + MR <= rows; r += MR) tile<Source, SCALED, MR, NP, FROM>(source, block, r, total)
    if constexpr (NP <= 2) { ISOBIT_ROWS(MOST); }
    ISOBIT_ROWS(4);
    if constexpr (NP > 2) { ISOBIT_ROWS(3); }
    ISOBIT_ROWS(2);
    ISOBIT_ROWS(1);
#undef ISOBIT_ROWS
}

// The same of pairs that a block keeps.
template <bool SCALED, int NP>
void kept_tiles(Block block, int64_t r, int64_t rows, float* total) {
    block.b = (const uint8_t*)block.pairs, block.stride = 2 * STEP * PANEL, block.at = 0;
    tiles<Bf16Source, SCALED, NP, KEPT>({}, block, r, rows, total);
}

// Of what needs more than that: codes under finer grids of scales, of E5M2, of two to a byte.
struct AnySource {
    static constexpr int64_t bytes = 1;
    void begin(const Product&, int64_t, int64_t) {}
};

// Whether the codes of up to 4 panels have one scale for every 128 of K.
bool uniform(const Product& g) {
    const Scales& s = g.scale_b;
    return (s.block_rows % (4 * PANEL) == 0 || s.block_rows >= g.n) && (s.block_columns % STEP == 0 || s.block_columns >= g.k);
}

// Whether each has one for every 32 of K.
bool by_32(const Product& g) { return g.scale_b.block_columns % DEPTH == 0 || g.scale_b.block_columns >= g.k; }

// What a thread holds beside the operands of a chunk of rows.
struct Room {
    int64_t tall;
    uint16_t *a, *pairs;                // tiles of `tall` rows and all K, and a block of four panels of B
    float *row_scale, *total, *values;  // [blocks][rows], [rows][4][16], [STEP][16]
};

// Rows of a chunk times NP panels. The first tile of rows decodes B's codes, between its products; others read its pairs.
template <class Source, bool SCALED, int NP>
void panels_of(const Product& g, Source& source, int64_t row, int64_t rows, int64_t panel, const Room& room) {
    constexpr bool any = std::is_same_v<Source, AnySource>, table = Source::bytes == 1 && !any;
    const int64_t depth = padded(g.k, DEPTH);
    alignas(64) float column_scale[NP * PANEL];
    float* total = room.total;
    std::memset(total, 0, rows * NP * PANEL * sizeof(float));
    for (int64_t k = 0; k < depth; k += STEP) {
        const int64_t count = depth - k < STEP ? depth - k : STEP;
        if (SCALED) g.scale_b.fill(panel * PANEL, NP * PANEL, g.n, k, column_scale);
        const uint8_t* b = (const uint8_t*)g.packed + packed_offset(g, panel, 0) * Source::bytes;
        const Block block{room.a + k * room.tall, b, room.pairs, room.tall, depth * room.tall, depth * PANEL * Source::bytes,
                          k * PANEL * Source::bytes, count, room.row_scale + k / STEP * rows, column_scale};
        if (!begins(source, g, panel, NP, k) || any) {
            int64_t done = 0;
            if constexpr (any && NP <= 2) done = decoded_rows<SCALED, NP>(g, block, rows, panel, k, total);
            for (int64_t p = 0; done == 0 && p < NP; p++)
                pairs_of_panel(g, panel + p, k, count, room.values, room.pairs + p * STEP * PANEL);
            if (done < rows) kept_tiles<SCALED, NP>(block, done, rows, total);
        } else if constexpr (!any) {
            if (table && NP <= 2 && rows > MOST) {
                tile<Source, SCALED, MOST, NP, MEMORY_KEPT>(source, block, 0, total);
                kept_tiles<SCALED, NP>(block, MOST, rows, total);
            } else if (table && NP <= 2 && rows > 4 && rows < MOST) {
                tile<Source, SCALED, 4, NP, MEMORY_KEPT>(source, block, 0, total);
                kept_tiles<SCALED, NP>(block, 4, rows, total);
            } else {
                tiles<Source, SCALED, NP, MEMORY>(source, block, 0, rows, total);
            }
        }
    }
    const int64_t column = panel * PANEL, columns = g.n - column < NP * PANEL ? g.n - column : NP * PANEL;
    finish(g, row, rows, column, columns, total, NP * PANEL);
}

// Groups of panels begin at multiples of NP, so that none crosses a block of scales.
template <class Source, bool SCALED, int NP>
void groups(const Product& g, int64_t row, int64_t rows, int64_t panel, int64_t panel1, const Room& room) {
    Source source;
    while (panel < panel1)
        if (panel % NP == 0 && panel + NP <= panel1)
            panels_of<Source, SCALED, NP>(g, source, row, rows, panel, room), panel += NP;
        else
            panels_of<Source, SCALED, 1>(g, source, row, rows, panel, room), panel += 1;
}

template <class Source, bool SCALED>
void rows_of(const Product& g, int64_t row, int64_t rows, int64_t panel0, int64_t panel1, const Room& room) {
    if (g.kind_b == E2M1 && rows > 3) groups<Source, SCALED, 1>(g, row, rows, panel0, panel1, room);
    else if (g.kind_b == E2M1) groups<Source, SCALED, 2>(g, row, rows, panel0, panel1, room);
    else if (rows <= 3) groups<Source, SCALED, 4>(g, row, rows, panel0, panel1, room);
    else groups<Source, SCALED, 2>(g, row, rows, panel0, panel1, room);
}

// Rows times panels, by the source that B's kind has.
void any_rows(const Product& g, int64_t row, int64_t rows, int64_t panel0, int64_t panel1, const Room& room) {
    const bool blocks = g.scaled & BLOCKS, codes = g.kind_b == E4M3;
    if (g.kind_b == BF16) rows_of<Bf16Source, false>(g, row, rows, panel0, panel1, room);
    else if (codes && blocks) rows_of<CodeSource<false>, true>(g, row, rows, panel0, panel1, room);
    else if (codes && g.scaled & FOLD_B && uniform(g)) rows_of<CodeSource<true>, false>(g, row, rows, panel0, panel1, room);
    else if (codes && g.scaled & FOLD_B && by_32(g)) rows_of<ShiftedSource, false>(g, row, rows, panel0, panel1, room);
    else if (blocks) rows_of<AnySource, true>(g, row, rows, panel0, panel1, room);
    else rows_of<AnySource, false>(g, row, rows, panel0, panel1, room);
}

void bf16_part(const Product& g, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    static thread_local Scratch scratch;
    const int64_t depth = padded(g.k, DEPTH), blocks = (depth + STEP - 1) / STEP;
    int64_t chunk = (1 << 18) / depth / 16 * 16;  // rows of A whose pairs stay within half a megabyte
    chunk = chunk < 32 ? 32 : chunk > 512 ? 512 : chunk;
    if (chunk > row1 - row0) chunk = row1 - row0;
    const int64_t tall = chunk < TALL ? padded(chunk, 2) : TALL;
    const int64_t tiles_of_a = padded(chunk, tall) * depth, scales = blocks * chunk;
    float* total = (float*)scratch.get((4 * chunk + 3 * STEP) * PANEL / 2 + (tiles_of_a + 2 * scales) / 4 + 16);
    float* values = total + 4 * chunk * PANEL;
    uint16_t *pairs = (uint16_t*)(values + STEP * PANEL), *a = pairs + 4 * STEP * PANEL;
    const Room room{tall, a, pairs, (float*)(a + tiles_of_a), total, values};
    for (int64_t row = row0; row < row1; row += chunk) {
        const int64_t rows = row1 - row < chunk ? row1 - row : chunk;
        pack_a(g, row, rows, 0, depth, tall, room.a);
        for (int64_t k = 0; g.scaled & BLOCKS && k < depth; k += STEP)
            g.scale_a.fill(row, rows, g.m, k, room.row_scale + k / STEP * rows);
        any_rows(g, row, rows, panel0, panel1, room);
    }
}

bool in_registers(const Product&, int64_t, int64_t, int64_t, int64_t, const float*, int64_t) { return false; }

}  // namespace

const OrderedPart ordered_bf16 = bf16_part;
#else
const OrderedPart ordered_bf16 = nullptr;
#endif
