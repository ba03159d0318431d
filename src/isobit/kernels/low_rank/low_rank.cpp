// The adapters' part of a product in one call: a thread takes some rows of one adapter, through all of its factors.
#include "low_rank/low_rank.h"

#include <vector>

#include "product/ordered.h"

namespace {

constexpr int64_t STRIP = 64, FEW = 8, COLUMNS = 64 * PANEL;  // rows of a thread's task; columns of B at a time

// Where subnormal numbers are kept, so not inlined into the products' scope.
__attribute__((noinline)) void add_scaled(const LowRank& g, const int64_t* rows, int64_t count, int64_t column,
                                          int64_t columns, float scale, const float* delta) {
    for (int64_t r = 0; r < count; r++) {
        float* line = g.total + rows[r] * g.columns + column;
        for (int64_t j = 0; j < columns; j++) line[j] += delta[r * columns + j] * scale;
    }
}

// p.m rows of `a` times B [n, k], packed.
__attribute__((noinline)) void multiply(Product& p, OrderedPart run, const uint16_t* a, int64_t a_row, int64_t k,
                                        const void* packed, int64_t n, void* out) {
    p.a = a, p.a_row = a_row, p.k = k, p.packed = packed, p.n = n, p.out = out;
    Flushing flushing;
    run(p, 0, p.m, 0, padded(n, PANEL) / PANEL);
}

void add_rows(const LowRank& g, const LowRankFactors& own, const int64_t* rows, int64_t count) {
    static thread_local Scratch scratch;
    uint16_t* x = (uint16_t*)scratch.get((count * (padded(g.k, PANEL) + padded(own.ranks, PANEL))) / 4 + count * COLUMNS / 2);
    uint16_t* u = x + count * padded(g.k, PANEL);
    float* delta = (float*)(u + count * padded(own.ranks, PANEL));
    for (int64_t r = 0; r < count; r++)
        std::memcpy(x + r * g.k, (const uint16_t*)g.x + rows[r] * g.x_row, g.k * sizeof(uint16_t));
    const OrderedPart run = ordered_path(count <= FEW ? g.isa_of_few : g.isa);
    Product p{};
    p.kind_a = p.kind_b = p.out_kind = BF16, p.m = count, p.a_column = 1, p.threads = 1, p.order = g.order;
    multiply(p, run, x, g.k, g.k, own.a, own.ranks, u);
    p.out_kind = FP32;
    for (int64_t i = 0, at = 0; i < own.count; at += own.parts[i++].rank) {
        const LowRankPart& part = own.parts[i];
        for (int64_t column = part.lo; column < part.hi; column += COLUMNS) {
            const int64_t columns = part.hi - column < COLUMNS ? part.hi - column : COLUMNS;
            const uint16_t* b = (const uint16_t*)part.b + (column - part.lo) * padded(part.rank, DEPTH);
            multiply(p, run, u + at, own.ranks, part.rank, b, columns, delta);
            add_scaled(g, rows, count, column, columns, float(own.scale), delta);
        }
    }
}

}  // namespace

EXPORT void isobit_low_rank(const LowRank* arguments) {
    const LowRank& g = *arguments;
    struct Task {
        int64_t adapter, row, count;
    };
    std::vector<Task> tasks;
    int64_t work = 0;
    for (int64_t i = 0; i < g.count; i++)
        for (int64_t row = g.offsets[i]; row < g.offsets[i + 1]; row += STRIP) {
            const int64_t left = g.offsets[i + 1] - row;
            tasks.push_back({i, row, left < STRIP ? left : STRIP});
            work += (left + 4) * g.adapters[i]->ranks * (g.k + g.columns) / 96;
        }
#pragma omp parallel for num_threads(useful_threads(g.threads, work)) schedule(dynamic)
    for (int64_t t = 0; t < int64_t(tasks.size()); t++)
        add_rows(g, *g.adapters[tasks[t].adapter], g.rows + tasks[t].row, tasks[t].count);
}
