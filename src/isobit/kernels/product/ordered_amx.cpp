// `tdp32-v1` with AMX: TDPBF16PS is its definition. It has run on a Xeon, where all tests
// pass; the self-test decides whether it is used.
//
// Two tiles of 16 rows times two panels have four sums at a time: with fewer the unit waits for its own results, which
// take 52 clocks, a product takes 16. What tiles read lies as they read it.
#include "product/ordered.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512VBMI__)
#include "product/ordered_avx512.h"
#include "product/ordered_kernel.h"
#include "product/ordered_pairs.h"
#include "product/ordered_rows.h"

namespace {

constexpr int64_t SLAB = 256;                      // of K: two panels of it, and two tiles' rows, are in the nearest cache
constexpr int64_t LONG = 4096, PART = 2048;        // beyond LONG, K is taken in parts, with sums in memory between them
constexpr int64_t AHEAD = 1 << 14;                   // bytes between a prefetch of codes and their use
constexpr int64_t GROUP = 32;                      // panels whose sums are kept then
constexpr int64_t NEAR = 1 << 19, MOST = 512;      // BF16 numbers of A, and rows, that the second cache holds

constexpr int64_t WIDEST = 4, NARROW = 256;         // panels of one tile of rows, and their slab
constexpr int64_t ROOM = WIDEST * NARROW * PANEL;   // for what is decoded at a time
static_assert(2 * SLAB * PANEL <= ROOM);

// Tiles 0 to 3 are sums, 4 and 5 are of A, 5 to 7 of B. Fewer rows than 16 take as much less time.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    explicit TileConfig(int64_t of_a) {
        for (int i = 0; i < 8; i++) row_bytes[i] = 64, rows[i] = uint8_t(i < 5 ? of_a : TALL);
    }
};

// ---- sums: those of rows of 32 columns, [r][2][16] ----

constexpr int64_t ROW = 2 * PANEL, ROW_BYTES = ROW * sizeof(float);

template <int NR, int NP>
INLINE void zero_sums() {
    _tile_zero(0);
    if (NP == 2) _tile_zero(1);
    if (NR == 2) _tile_zero(2);
    if (NR == 2 && NP == 2) _tile_zero(3);
}
template <int NR, int NP>
INLINE void load_sums(const float* c) {
    _tile_loadd(0, c, ROW_BYTES);
    if (NP == 2) _tile_loadd(1, c + PANEL, ROW_BYTES);
    if (NR == 2) _tile_loadd(2, c + TALL * ROW, ROW_BYTES);
    if (NR == 2 && NP == 2) _tile_loadd(3, c + TALL * ROW + PANEL, ROW_BYTES);
}
template <int NR, int NP>
INLINE void store_sums(float* c) {
    _tile_stored(0, c, ROW_BYTES);
    if (NP == 2) _tile_stored(1, c + PANEL, ROW_BYTES);
    if (NR == 2) _tile_stored(2, c + TALL * ROW, ROW_BYTES);
    if (NR == 2 && NP == 2) _tile_stored(3, c + TALL * ROW + PANEL, ROW_BYTES);
}

// Lines of memory that come next, asked for one by one beside products: many at a time would have to wait for each other.
// Those of rows or of K, `stride` bytes apart, of `each` one or two.
template <int WRITES>
struct Lines {
    const uint8_t* first = nullptr;
    int64_t stride = 0, each = 1, other = 0, end = 0, next = 0, step = 0, due = 0;
    // Those before `last`, in so many steps.
    void spread(int64_t last, int64_t steps) { end = last, step = ((last - next) << 8) / steps + 1, due = next << 8; }
    INLINE void ask() {
        for (due += step; next << 8 < due && next < end; next++)
            __builtin_prefetch(first + (each == 2 ? next / 2 * stride + next % 2 * other : next * stride), WRITES, 2);
    }
};
struct Ahead {
    Lines<0> panels;
    Lines<1> results;
};

// NR tiles of A, `a_step` apart, times NP panels over `count` of K.
template <int NR, int NP>
INLINE void multiply(const uint16_t* a, int64_t a_step, const uint16_t* const (&b)[2], int64_t count, Ahead& ahead) {
    for (int64_t k = 0; k < count * TALL; k += TILE) {
        ahead.panels.ask(), ahead.results.ask();
        _tile_loadd(6, b[0] + k, 64);
        _tile_loadd(4, a + k, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (NP == 2) {
            _tile_loadd(7, b[1] + k, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (NR == 2) {
            _tile_loadd(5, a + a_step + k, 64);
            _tile_dpbf16ps(2, 5, 6);
            if (NP == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
}

// One tile of A times NP panels, added to sums 0 to NP - 1.
template <int NP>
INLINE void multiply_one(const uint16_t* a, const uint16_t* const (&b)[WIDEST], int64_t count) {
    for (int64_t k = 0; k < count * TALL; k += TILE) {
        _tile_loadd(4, a + k, 64);
        _tile_loadd(5, b[0] + k, 64);
        _tile_dpbf16ps(0, 4, 5);
        if (NP > 1) {
            _tile_loadd(6, b[1] + k, 64);
            _tile_dpbf16ps(1, 4, 6);
        }
        if (NP > 2) {
            _tile_loadd(7, b[2] + k, 64);
            _tile_dpbf16ps(2, 4, 7);
        }
        if (NP > 3) {
            _tile_loadd(5, b[3] + k, 64);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
}

// Where scales are no powers of two: of every 128 of K and 32 columns. row[block * stride + r], column[block * 32 + j].
struct Blocks {
    const float *row, *column;
    int64_t stride;
};

// The same added to `c`, from zero at the `beginning` of K.
template <int NR, int NP>
void add_tiles(const uint16_t* a, int64_t a_step, const uint16_t* const (&b)[2], int64_t count, int64_t rows,
               bool beginning, const Blocks* blocks, Ahead& ahead, float* c) {
    if (!blocks) {
        if (beginning) zero_sums<NR, NP>();
        else load_sums<NR, NP>(c);
        multiply<NR, NP>(a, a_step, b, count, ahead);
        return store_sums<NR, NP>(c);
    }
    alignas(64) float sums[NR * TALL * ROW];
    if (beginning) std::memset(c, 0, NR * TALL * ROW * sizeof(float));
    for (int64_t k = 0, block = 0; k < count; k += STEP, block++) {
        const uint16_t* const from[2] = {b[0] + k * PANEL, NP == 2 ? b[1] + k * PANEL : nullptr};
        zero_sums<NR, NP>();
        multiply<NR, NP>(a + k * TALL, a_step, from, count - k < STEP ? count - k : STEP, ahead);
        store_sums<NR, NP>(sums);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < NP * PANEL; j += PANEL) {
                const Vec of_row = vsplat(blocks->row[block * blocks->stride + r]);
                const Vec scale = mul(of_row, vload(blocks->column + block * ROW + j));
                float* target = c + r * ROW + j;
                vstore(target, fma(vload(sums + r * ROW + j), scale, vload(target)));
            }
    }
}

// ---- B ----

// Two panels of B as it is, `step` of K apart in `room`: rows of 32 columns, two of K together.
void paired_both(const Product& g, int64_t panel, int64_t first, int64_t last, int64_t step, uint16_t* room) {
    alignas(64) uint16_t places[2 * DEPTH];
    for (int i = 0; i < 2 * DEPTH; i++) places[i] = uint16_t(i / 2 + i % 2 * DEPTH);
    const __m512i one = _mm512_load_si512(places), other = _mm512_load_si512(places + DEPTH), none = _mm512_setzero_si512();
    const uint16_t* p = (const uint16_t*)g.b + panel * PANEL + first * g.b_column;
    for (int64_t k = first; k < last; k += 2, p += 2 * g.b_column, room += 2 * PANEL) {
        const __m512i even = k < g.k ? _mm512_loadu_si512(p) : none;
        const __m512i odd = k + 1 < g.k ? _mm512_loadu_si512(p + g.b_column) : none;
        _mm512_storeu_si512(room, _mm512_permutex2var_epi16(even, one, odd));
        _mm512_storeu_si512(room + step * PANEL, _mm512_permutex2var_epi16(even, other, odd));
    }
}

// The same of one panel.
void paired(const Product& g, int64_t panel, int64_t first, int64_t last, uint16_t* room) {
    const __m256i none = _mm256_setzero_si256();
    const uint16_t* p = (const uint16_t*)g.b + panel * PANEL + first * g.b_column;
    for (int64_t k = first; k < last; k += 2, p += 2 * g.b_column, room += 2 * PANEL) {
        const __m256i even = k < g.k ? _mm256_loadu_si256((const __m256i*)p) : none;
        const __m256i odd = k + 1 < g.k ? _mm256_loadu_si256((const __m256i*)(p + g.b_column)) : none;
        _mm512_storeu_si512(room, _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                                                  _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16)));
    }
}

// [first, last) of K of a panel as pairs of BF16 numbers, as tiles read it: where it is stored, or decoded into `room`.
const uint16_t* pairs_of(const Product& g, int64_t panel, int64_t first, int64_t last, float* values, uint16_t* room) {
    if (!g.packed) {
        paired(g, panel, first, last, room);
        return room;
    }
    if (g.kind_b == BF16) return (const uint16_t*)g.packed + packed_offset(g, panel, first);
    const bool fold = g.scaled & FOLD_B;
    const int64_t run = g.scale_b.block_columns;
    if (g.kind_b == E4M3 && (!fold || run % 4 == 0)) {
        const uint8_t* p = (const uint8_t*)g.packed + packed_offset(g, panel, first);
        for (int64_t k = first, end; k < last; k = end) {
            end = fold && (k / run + 1) * run < last ? (k / run + 1) * run : last;
            alignas(64) float scale[16] = {};
            if (fold && k < g.k) g.scale_b.fill(panel * PANEL, PANEL, g.n, k, scale);
            const Vec factor = vload(scale);
            for (int64_t i = k; i < end; i += 4, p += 64) {
                __m512i one, two;
                decode_pairs(_mm512_loadu_si512(p), unscaled(), one, two);
                _mm512_storeu_si512(room + (i - first) * PANEL, fold ? scaled(one, factor) : one);
                _mm512_storeu_si512(room + (i - first + 2) * PANEL, fold ? scaled(two, factor) : two);
            }
        }
        return room;
    }
    for (int64_t k = first; k < last; k += STEP) {
        const int64_t count = last - k < STEP ? last - k : STEP;
        pairs_of_panel(g, panel, k, count, values, room + (k - first) * PANEL);
    }
    return room;
}

// Several panels from `panel` on, each with room for `step` of K; codes under one scale by a table that has it.
void pairs_of_all(const Product& g, int64_t panel, int64_t panels, int64_t first, int64_t last, int64_t step, float* values,
                  uint16_t* room, const uint16_t** b) {
    if (!g.packed && panels == 2) {
        paired_both(g, panel, first, last, step, room);
        b[0] = room, b[1] = room + step * PANEL;
        return;
    }
    const Scales& s = g.scale_b;
    const bool one_scale = g.packed && g.kind_b == E4M3 && g.scaled & FOLD_B && first % STEP == 0 &&
                           (s.block_rows >= g.n || (s.block_rows % PANEL == 0 &&
                            panel * PANEL / s.block_rows == (panel + panels - 1) * PANEL / s.block_rows)) &&
                           (s.block_columns % STEP == 0 || s.block_columns >= g.k);
    for (int64_t p = 0; !one_scale && p < panels; p++)
        b[p] = pairs_of(g, panel + p, first, last, values, room + p * step * PANEL);
    if (!one_scale) return;
    static thread_local CodeSource<true> source;
    for (int64_t k = first; k < last; k += STEP) {
        source.begin(g, panel, k);
        for (int64_t p = 0; p < panels; p++) {
            const uint8_t* from = (const uint8_t*)g.packed + packed_offset(g, panel + p, k);
            uint16_t* to = room + (p * step + k - first) * PANEL;
            for (int64_t i = 0; i < (last - k < STEP ? last - k : STEP); i += 4, from += 64, to += 4 * PANEL) {
                __builtin_prefetch(from + AHEAD, 0, 2);
                __m512i one, two;
                source.load(from, one, two);
                _mm512_storeu_si512(to, one), _mm512_storeu_si512(to + 2 * PANEL, two);
            }
        }
    }
    for (int64_t p = 0; p < panels; p++) b[p] = room + p * step * PANEL;
}

// ---- the product ----

// At most 16 rows, whose tiles are `a`: four panels at a time, since a tile's product waits for the one before it.
template <int NP>
void few_rows(const Product& g, int64_t row, int64_t rows, int64_t panel, int64_t depth, const uint16_t* a, float* values,
              uint16_t* room, float* c) {
    constexpr int64_t WIDTH = NP * PANEL;
    alignas(64) float sums[TALL * WIDTH], row_scale[TALL], column_scale[WIDTH];
    const bool blocks = g.scaled & BLOCKS;
    const int64_t slab = blocks ? STEP : NARROW, column = panel * PANEL;
    if (blocks) std::memset(c, 0, rows * WIDTH * sizeof(float));
    for (int64_t k = 0, end; k < depth; k = end) {
        end = depth - k < slab ? depth : k + slab;
        const uint16_t* b[WIDEST] = {};
        pairs_of_all(g, panel, NP, k, end, NARROW, values, room, b);
        if (k == 0 || blocks) zero_sums<2, 2>();
        multiply_one<NP>(a + k * TALL, b, end - k);
        if (end < depth && !blocks) continue;
        float* to = blocks ? sums : c;
        _tile_stored(0, to, WIDTH * sizeof(float));
        if (NP > 1) _tile_stored(1, to + PANEL, WIDTH * sizeof(float));
        if (NP > 2) _tile_stored(2, to + 2 * PANEL, WIDTH * sizeof(float));
        if (NP > 3) _tile_stored(3, to + 3 * PANEL, WIDTH * sizeof(float));
        if (!blocks) continue;
        g.scale_a.fill(row, rows, g.m, k, row_scale);
        g.scale_b.fill(column, WIDTH, g.n, k, column_scale);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < WIDTH; j += PANEL) {
                const Vec scale = mul(vsplat(row_scale[r]), vload(column_scale + j));
                float* target = c + r * WIDTH + j;
                vstore(target, fma(vload(sums + r * WIDTH + j), scale, vload(target)));
            }
    }
    finish(g, row, rows, column, g.n - column < WIDTH ? g.n - column : WIDTH, c, WIDTH);
}

// What `pairs_of_all` will read of two panels: `count` of K from `first` on.
void ask_for_panels(const Product& g, int64_t panel, int64_t first, int64_t count, int64_t steps, Lines<0>& lines) {
    const int64_t size = g.packed && g.kind_b != BF16 ? 1 : 2;
    lines.next = 0, lines.each = g.packed ? 2 : 1, lines.stride = g.packed ? 64 : g.b_column * size;
    lines.other = padded(g.k, DEPTH) * PANEL * size;
    lines.first = g.packed ? (const uint8_t*)g.packed + packed_offset(g, panel, first) * size
                           : (const uint8_t*)g.b + (panel * PANEL + first * g.b_column) * size;
    const bool known = panel * PANEL < g.n && g.kind_b != E2M1;
    lines.spread(!known ? 0 : g.packed ? count * size / 2 : count, steps);
}

// What `finish` will write of `rows`, one part of it beside each of `parts` of K, which has so many steps.
void ask_for_results(const Product& g, int64_t row, int64_t rows, int64_t column, int64_t part, int64_t parts, int64_t steps,
                     Lines<1>& lines) {
    const int64_t size = g.out_kind == BF16 ? 2 : 4;
    lines.each = size / 2, lines.stride = g.n * size, lines.other = 64;
    lines.first = (const uint8_t*)g.out + (row * g.n + column) * size;
    lines.next = rows * lines.each * part / parts;
    lines.spread(rows * lines.each * (part + 1) / parts, steps);
}

// Rows of a chunk, whose tiles are `a`, times one or two panels over [first, last) of K, added to c[row][32]; finished
// at the end of K. What comes next is asked for meanwhile.
void add_panels(const Product& g, int64_t row, int64_t rows, int64_t panel, int64_t panels, int64_t first, int64_t last,
                const uint16_t* a, float* values, uint16_t* room, float* c) {
    const int64_t a_step = (last - first) * TALL, height = rows < TALL ? rows : TALL, column = panel * PANEL;
    const int64_t columns = g.n - column < panels * PANEL ? g.n - column : panels * PANEL, depth = padded(g.k, DEPTH);
    alignas(64) float row_scale[SLAB / STEP][2 * TALL], column_scale[SLAB / STEP][ROW];
    const Blocks blocks{row_scale[0], column_scale[0], 2 * TALL}, *scales = g.scaled & BLOCKS ? &blocks : nullptr;
    const int64_t slabs = (last - first + SLAB - 1) / SLAB;
    Ahead ahead;
    for (int64_t k = first, end; k < last; k = end) {
        end = last - k < SLAB ? last : k + SLAB;
        const int64_t next = end < last ? end : first, next_panel = end < last ? panel : panel + panels;
        ask_for_panels(g, next_panel, next, last - next < SLAB ? last - next : SLAB,
                       padded(rows, ROW) / ROW * ((end - k) / DEPTH), ahead.panels);
        const uint16_t* b[2] = {};
        pairs_of_all(g, panel, panels, k, end, SLAB, values, room, b);
        for (int64_t s = 0; scales && s < end - k; s += STEP)
            g.scale_b.fill(panel * PANEL, panels * PANEL, g.n, k + s, column_scale[s / STEP]);
        for (int64_t r = 0, count; r < rows; r += count) {
            const bool both = rows - r > TALL;
            count = both ? 2 * TALL : TALL;
            const int64_t there = rows - r < count ? rows - r : count;
            if (last == depth)
                ask_for_results(g, row + r, there, column, (k - first) / SLAB, slabs, (end - k) / DEPTH, ahead.results);
            for (int64_t s = 0; scales && s < end - k; s += STEP)
                g.scale_a.fill(row + r, both ? 2 * TALL : height, g.m, k + s, row_scale[s / STEP]);
            const uint16_t* from = a + r / TALL * a_step + (k - first) * TALL;
            const auto run = both ? (panels == 2 ? add_tiles<2, 2> : add_tiles<2, 1>)
                                  : (panels == 2 ? add_tiles<1, 2> : add_tiles<1, 1>);
            run(from, a_step, b, end - k, both ? 2 * TALL : height, k == 0, scales, ahead, c + r * ROW);
            if (end == depth) finish(g, row + r, there, column, columns, c + r * ROW, ROW);
        }
    }
}

void amx_part(const Product& g, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    static thread_local Scratch scratch;
    const int64_t depth = padded(g.k, DEPTH), part = depth <= LONG ? depth : PART;
    const int64_t group = part == depth ? panel1 - panel0 : GROUP, kept = part == depth ? 2 : GROUP;
    int64_t chunk = NEAR / part / ROW * ROW;
    chunk = chunk < ROW ? ROW : chunk > MOST ? MOST : chunk;
    const int64_t pieces = (row1 - row0 + chunk - 1) / chunk;  // of about the same size
    chunk = padded((row1 - row0 + pieces - 1) / pieces, TALL);
    const int64_t sums_kept = padded(chunk, ROW) * kept * PANEL;
    float* c = (float*)scratch.get((sums_kept + STEP * PANEL) / 2 + (chunk * part + ROOM) / 4 + 16);
    float* values = c + sums_kept;
    uint16_t *room = (uint16_t*)(values + STEP * PANEL), *a = room + ROOM;
    for (int64_t row = row0; row < row1; row += chunk) {
        const int64_t rows = row1 - row < chunk ? row1 - row : chunk;
        const TileConfig config(rows < TALL ? rows : TALL);
        _tile_loadconfig(&config);
        if (rows <= TALL && part == depth) {
            pack_a(g, row, rows, 0, depth, TALL, a);
            for (int64_t panel = panel0; panel < panel1; panel += WIDEST) {
                const int64_t left = panel1 - panel;
                const auto run = left > 3 ? few_rows<4> : left > 2 ? few_rows<3> : left > 1 ? few_rows<2> : few_rows<1>;
                run(g, row, rows, panel, depth, a, values, room, c);
            }
            continue;
        }
        for (int64_t from = panel0; from < panel1; from += group)
            for (int64_t k = 0; k < depth; k += part) {
                const int64_t end = depth - k < part ? depth : k + part;
                const int64_t to = panel1 - from < group ? panel1 : from + group;
                pack_a(g, row, rows, k, end, TALL, a);
                for (int64_t panel = from; panel < to; panel += 2) {
                    const int64_t panels = to - panel < 2 ? 1 : 2;
                    float* sums = part == depth ? c : c + (panel - from) / 2 * padded(chunk, ROW) * ROW;
                    add_panels(g, row, rows, panel, panels, k, end, a, values, room, sums);
                }
            }
    }
    _tile_release();
}

bool in_registers(const Product&, int64_t, int64_t, int64_t, int64_t, const float*, int64_t) { return false; }

}  // namespace

const OrderedPart ordered_amx = amx_part;
#else
const OrderedPart ordered_amx = nullptr;
#endif
