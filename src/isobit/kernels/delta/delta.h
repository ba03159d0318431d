// Linear attention by the gated delta rule in the order `delta32-v1`, which kernels/delta/definition.py defines: what its operators
// read, and one token of its recurrence.
#pragma once

#include "native/pointwise.h"

// Rows of a batch in sequences, and the pages of a store that has their states: the one after the last row of a page, and
// the one after the last row.
struct Sequences {
    const int64_t *row_start, *context;
    const int32_t* page_table;  // [count][pages]
    int64_t pages, page_size, count;

    int64_t page(int64_t s, int64_t position) const { return page_table[s * pages + position / page_size]; }
    // The page that has the state before the first row; -1 where there is none.
    int64_t before(int64_t s) const { return context[s] ? page(s, context[s] - 1) : -1; }
    // The page that keeps the state after this row of the batch; -1 where none does.
    int64_t kept(int64_t s, int64_t row) const {
        const int64_t position = context[s] + row - row_start[s];
        return (position + 1) % page_size && row + 1 < row_start[s + 1] ? -1 : page(s, position);
    }
};

// The delta rule; or, where there is a skip, Mamba-2's recurrence, which writes values whatever the state says.
struct DeltaRule {
    int64_t kind, key_heads, value_heads, key_dim, value_dim;
    const void* qkv;     // [rows][2 key_heads key_dim + value_heads value_dim]: q, k, v; with a skip v, k, q
    const float* gates;  // [rows][2 value_heads]: b, then a; with a skip [rows][value_heads]: a
    const float *decay, *step_bias;
    double scale;
    float* states;  // [pages][value_heads][key_dim][value_dim], or null
    void* out;
    int64_t threads;
    const float* skip;  // [value_heads], or null
    double least_step;

    int64_t keys() const { return key_heads * key_dim; }
    int64_t values() const { return value_heads * value_dim; }
    int64_t row() const { return 2 * keys() + values(); }
    // Where they begin in a row.
    int64_t queries_at() const { return skip ? values() + keys() : 0; }
    int64_t keys_at() const { return skip ? values() : keys(); }
    int64_t values_at() const { return skip ? 0 : 2 * keys(); }
};

// Of whole sequences: the parts of kernels/delta/definition.py and their gradients, those of queries and keys for each value head.
struct DeltaGradients {
    int64_t key_heads, value_heads, key_dim, value_dim, sequences;
    const int64_t* row_start;
    const float *q, *k;              // [rows][key_heads][key_dim]
    const float *v, *dout;           // [rows][value_heads][value_dim]
    const float *kept, *strength;    // [rows][value_heads]
    float *dq, *dk;                  // [rows][value_heads][key_dim]
    float *dv, *dkept, *dstrength;
    int64_t threads;
    int64_t corrects;  // whether what the state says is taken from a value, which Mamba-2 does not do
};

// The operators, which the self-test calls too.
EXPORT void isobit_short_convolution(const Sequences* sequences, int64_t kind, const void* x, const float* weight,
                                     const float* bias, int64_t channels, int64_t width, void* stored, void* y,
                                     int64_t threads);
EXPORT void isobit_short_convolution_backward(const Sequences* sequences, int64_t kind, const void* dy, const void* x,
                                              const float* weight, const float* bias, int64_t channels,
                                              int64_t width, void* dx, float* dweight, float* dbias, int64_t threads);
EXPORT void isobit_delta_rule(const Sequences* sequences, const DeltaRule* arguments);
EXPORT void isobit_delta_rule_backward(const DeltaGradients* arguments);

constexpr int64_t DELTA_LANES = 4;  // of a sum over key_dim

// 16 N columns of a state [key_dim]: rows are `stride` apart.
struct Block {
    float* data;
    int64_t stride;
};

// How the state goes on with one token.
struct Token {
    const float* k;  // [key_dim]
    float kept;
};

// Of each place of [dim], in ascending order, `add(i, sums of its lane)`; then (0 + 2) + (1 + 3).
template <int N, class Add>
static INLINE void in_lanes(int64_t dim, f32x16* out, const Add& add) {
    f32x16 lane[DELTA_LANES][N];
    for (int64_t l = 0; l < DELTA_LANES; l++)
        for (int n = 0; n < N; n++) lane[l][n] = splat(0.0f);
    int64_t i = 0;
    for (; i + DELTA_LANES <= dim; i += DELTA_LANES)
        for (int64_t l = 0; l < DELTA_LANES; l++) add(i + l, lane[l]);
    const int64_t rest = dim - i;
    for (int64_t l = 0; l < DELTA_LANES - 1; l++)
        if (l < rest) add(i + l, lane[l]);
    for (int64_t l = 1; rest && l < DELTA_LANES; l++)  // zeros for the places that the last four lack: a -0 becomes 0
        for (int n = 0; l >= rest && n < N; n++) lane[l][n] = lane[l][n] + splat(0.0f);
    for (int n = 0; n < N; n++) out[n] = (lane[0][n] + lane[2][n]) + (lane[1][n] + lane[3][n]);
}

// v - kᵀ · (kept · state).
template <int N>
static INLINE void surprise(Block state, const Token& token, int64_t dim, const f32x16* v, f32x16* out) {
    const f32x16 kept = splat(token.kept);
    in_lanes<N>(dim, out, [&](int64_t i, f32x16* sum) __attribute__((always_inline)) {
        const f32x16 key = splat(token.k[i]);
        for (int n = 0; n < N; n++)
            sum[n] = multiply_add(key, load<f32x16>(state.data + i * state.stride + 16 * n) * kept, sum[n]);
    });
    for (int n = 0; n < N; n++) out[n] = v[n] - out[n];
}

// kept · state + k · eᵀ in `to`, which may be where the state is; and qᵀ of that in `out`, where there is a q.
template <int N, bool Recalled>
static INLINE void learn(Block state, Block to, const Token& token, const f32x16* e, int64_t dim, const float* q,
                         f32x16* out) {
    const f32x16 kept = splat(token.kept);
    in_lanes<N>(dim, out, [&](int64_t i, f32x16* sum) __attribute__((always_inline)) {
        const f32x16 key = splat(token.k[i]), query = splat(Recalled ? q[i] : 0.0f);
        for (int n = 0; n < N; n++) {
            const f32x16 faded = load<f32x16>(state.data + i * state.stride + 16 * n) * kept;
            const f32x16 next = multiply_add(key, e[n], faded);
            store(to.data + i * to.stride + 16 * n, next);
            if (Recalled) sum[n] = multiply_add(query, next, sum[n]);
        }
    });
}

// `count` elements as whole vectors, with zeros after them.
template <int N, class T>
static INLINE void read_columns(const T* x, int64_t count, f32x16* out) {
    if (count >= 16 * N) {
        for (int n = 0; n < N; n++) out[n] = decode(x + 16 * n);
        return;
    }
    float padded[16 * N] = {0};
    decode_row(x, count, padded);
    for (int n = 0; n < N; n++) out[n] = load<f32x16>(padded + 16 * n);
}
template <int N, class T>
static INLINE void write_columns(const f32x16* x, int64_t count, T* out) {
    if (count >= 16 * N) {
        for (int n = 0; n < N; n++) round_once(x[n], out + 16 * n);
        return;
    }
    float padded[16 * N];
    for (int n = 0; n < N; n++) store(padded + 16 * n, x[n]);
    round_row(padded, count, out);
}
