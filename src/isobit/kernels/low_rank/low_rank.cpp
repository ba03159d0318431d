// A product and its adapters' part in one call. First every row's u: a thread takes some rows of one adapter. Then cells
// of the product, of some rows and panels: the sums, what the adapters of these rows add to these columns, the rounding.
// So a sum is added to and rounded while it is in the nearest cache, and a thread reads the same columns of each B in
// every call.
#include "low_rank/low_rank.h"

#include <vector>

#include "native/replay.h"
#include "product/ordered.h"

namespace {

constexpr int64_t STRIP = 64, FEW = 8;  // rows of a thread's task, and those that fill no tile
constexpr int64_t ROWS = 16, COLUMNS = 64 * PANEL;  // of what B makes at a time
constexpr int64_t AT_ONCE = 32, FEW_SUMS = 1 << 14;  // panels at a time where there are few rows, so that few sums wait
constexpr int64_t KEPT = 1 << 20;  // sums whose memory is kept between calls: new memory costs more than to add to it
constexpr int64_t NARROW = 32;  // up to this rank B has panels [rank][16], without zeros in them

// Where subnormal numbers are kept, so not inlined into the products' scope.
__attribute__((noinline)) void add_scaled(const LowRank& g, int64_t row, int64_t rows, int64_t column, int64_t columns,
                                          float scale, const float* delta, int64_t stride) {
    for (int64_t r = 0; r < rows; r++) {
        float* line = g.total + (row + r) * g.columns + column;
        for (int64_t j = 0; j < columns; j++) line[j] += delta[r * stride + j] * scale;
    }
}

// The places of `tdp32-v1` or `vdp32-v1` that a rank up to NARROW has; those that pad it add one zero, which turns a chain
// of -0 into 0. B's panel is [rank][16], out [MR rows, `stride` apart][16].
template <int MR>
void narrow_rows(const float* u, int64_t rank, int64_t order, const uint16_t* panel, float* out, int64_t stride) {
    f32x16 first[MR], second[MR];  // even and odd, or one chain
    for (int r = 0; r < MR; r++) first[r] = second[r] = splat(0.0f);
    for (int64_t k = 0; k < rank; k += 2) {
        const f32x16 left = decode(panel + k * PANEL), right = k + 1 < rank ? decode(panel + (k + 1) * PANEL) : splat(0.0f);
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

// Rows of u times columns of B, for a rank up to NARROW; out[row][columns], rows padded to whole panels.
__attribute__((noinline)) void narrow(const uint16_t* u, int64_t u_row, int64_t rows, int64_t rank, int64_t order,
                                      const uint16_t* b, int64_t columns, float* out) {
    alignas(64) float values[ROWS * NARROW];
    const int64_t stride = padded(columns, PANEL);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < NARROW; k++) values[r * NARROW + k] = k < rank ? decode_scalar(u[r * u_row + k]) : 0.0f;
    Flushing flushing;
    for (int64_t column = 0; column < columns; column += PANEL, b += rank * PANEL) {
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4) narrow_rows<4>(values + r * NARROW, rank, order, b, out + r * stride + column, stride);
        for (; r < rows; r++) narrow_rows<1>(values + r * NARROW, rank, order, b, out + r * stride + column, stride);
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

void find_u(const LowRank& g, const Strip& strip) {
    static thread_local Scratch scratch;
    uint16_t* x = (uint16_t*)scratch.get(strip.count * padded(g.k, PANEL) / 4);
    for (int64_t r = 0; r < strip.count; r++) row_of_x(g, strip.rows[r], x + r * g.k);
    Product p{};
    p.kind_a = p.kind_b = p.out_kind = BF16, p.m = strip.count, p.a_column = 1, p.threads = 1, p.order = g.order;
    multiply(p, ordered_path(strip.count <= FEW ? g.isa_of_few : g.isa), x, g.k, g.k, strip.own->a, strip.own->ranks, strip.u);
}

// What an adapter adds to rows that follow one another, at columns `begin` to `end` of the weight.
void add_rows(const LowRank& g, const LowRankFactors& own, const uint16_t* u, int64_t row, int64_t rows, int64_t begin,
              int64_t end, float* delta) {
    Product p{};
    p.kind_a = p.kind_b = BF16, p.out_kind = FP32, p.m = rows, p.a_column = 1, p.threads = 1, p.order = g.order;
    for (int64_t i = 0; i < own.count; u += own.parts[i++].rank) {
        const LowRankPart& part = own.parts[i];
        const int64_t first = begin > part.lo ? begin : part.lo, last = end < part.hi ? end : part.hi;
        const bool few = part.rank <= NARROW;
        const int64_t depth = few ? part.rank : padded(part.rank, DEPTH);
        for (int64_t column = first; column < last;) {  // B's panels begin at `lo`
            const int64_t skipped = (column - part.lo) % PANEL, start = column - skipped;
            const int64_t stop = start + COLUMNS < last ? start + COLUMNS : last, columns = stop - start;
            const uint16_t* b = (const uint16_t*)part.b + (start - part.lo) * depth;
            if (few) narrow(u, own.ranks, rows, part.rank, g.order, b, columns, delta);
            else multiply(p, ordered_path(rows <= FEW ? g.isa_of_few : g.isa), u, own.ranks, part.rank, b, columns, delta);
            add_scaled(g, row, rows, column, stop - column, float(own.scale), delta + skipped,
                       few ? padded(columns, PANEL) : columns);
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
    int64_t size = 0, work = 0;
    for (int64_t i = 0; i < g.count; i++)
        if (const LowRankFactors* own = g.adapters[i * g.adapter_step]) size += (g.offsets[i + 1] - g.offsets[i]) * own->ranks;
    uint16_t* u = (uint16_t*)scratch.get(size / 4 + 1);
    std::vector<const LowRankFactors*> adapter(g.rows_of_x, nullptr);
    std::vector<const uint16_t*> u_of(g.rows_of_x, nullptr);
    for (int64_t i = 0; i < g.count; i++) {
        const LowRankFactors* own = g.adapters[i * g.adapter_step];
        if (!own) continue;
        work += (g.offsets[i + 1] - g.offsets[i]) * own->ranks;
        for (int64_t at = g.offsets[i]; at < g.offsets[i + 1]; at += STRIP) {
            const int64_t count = g.offsets[i + 1] - at < STRIP ? g.offsets[i + 1] - at : STRIP;
            strips.push_back({own, g.rows + at, count, u});
            for (int64_t r = 0; r < count; r++, u += own->ranks) adapter[g.rows[at + r]] = own, u_of[g.rows[at + r]] = u;
        }
    }
    if (g.product && strips.empty()) {  // the weight alone
        product.out = g.out, product.out_kind = BF16;
        return isobit_ordered_product(&product);
    }
    for_each_in_turn(useful_threads(g.threads, work * g.k / 32), int64_t(strips.size()), [&](int64_t i) { find_u(g, strips[i]); });
    const int threads = useful_threads(g.threads, work * g.columns / 32 + g.columns * product.k * (g.rows_of_x + 4) / 96);
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
            for (int64_t r = row; r < row_end;) {
                const LowRankFactors* own = adapter[r];
                int64_t next = r + 1;
                while (own && next < row_end && next < r + ROWS && adapter[next] == own && u_of[next] == u_of[next - 1] + own->ranks)
                    next++;
                if (own) add_rows(g, *own, u_of[r], r, next - r, begin, end, delta);
                for (; r < next; r++)
                    round_row(g.total + r * g.columns + begin, end - begin, (uint16_t*)g.out + r * g.columns + begin);
            }
        }
    });
}
REPLAYED(isobit_low_rank)
