// Gradients of attention for packed layouts, from recomputed probabilities (Dao et al. 2022, section 3.1):
// P = exp(S - lse), dS = P · (dO·Vᵀ - Σ dO·O) · scale, dQ = dS·K, dK = dSᵀ·Q, dV = Pᵀ·dO.
//
// A task is one key head of one sequence: float64, blocks of query rows in ascending order, query heads one after the
// other, one rounding. So the result is a function of the sequence alone.
#include "attention.h"

constexpr int64_t ROWS = 32;

// scores [rows][stride] and dO·Vᵀ to probabilities P and dS, and both transposed [keys][ROWS].
static void probabilities(const Attention& g, int64_t first, int64_t rows, int64_t keys, int64_t stride,
                          const float* lse, const double* inner, double* scores, double* dscores, double* turned,
                          double* dturned) {
    for (int64_t r = 0; r < rows; r++) {
        double *s = scores + r * stride, *d = dscores + r * stride;
        for (int64_t j = 0; j < padded(keys, 8); j += 8) {
            f64x8 weight = exponential(load<f64x8>(s + j) * splat(g.scale) - splat(double(lse[r * g.heads])));
            for (int lane = 0; lane < 8; lane++)
                if (j + lane > first + r) weight[lane] = 0.0;
            store(s + j, weight);
            store(d + j, weight * (load<f64x8>(d + j) - splat(inner[r])) * splat(g.scale));
        }
        for (int64_t j = 0; j < keys; j++) turned[j * ROWS + r] = s[j], dturned[j * ROWS + r] = d[j];
    }
}

static void write_gradient(const Attention& g, const double* x, int64_t heads, int64_t head, int64_t row,
                           int64_t count, int64_t width, void* out) {
    for (int64_t t = 0; t < count; t++) {
        int64_t offset = ((row + t) * heads + head) * g.dim;
        if (g.kind == BF16) round_row(x + t * width, g.dim, (uint16_t*)out + offset);
        else round_row(x + t * width, g.dim, (float*)out + offset);
    }
}

static void differentiate(const Attention& g, int64_t sequence, int64_t kv_head) {
    typedef double R;
    static thread_local Scratch scratch;
    const int64_t group = g.heads / g.kv_heads, row0 = g.row_start[sequence], count = g.row_start[sequence + 1] - row0;
    const int64_t width = padded(g.dim, PANEL), many = padded(count, PANEL), stride = many;
    double* keys = scratch.get(many + 2 * many * width + 2 * many * g.dim + 2 * many * width + 4 * ROWS * many +
                               4 * ROWS * width + ROWS);
    double *keys_turned = keys + many * width, *values_turned = keys_turned + many * g.dim;
    double *dk = values_turned + many * g.dim, *dv = dk + many * width, *scores = dv + many * width;
    double *dscores = scores + ROWS * many, *turned = dscores + ROWS * many, *dturned = turned + ROWS * many;
    double *query = dturned + ROWS * many, *dout = query + ROWS * width, *out = dout + ROWS * width;
    double *dq = out + ROWS * width, *inner = dq + ROWS * width;
    int64_t* slots = (int64_t*)(inner + ROWS);
    g.slots(sequence, count, slots);
    FOR_STORE(g, read_rows, g, g.k, g.k_scale, slots, kv_head, count, width, keys)
    FOR_STORE(g, read_panels, g, g.k, g.k_scale, slots, kv_head, count, keys_turned)
    FOR_STORE(g, read_panels, g, g.v, g.v_scale, slots, kv_head, count, values_turned)
    std::memset(dk, 0, 2 * many * width * sizeof(double));
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++)
        for (int64_t first = 0; first < count; first += ROWS) {
            int64_t rows = count - first < ROWS ? count - first : ROWS, seen = first + rows;
            int64_t panels = padded(seen, PANEL) / PANEL;
            read_tokens(g, g.q, h, row0 + first, rows, width, width, query);
            read_tokens(g, g.dout, h, row0 + first, rows, width, width, dout);
            read_tokens(g, g.out, h, row0 + first, rows, width, width, out);
            for (int64_t r = 0; r < rows; r++) {
                f64x8 sum = splat(0.0);
                for (int64_t i = 0; i < width; i += 8)
                    sum = multiply_add(load<f64x8>(dout + r * width + i), load<f64x8>(out + r * width + i), sum);
                inner[r] = lane_sum(sum);
            }
            tile_product<REPLACE>(rows, panels, query, width, keys_turned, PANEL, g.dim * PANEL, g.dim, scores, stride);
            tile_product<REPLACE>(rows, panels, dout, width, values_turned, PANEL, g.dim * PANEL, g.dim, dscores, stride);
            probabilities(g, first, rows, seen, stride, g.lse + (row0 + first) * g.heads + h, inner, scores, dscores,
                          turned, dturned);
            tile_product<REPLACE>(rows, width / PANEL, dscores, stride, keys, width, PANEL, seen, dq, width);
            tile_product<CONTINUE>(seen, width / PANEL, dturned, ROWS, query, width, PANEL, rows, dk, width);
            tile_product<CONTINUE>(seen, width / PANEL, turned, ROWS, dout, width, PANEL, rows, dv, width);
            write_gradient(g, dq, g.heads, h, row0 + first, rows, width, g.dq);
        }
    write_gradient(g, dk, g.kv_heads, kv_head, row0, count, width, g.dk);
    write_gradient(g, dv, g.kv_heads, kv_head, row0, count, width, g.dv);
}

EXPORT void isobit_attention_backward(const Attention* arguments) {
    const Attention& g = *arguments;
    int64_t count = g.sequences * g.kv_heads;
#pragma omp parallel for num_threads(useful_threads(g.threads, g.rows * g.heads * g.dim)) schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++)
        if (g.row_start[i / g.kv_heads + 1] > g.row_start[i / g.kv_heads])
            differentiate(g, i / g.kv_heads, i % g.kv_heads);
}
