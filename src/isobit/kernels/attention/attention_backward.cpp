// Gradients of attention, from recomputed probabilities (Dao et al. 2022, section 3.1):
// P = exp(S - lse), dS = P · (dO·Vᵀ - Σ dO·O) · scale, dQ = dS·K, dK = dSᵀ·Q, dV = Pᵀ·dO. Sinks are in lse and out.
//
// A task is one key head of one sequence: float64, or float32 in the order `rows32-v1` (kernels/attention/float32.py), blocks
// of query rows in ascending order, query heads one after the other. So the result is a function of the sequence alone.
// Its rows follow `context` keys that other rows stored, which have gradients as its own have: dk and dv are those of
// all its keys, sequence after sequence.
// With a window the keys of a block of rows begin at `base`: those before it would get zeros.
#include "attention/attention.h"

#include <vector>

constexpr int64_t ROWS = 32;

// scores [rows][stride], of rows at positions from `first` on and keys from `base` on, and dO·Vᵀ to probabilities P and dS.
template <class R>
static void probabilities(const Attention& g, int64_t first, int64_t base, int64_t rows, int64_t keys, int64_t stride,
                          const float* lse, const R* inner, R* scores, R* dscores) {
    typedef typename Columns<R>::V V;
    constexpr int lanes = Columns<R>::lanes;
    const V scale = splat(R(g.scale));
    for (int64_t r = 0; r < rows; r++) {
        R *s = scores + r * stride, *d = dscores + r * stride;
        const int64_t lowest = g.lowest(first + r) - base, last = first + r - base;
        for (int64_t j = 0; j < padded(keys, lanes); j += lanes) {
            V weight = exponential(load<V>(s + j) * scale - splat(R(lse[r * g.heads])));
            for (int lane = 0; lane < lanes && (j + lanes > last || j < lowest); lane++)
                if (j + lane > last || j + lane < lowest) weight[lane] = R(0);
            store(s + j, weight);
            store(d + j, weight * (load<V>(d + j) - splat(inner[r])) * scale);
        }
    }
}

template <class R>
static void write_gradient(const Attention& g, const R* x, int64_t heads, int64_t head, int64_t row,
                           int64_t count, int64_t width, void* out) {
    for (int64_t t = 0; t < count; t++) {
        int64_t offset = ((row + t) * heads + head) * g.dim;
        if (g.kind == BF16) round_row(x + t * width, g.dim, (uint16_t*)out + offset);
        else round_row(x + t * width, g.dim, (float*)out + offset);
    }
}

template <class R>
static R row_dot(const R* a, const R* b, int64_t width) {
    typedef typename Columns<R>::V V;
    V sum = splat(R(0));
    for (int64_t i = 0; i < width; i += Columns<R>::lanes) sum = multiply_add(load<V>(a + i), load<V>(b + i), sum);
    return lane_sum(sum);
}

template <class R>
static void differentiate(const Attention& g, int64_t sequence, int64_t kv_head, int64_t key0) {
    static thread_local Scratch scratch;
    const int64_t group = g.heads / g.kv_heads, row0 = g.row_start[sequence], count = g.row_start[sequence + 1] - row0;
    const int64_t before = g.context[sequence], all = before + count;
    const int64_t width = padded(g.dim, PANEL), many = padded(all, PANEL);
    const int64_t stride = many + PANEL;  // rows a power of two apart would take turns in few lines of the cache
    const int64_t numbers = 3 * many * width + 2 * many * g.dim + 2 * ROWS * stride + 4 * ROWS * width + ROWS;
    R* keys = (R*)scratch.get(many + numbers * sizeof(R) / sizeof(double));
    R *keys_turned = keys + many * width, *values_turned = keys_turned + many * g.dim;
    R *dk = values_turned + many * g.dim, *dv = dk + many * width, *scores = dv + many * width;
    R *dscores = scores + ROWS * stride, *query = dscores + ROWS * stride, *dout = query + ROWS * width;
    R *out = dout + ROWS * width, *dq = out + ROWS * width, *inner = dq + ROWS * width;
    int64_t* slots = (int64_t*)(inner + ROWS);
    g.slots(sequence, 0, all, slots);
    FOR_STORE(g, read_rows, g, g.k, g.k_scale, slots, kv_head, all, width, keys)
    FOR_STORE(g, read_panels, g, g.k, g.k_scale, slots, kv_head, all, keys_turned)
    FOR_STORE(g, read_panels, g, g.v, g.v_scale, slots, kv_head, all, values_turned)
    std::memset(dk, 0, 2 * many * width * sizeof(R));
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++)
        for (int64_t first = 0; first < count; first += ROWS) {
            const int64_t rows = count - first < ROWS ? count - first : ROWS, position = before + first;
            const int64_t base = g.base(position), seen = position + rows - base, panels = padded(seen, PANEL) / PANEL;
            const R *k_turned = keys_turned + base * g.dim, *v_turned = values_turned + base * g.dim;
            read_tokens(g, g.q, h, row0 + first, rows, width, width, query);
            read_tokens(g, g.dout, h, row0 + first, rows, width, width, dout);
            read_tokens(g, g.out, h, row0 + first, rows, width, width, out);
            for (int64_t r = 0; r < rows; r++) inner[r] = row_dot(dout + r * width, out + r * width, width);
            tile_product<REPLACE>(rows, panels, query, width, k_turned, PANEL, g.dim * PANEL, g.dim, scores, stride);
            tile_product<REPLACE>(rows, panels, dout, width, v_turned, PANEL, g.dim * PANEL, g.dim, dscores, stride);
            probabilities(g, position, base, rows, seen, stride, g.lse + (row0 + first) * g.heads + h, inner, scores,
                          dscores);
            std::memset(dq, 0, rows * width * sizeof(R));
            accumulate(rows, width / PANEL, dscores, stride, keys + base * width, width, seen, dq, width);
            accumulate<true>(seen, width / PANEL, dscores, stride, query, width, rows, dk + base * width, width);
            accumulate<true>(seen, width / PANEL, scores, stride, dout, width, rows, dv + base * width, width);
            write_gradient(g, dq, g.heads, h, row0 + first, rows, width, g.dq);
        }
    write_gradient(g, dk, g.kv_heads, kv_head, key0, all, width, g.dk);
    write_gradient(g, dv, g.kv_heads, kv_head, key0, all, width, g.dv);
}

EXPORT void isobit_attention_backward(const Attention* arguments) {
    const Attention& g = *arguments;
    int64_t count = g.sequences * g.kv_heads;
    std::vector<int64_t> key_start(g.sequences);
    for (int64_t s = 1; s < g.sequences; s++)
        key_start[s] = key_start[s - 1] + g.context[s - 1] + g.row_start[s] - g.row_start[s - 1];
    for_each_in_turn(useful_threads(g.threads, g.rows * g.heads * g.dim), count, [&](int64_t i) {
        const int64_t sequence = i / g.kv_heads;
        if (g.row_start[sequence + 1] + g.context[sequence] == g.row_start[sequence]) return;
        if (g.single) differentiate<float>(g, sequence, i % g.kv_heads, key_start[sequence]);
        else differentiate<double>(g, sequence, i % g.kv_heads, key_start[sequence]);
    });
}
