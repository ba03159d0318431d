// The adapters' part of a product in one call: a thread takes some rows of one adapter, through all of its factors.
#include "low_rank/low_rank.h"

#include <vector>

#include "product/ordered.h"

namespace {

constexpr int64_t STRIP = 64, FEW = 8, COLUMNS = 64 * PANEL;  // rows of a thread's task; columns of B at a time
constexpr int64_t NARROW = 32;  // up to this rank B has panels [rank][16], without zeros in them

// Where subnormal numbers are kept, so not inlined into the products' scope.
__attribute__((noinline)) void add_scaled(const LowRank& g, const int64_t* rows, int64_t count, int64_t column,
                                          int64_t columns, float scale, const float* delta, int64_t stride) {
    for (int64_t r = 0; r < count; r++) {
        float* line = g.total + rows[r] * g.columns + column;
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
    alignas(64) float values[STRIP * NARROW];
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
            const bool few = part.rank <= NARROW;
            const int64_t depth = few ? part.rank : padded(part.rank, DEPTH);
            const uint16_t* b = (const uint16_t*)part.b + (column - part.lo) * depth;
            if (few) narrow(u + at, own.ranks, count, part.rank, g.order, b, columns, delta);
            else multiply(p, run, u + at, own.ranks, part.rank, b, columns, delta);
            add_scaled(g, rows, count, column, columns, float(own.scale), delta, few ? padded(columns, PANEL) : columns);
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
    for_each_in_turn(useful_threads(g.threads, work), int64_t(tasks.size()), [&](int64_t t) {
        add_rows(g, *g.adapters[tasks[t].adapter], g.rows + tasks[t].row, tasks[t].count);
    });
}
