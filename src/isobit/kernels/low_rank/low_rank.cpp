// A product and its adapters' part in one call. First every row's u: a thread takes some rows of one adapter. Then cells
// of the product, of some rows and panels: the sums, what the adapters of these rows add to these columns, the rounding.
// So a sum is added to and rounded while it is in the nearest cache, and a thread reads the same columns of each B in
// every call.
#include "low_rank/low_rank.h"

#include <algorithm>
#include <vector>

#include "native/replay.h"
#include "product/ordered.h"

namespace {

constexpr int64_t STRIP = 64, FEW = 8;  // rows of a thread's task, and those that fill no tile
constexpr int64_t ROWS = 16, COLUMNS = 64 * PANEL;  // of what B makes at a time
constexpr int64_t AT_ONCE = 32, FEW_SUMS = 1 << 14;  // panels at a time where there are few rows, so that few sums wait
constexpr int64_t KEPT = 1 << 20;  // sums whose memory is kept between calls: new memory costs more than to add to it
constexpr int64_t NARROW = 32;  // up to this rank B has panels without zeros in them
constexpr int64_t BESIDE = 4;   // rows whose A are read side by side
constexpr int64_t READ = 3;     // numbers of factors that a thread has from memory in a nanosecond

// The numbers of 16 pairs.
INLINE f32x16 first_of(u32x16 pairs) { return (f32x16)(pairs << 16); }
INLINE f32x16 second_of(u32x16 pairs) { return (f32x16)(pairs & 0xffff0000u); }

// Where subnormal numbers are kept, so not inlined into the products' scope.
__attribute__((noinline)) void add_scaled(const LowRank& g, int64_t row, int64_t column, int64_t columns, float scale,
                                          const float* delta) {
    float* line = g.total + row * g.columns + column;
    for (int64_t j = 0; j < columns; j++) line[j] += delta[j] * scale;
}

// The places of `tdp32-v1` or `vdp32-v1` that a rank up to NARROW has; those that pad it add one zero, which turns a chain
// of -0 into 0. B's panel is [rank / 2][16][2], out [MR rows, `stride` apart][16].
template <int MR>
void narrow_rows(const float* u, int64_t rank, int64_t order, const uint16_t* panel, float* out, int64_t stride) {
    f32x16 first[MR], second[MR];  // even and odd, or one chain
    for (int r = 0; r < MR; r++) first[r] = second[r] = splat(0.0f);
    for (int64_t k = 0; k < rank; k += 2) {
        const u32x16 pairs = load<u32x16>(panel + k * PANEL);
        const f32x16 left = first_of(pairs), right = second_of(pairs);
        for (int r = 0; r < MR; r++) {
            const f32x16 x = splat(u[r * NARROW + k]), y = splat(u[r * NARROW + k + 1]);
            if (order == TDP32) first[r] = multiply_add(x, left, first[r]), second[r] = multiply_add(y, right, second[r]);
            else first[r] = multiply_add(x, left, multiply_add(y, right, first[r]));
        }
    }
    for (int r = 0; r < MR; r++) {
        if (rank + 1 < NARROW) first[r] = first[r] + splat(0.0f), second[r] = second[r] + splat(0.0f);
        const f32x16 sum = order == TDP32 ? first[r] + second[r] : first[r];
        store(out + r * stride, sum + splat(0.0f));
    }
}

// A row of the result, its adapter, and its u [ranks].
struct Row {
    const LowRankFactors* own;
    int64_t row;
    uint16_t* u;
};

// Whether two adapters' parts have the same columns and ranks, none beyond NARROW: their rows are then multiplied together.
bool alike(const LowRankFactors& a, const LowRankFactors& b) {
    if (a.count != b.count) return false;
    for (int64_t i = 0; i < a.count; i++) {
        const LowRankPart &one = a.parts[i], &other = b.parts[i];
        if (one.rank > NARROW || one.rank != other.rank || one.lo != other.lo || one.hi != other.hi) return false;
    }
    return true;
}

// Rows of u from place `at` on, times B of part `i` at columns from `start` on, each by its own adapter, for a rank up to
// NARROW; out[row][columns], rows padded to whole panels. All B are read side by side: the processor reads several runs
// of memory faster than one.
__attribute__((noinline)) void narrow(const LowRank& g, const Row* each, int64_t rows, int64_t i, int64_t at, int64_t start,
                                      int64_t columns, float* out) {
    alignas(64) float values[ROWS * NARROW];
    const uint16_t* b[ROWS];
    const int64_t stride = padded(columns, PANEL), rank = each[0].own->parts[i].rank, depth = padded(rank, 2);
    for (int64_t r = 0; r < rows; r++) {
        b[r] = (const uint16_t*)each[r].own->parts[i].b + start * depth;
        for (int64_t k = 0; k < NARROW; k++) values[r * NARROW + k] = k < rank ? decode_scalar(each[r].u[at + k]) : 0.0f;
    }
    Flushing flushing;
    for (int64_t column = 0; column < columns; column += PANEL, out += PANEL)
        for (int64_t r = 0; r < rows;) {
            const bool four = r + 4 <= rows && b[r + 1] == b[r] && b[r + 2] == b[r] && b[r + 3] == b[r];
            const uint16_t* panel = b[r] + column * depth;
            if (four) narrow_rows<4>(values + r * NARROW, rank, g.order, panel, out + r * stride, stride);
            else narrow_rows<1>(values + r * NARROW, rank, g.order, panel, out + r * stride, stride);
            r += four ? 4 : 1;
        }
}

// p.m rows of `a` times B [n, k], packed.
__attribute__((noinline)) void multiply(Product& p, OrderedPart run, const uint16_t* a, int64_t a_row, int64_t k,
                                        const void* packed, int64_t n, void* out) {
    p.a = a, p.a_row = a_row, p.k = k, p.packed = packed, p.n = n, p.out = out;
    Flushing flushing;
    run(p, 0, p.m, 0, padded(n, PANEL) / PANEL);
}

// The rows of one adapter, or some of them, and their u [rows][ranks].
struct Strip {
    const LowRankFactors* own;
    const int64_t* rows;
    int64_t count;
    uint16_t* u;
};

// A row of x in BF16: copied, or its codes times their scales.
void row_of_x(const LowRank& g, int64_t row, uint16_t* out) {
    if (g.x) {
        std::memcpy(out, (const uint16_t*)g.x + row * g.x_row, g.k * sizeof *out);
        return;
    }
    const Scales& scales = g.product->scale_a;
    const uint8_t* codes = (const uint8_t*)g.product->a + row * g.product->a_row;
    const float* scale = scales.data + row / scales.block_rows * scales.row_stride;
    for (int64_t k = 0; k < g.k; scale += scales.column_stride) {
        const int64_t end = k + scales.block_columns < g.k ? k + scales.block_columns : g.k;
        for (; k + 16 <= end; k += 16) store(out + k, to_bf16(decode(codes + k) * splat(*scale)));
        for (; k < end; k++) out[k] = to_bf16(decode_scalar(codes[k]) * *scale);
    }
}

// The sums of `tdp32-v1` over two blocks of 32 of K, or the last one: of a panel of A, 16 ranks, or of half a panel, which
// has both blocks beside each other. x has zeros up to whole pairs of blocks.
INLINE f32x16 whole_blocks(const float* x, bool both, const uint16_t* panel, f32x16 total) {
    for (int64_t block = 0; block < 1 + both; block++) {
        f32x16 even = splat(0.0f), odd = splat(0.0f);
        for (int64_t k = 0; k < DEPTH; k += 2, x += 2, panel += 2 * PANEL) {
            const u32x16 pairs = load<u32x16>(panel);
            even = multiply_add(splat(x[0]), first_of(pairs), even);
            odd = multiply_add(splat(x[1]), second_of(pairs), odd);
        }
        total = total + (even + odd);
    }
    return total;
}
INLINE f32x16 half_blocks(const float* x, bool both, const uint16_t* panel, f32x16 total) {
    const auto beside = [](const float* one) { return join(low_half(splat(one[0])), low_half(splat(one[DEPTH]))); };
    f32x16 even = splat(0.0f), odd = splat(0.0f);
    for (int64_t k = 0; k < DEPTH; k += 2, x += 2, panel += 2 * PANEL) {
        const u32x16 pairs = load<u32x16>(panel);
        even = multiply_add(beside(x), first_of(pairs), even);
        odd = multiply_add(beside(x + 1), second_of(pairs), odd);
    }
    const f32x16 sum = even + odd;
    f32x8 found = low_half(total) + low_half(sum);
    if (both) found = found + high_half(sum);
    return join(found, high_half(total));
}

// u of up to BESIDE rows in `tdp32-v1`, whose adapters' A are read side by side.
__attribute__((noinline)) void find_few(const LowRank& g, const Row* each, int64_t count) {
    static thread_local Scratch scratch;
    const int64_t stride = padded(g.k, 2 * DEPTH), depth = padded(g.k, DEPTH);
    float* x = (float*)scratch.get(count * stride / 2 + stride / 4);
    uint16_t* row = (uint16_t*)(x + count * stride);
    int64_t most = 0;
    for (int64_t r = 0; r < count; r++) {
        row_of_x(g, each[r].row, row);
        decode_row(row, g.k, x + r * stride);
        std::fill(x + r * stride + g.k, x + (r + 1) * stride, 0.0f);
        if (each[r].own->ranks > most) most = each[r].own->ranks;
    }
    Flushing flushing;
    for (int64_t rank = 0; rank < most; rank += PANEL) {
        f32x16 total[BESIDE];
        for (f32x16& one : total) one = splat(0.0f);
        for (int64_t k = 0; k < depth; k += 2 * DEPTH)
            for (int64_t r = 0; r < count; r++) {
                const LowRankFactors& own = *each[r].own;
                const uint16_t* a = (const uint16_t*)own.a + rank * depth;
                const bool both = k + DEPTH < depth;
                if (rank < own.whole) total[r] = whole_blocks(x + r * stride + k, both, a + k * PANEL, total[r]);
                else if (rank < own.ranks) total[r] = half_blocks(x + r * stride + k, both, a + k * PANEL / 2, total[r]);
            }
        for (int64_t r = 0; r < count; r++) {
            alignas(64) float sums[PANEL];
            store(sums, total[r]);
            const int64_t left = each[r].own->ranks - rank;
            if (left > 0) round_row(sums, left < PANEL ? left : PANEL, each[r].u + rank);
        }
    }
}

// Half a panel as a whole one, for the products of many rows.
void whole_of(const uint16_t* half, int64_t k, uint16_t* out) {
    for (int64_t block = 0; block < padded(k, DEPTH) / DEPTH; block++)
        for (int64_t pair = 0; pair < DEPTH / 2; pair++, out += 2 * PANEL) {
            std::memcpy(out, half + block / 2 * DEPTH * PANEL + pair * 2 * PANEL + block % 2 * PANEL, PANEL * sizeof *out);
            std::memset(out + PANEL, 0, PANEL * sizeof *out);
        }
}

void find_u(const LowRank& g, const Strip& strip) {
    static thread_local Scratch scratch;
    const LowRankFactors& own = *strip.own;
    const int64_t rest = own.ranks - own.whole, depth = padded(g.k, DEPTH);
    uint16_t* x = (uint16_t*)scratch.get((strip.count * (padded(g.k, PANEL) + padded(own.ranks, PANEL)) + depth * PANEL) / 4);
    uint16_t *found = x + strip.count * padded(g.k, PANEL), *panel = found + strip.count * padded(own.ranks, PANEL);
    for (int64_t r = 0; r < strip.count; r++) row_of_x(g, strip.rows[r], x + r * g.k);
    const OrderedPart run = ordered_path(strip.count <= FEW ? g.isa_of_few : g.isa);
    Product p{};
    p.kind_a = p.kind_b = p.out_kind = BF16, p.m = strip.count, p.a_column = 1, p.threads = 1, p.order = g.order;
    if (own.whole) multiply(p, run, x, g.k, g.k, own.a, own.whole, rest ? found : strip.u);
    if (!rest) return;
    uint16_t* last = found + strip.count * own.whole;
    whole_of((const uint16_t*)own.a + own.whole * depth, g.k, panel);
    multiply(p, run, x, g.k, g.k, panel, rest, last);
    for (int64_t r = 0; r < strip.count; r++) {
        std::memcpy(strip.u + r * own.ranks, found + r * own.whole, own.whole * sizeof *found);
        std::memcpy(strip.u + r * own.ranks + own.whole, last + r * rest, rest * sizeof *found);
    }
}

// What adapters that are alike, or one, add to rows that follow one another, at columns `begin` to `end` of the weight.
void add_rows(const LowRank& g, const Row* each, int64_t rows, int64_t begin, int64_t end, float* delta) {
    const LowRankFactors& own = *each[0].own;
    Product p{};
    p.kind_a = p.kind_b = BF16, p.out_kind = FP32, p.m = rows, p.a_column = 1, p.threads = 1, p.order = g.order;
    for (int64_t i = 0, at = 0; i < own.count; at += own.parts[i++].rank) {
        const LowRankPart& part = own.parts[i];
        const int64_t first = begin > part.lo ? begin : part.lo, last = end < part.hi ? end : part.hi;
        const bool few = part.rank <= NARROW;
        for (int64_t column = first; column < last;) {  // B's panels begin at `lo`
            const int64_t skipped = (column - part.lo) % PANEL, start = column - skipped;
            const int64_t stop = start + COLUMNS < last ? start + COLUMNS : last, columns = stop - start;
            const uint16_t* b = (const uint16_t*)part.b + (start - part.lo) * padded(part.rank, DEPTH);
            if (few) narrow(g, each, rows, i, at, start - part.lo, columns, delta);
            else multiply(p, ordered_path(rows <= FEW ? g.isa_of_few : g.isa), each[0].u + at, own.ranks, part.rank, b, columns, delta);
            const int64_t stride = few ? padded(columns, PANEL) : columns;
            for (int64_t r = 0; r < rows; r++)
                add_scaled(g, each[r].row, column, stop - column, float(each[r].own->scale), delta + r * stride + skipped);
            column = stop;
        }
    }
}

}  // namespace

EXPORT void isobit_ordered_product(const Product* arguments);

EXPORT void isobit_low_rank(const LowRank* arguments) {
    static thread_local Scratch scratch, kept;
    Scratch large;
    LowRank g = *arguments;
    Product product{};
    product.m = g.rows_of_x, product.n = g.columns;
    if (g.product) {
        const int64_t sums = padded(g.rows_of_x * g.columns, 16);
        g.total = (float*)(sums <= KEPT ? kept : large).get(sums / 2);
        product = *g.product, product.out = g.total;
    }
    std::vector<Strip> strips;
    std::vector<Row> few, each(g.rows_of_x, Row{});
    int64_t size = 0, work = 0, read = 0;
    for (int64_t i = 0; i < g.count; i++)
        if (const LowRankFactors* own = g.adapters[i * g.adapter_step]) size += (g.offsets[i + 1] - g.offsets[i]) * own->ranks;
    uint16_t* u = (uint16_t*)scratch.get(size / 4 + 1);
    for (int64_t i = 0; i < g.count; i++) {
        const LowRankFactors* own = g.adapters[i * g.adapter_step];
        const int64_t end = g.offsets[i + 1], rows = end - g.offsets[i];
        if (!own || !rows) continue;
        work += rows * own->ranks, read += own->ranks;
        const bool beside = rows <= FEW && g.order == TDP32;
        for (int64_t at = g.offsets[i]; !beside && at < end; at += STRIP)
            strips.push_back({own, g.rows + at, end - at < STRIP ? end - at : STRIP, u + (at - g.offsets[i]) * own->ranks});
        for (int64_t at = g.offsets[i]; at < end; at++, u += own->ranks) {
            each[g.rows[at]] = {own, g.rows[at], u};
            if (beside) few.push_back(each[g.rows[at]]);
        }
    }
    if (g.product && !work) {  // the weight alone
        product.out = g.out, product.out_kind = BF16;
        return isobit_ordered_product(&product);
    }
    const int64_t steps = work / 32 + read / READ, alone = strips.size(), groups = (few.size() + BESIDE - 1) / BESIDE;
    for_each_in_turn(useful_threads(g.threads, steps * g.k), alone + groups, [&](int64_t i) {
        const int64_t first = (i - alone) * BESIDE, left = int64_t(few.size()) - first;
        if (i < alone) find_u(g, strips[i]);
        else find_few(g, &few[first], left < BESIDE ? left : BESIDE);
    });
    const int threads = useful_threads(g.threads, steps * g.columns + g.columns * product.k * (g.rows_of_x + 4) / 96);
    in_cells(product, threads, 16, 4, [&](int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
        static thread_local Scratch room;
        float* delta = (float*)room.get(ROWS * COLUMNS / 2);
        const int64_t most = row_end - row <= FEW_SUMS / (AT_ONCE * PANEL) ? AT_ONCE : panel_end - panel;
        for (int64_t next_panel; panel < panel_end; panel = next_panel) {
            next_panel = panel + most < panel_end ? panel + most : panel_end;
            const int64_t begin = panel * PANEL, end = next_panel * PANEL < g.columns ? next_panel * PANEL : g.columns;
            if (g.product) {
                Flushing flushing;
                ordered_path(product.isa)(product, row, row_end, panel, next_panel);
            }
            for (int64_t r = row, next; r < row_end; r = next) {
                const Row& one = each[r];
                const auto joins = [&](const Row& other) {
                    const bool same = other.own == one.own && other.u == each[next - 1].u + one.own->ranks;
                    return same || (other.own && alike(*one.own, *other.own));
                };
                for (next = r + 1; one.own && next < row_end && next < r + ROWS && joins(each[next]);) next++;
                if (one.own) add_rows(g, &one, next - r, begin, end, delta);
                for (; r < next; r++)
                    round_row(g.total + r * g.columns + begin, end - begin, (uint16_t*)g.out + r * g.columns + begin);
            }
        }
    });
}
REPLAYED(isobit_low_rank)
