// `tdp32-v1` with AMX: TDPBF16PS is its definition. It has run on a Xeon, where all tests
// pass; the self-test decides whether it is used.
#include "product/ordered.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512VBMI__)
#include "product/ordered_avx512.h"
#include "product/ordered_kernel.h"

namespace {

// Tiles 0 and 1 are sums, 4 is of A, 6 and 7 are of B. Fewer rows than 16 take as much less time.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    explicit TileConfig(int64_t of_a) {
        for (int i = 0; i < 8; i++) row_bytes[i] = 64, rows[i] = uint8_t(i < 6 ? of_a : 16);
    }
};

// Rows of a tile of A, and one or two panels of B, over all K; out[r][32].
template <int NP>
void tiles(const Product& g, const uint16_t* a, int64_t rows, int64_t depth, const uint16_t* const (&b)[2],
           const float* row_scale, const float* column_scale, int64_t scale_stride, float* out) {
    alignas(64) float sums[2][256];
    const bool blocks = g.scaled & BLOCKS;
    _tile_zero(0);
    if (NP == 2) _tile_zero(1);
    for (int64_t k = 0; k < depth; k += DEPTH) {
        _tile_loadd(4, a + k, depth * 2);
        _tile_loadd(6, b[0] + k * PANEL, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (NP == 2) {
            _tile_loadd(7, b[1] + k * PANEL, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (k + DEPTH < depth && !(blocks && (k + DEPTH) % STEP == 0)) continue;
        _tile_stored(0, sums[0], 64);
        _tile_zero(0);
        if (NP == 2) {
            _tile_stored(1, sums[1], 64);
            _tile_zero(1);
        }
        const float* columns = column_scale + k / STEP * 2 * PANEL;
        for (int64_t r = 0; r < rows; r++)
            for (int p = 0; p < NP; p++) {
                float* target = out + r * 32 + p * 16;
                Vec sum = vload(sums[p] + r * 16);
                if (blocks)
                    sum = fma(sum, mul(vsplat(row_scale[r + k / STEP * scale_stride]), vload(columns + p * 16)),
                              vload(target));
                vstore(target, sum);
            }
    }
}

// A row of A as BF16 numbers; `line` has room for it in float32.
void bf16_row(const Product& g, int64_t row, int64_t depth, float* line, uint16_t* out) {
    if (g.kind_a == BF16 && g.a_column == 1 && !(g.scaled & FOLD_A)) {
        std::memcpy(out, (const uint16_t*)g.a + row * g.a_row, g.k * sizeof *out);
        std::memset(out + g.k, 0, (depth - g.k) * sizeof *out);
        return;
    }
    decode_a(g, row, 1, line, depth);
    for (int64_t k = 0; k < depth; k += 32) _mm512_storeu_si512(out + k, upper_halves(vload(line + k), vload(line + k + 16)));
}

INLINE __m512i scaled(__m512i pairs, Vec factor) { return pair_up(mul(even_of(pairs), factor), mul(odd_of(pairs), factor)); }

// A panel of B as pairs of BF16 numbers, as tiles read it: where it is stored, or decoded into `room`.
const uint16_t* pairs_of(const Product& g, int64_t panel, int64_t depth, float* values, uint16_t* room) {
    if (g.kind_b == BF16) return (const uint16_t*)g.packed + packed_offset(g, panel, 0);
    const bool fold = g.scaled & FOLD_B;
    if (g.kind_b == E4M3 && (!fold || g.scale_b.block_columns % 4 == 0)) {
        const uint8_t* p = (const uint8_t*)g.packed + packed_offset(g, panel, 0);
        const int64_t run = fold ? g.scale_b.block_columns : depth;
        for (int64_t start = 0; start < depth; start += run) {
            alignas(64) float scale[16] = {};
            if (fold && start < g.k) g.scale_b.fill(panel * PANEL, PANEL, g.n, start, scale);
            const Vec factor = vload(scale);
            for (int64_t k = start; k < depth && k < start + run; k += 4, p += 64) {
                __m512i first, second;
                decode_pairs(p, unscaled(), first, second);
                _mm512_storeu_si512(room + k * PANEL, fold ? scaled(first, factor) : first);
                _mm512_storeu_si512(room + (k + 2) * PANEL, fold ? scaled(second, factor) : second);
            }
        }
        return room;
    }
    for (int64_t k = 0; k < depth; k += STEP) {
        const int64_t count = depth - k < STEP ? depth - k : STEP;
        decode_b(g, panel, k, count, values);
        for (int64_t i = 0; i < count; i += 2)
            _mm512_storeu_si512(room + (k + i) * PANEL, pair_up(vload(values + i * 16), vload(values + i * 16 + 16)));
    }
    return room;
}

void amx_part(const Product& g, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    static thread_local Scratch wide, narrow;
    const int64_t depth = padded(g.k, DEPTH), blocks = (depth + STEP - 1) / STEP;
    int64_t chunk = (1 << 18) / depth / 16 * 16;
    chunk = chunk < 32 ? 32 : chunk > 512 ? 512 : chunk;
    if (chunk > row1 - row0) chunk = padded(row1 - row0, 16);
    uint16_t* a = (uint16_t*)narrow.get((chunk + 2 * PANEL) * depth / 4);
    uint16_t* room = a + chunk * depth;
    float* line = (float*)wide.get((depth + chunk * blocks + 2 * PANEL * blocks + STEP * PANEL + 512) / 2 + 8);
    float *values = line + depth, *out = values + STEP * PANEL, *column_scale = out + 512;
    float* row_scale = column_scale + 2 * PANEL * blocks;
    for (int64_t row = row0; row < row1; row += chunk) {
        const int64_t rows = row1 - row < chunk ? row1 - row : chunk, height = rows < 16 ? rows : 16;
        const TileConfig config(height);
        _tile_loadconfig(&config);
        for (int64_t r = 0; r < rows; r++) bf16_row(g, row + r, depth, line, a + r * depth);
        if (height == 16) std::memset(a + rows * depth, 0, (padded(rows, 16) - rows) * depth * sizeof *a);
        for (int64_t s = 0; g.scaled & BLOCKS && s < blocks; s++)
            g.scale_a.fill(row, padded(rows, 16), g.m, s * STEP, row_scale + s * chunk);
        for (int64_t panel = panel0; panel < panel1; panel += 2) {
            const int64_t panels = panel1 - panel < 2 ? 1 : 2, column = panel * PANEL;
            const uint16_t* b[2] = {};
            for (int64_t p = 0; p < panels; p++) b[p] = pairs_of(g, panel + p, depth, values, room + p * depth * PANEL);
            for (int64_t s = 0; g.scaled & BLOCKS && s < blocks; s++)
                g.scale_b.fill(column, panels * PANEL, g.n, s * STEP, column_scale + s * 2 * PANEL);
            const int64_t columns = g.n - column < panels * PANEL ? g.n - column : panels * PANEL;
            for (int64_t r = 0; r < rows; r += 16) {
                std::memset(out, 0, height * 32 * sizeof(float));
                (panels == 2 ? tiles<2> : tiles<1>)(g, a + r * depth, height, depth, b, row_scale + r, column_scale, chunk, out);
                for (int64_t i = 0; i < 16 && r + i < rows; i++) finish(g, row + r + i, column, columns, out + i * 32);
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
