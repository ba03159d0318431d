// Gradients of the gated delta rule, in float32: back through the tokens of a sequence, over the states before each.
//
// A state is kept before every SEGMENT tokens; those between are computed again, a segment at a time. A task is one value
// head of one sequence, 64 columns after the other, so the result is a function of the sequence alone. With S the state
// before a token, F = kept · S, w = v - kᵀF, e = strength · w, S' = F + k eᵀ and out = qᵀS', and dS' already that of
// later tokens:
//     dS' += q doutᵀ,  dq = S' dout,  dw = strength · (kᵀ dS'),  dk = dS' e - F dw,  dF = dS' - k dwᵀ,  dS = kept · dF.
// Where nothing is corrected, w = v, and what dw takes from dk and dF is 0.
#include "delta/delta.h"

namespace {

constexpr int64_t SEGMENT = 16;
constexpr int WIDEST = 4;  // vectors of columns, on every instruction set: sums over columns are in that order

// The sums of eight vectors, each in the order of `lane_sum`, of the sums of their halves.
INLINE f32x8 sums_of_eight(const f32x8* x) {
    const auto quarters = [](f32x8 a, f32x8 b) {
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    };
    const auto pairs = [](f32x8 a, f32x8 b) {
        return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    };
    const f32x8 a = pairs(quarters(x[0], x[4]), quarters(x[1], x[5])), b = pairs(quarters(x[2], x[6]), quarters(x[3], x[7]));
    return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}
INLINE f32x8 halves(f32x16 x) { return low_half(x) + high_half(x); }

template <int N>
INLINE float sum_of_products(const f32x16* a, const f32x16* b) {
    f32x16 total = splat(0.0f);
    for (int n = 0; n < N; n++) total = multiply_add(a[n], b[n], total);
    return lane_sum(total);
}

// 16 N columns of one head in one sequence; scratch is [states][key_dim][16 N].
template <int N>
struct Strip {
    const DeltaGradients& g;
    int64_t start, stop, head, column;
    float* states;

    int64_t size() const { return g.key_dim * 16 * N; }
    int64_t segments() const { return (stop - start + SEGMENT - 1) / SEGMENT; }
    Block checkpoint(int64_t segment) const { return {states + segment * size(), 16 * N}; }
    // Before token t of a segment.
    Block between(int64_t segment, int64_t t) const {
        return t ? Block{states + (segments() + t) * size(), 16 * N} : checkpoint(segment);
    }
    float* dstate() const { return states + segments() * size(); }

    int64_t of_head(int64_t row) const { return row * g.value_heads + head; }
    int64_t of_key(int64_t row) const {
        return (row * g.key_heads + head / (g.value_heads / g.key_heads)) * g.key_dim;
    }
    void read(const float* x, int64_t row, f32x16* out) const {
        read_columns<N>(x + of_head(row) * g.value_dim + column, g.value_dim - column, out);
    }
    Token token(int64_t row) const { return {g.k + of_key(row), g.kept[of_head(row)]}; }

    // The state after a token, and v - kᵀF.
    void advance(Block from, Block to, int64_t row, f32x16* wanted) const {
        f32x16 v[N], e[N], unused[N];
        read(g.v, row, v);
        if (g.corrects) surprise<N>(from, token(row), g.key_dim, v, wanted);
        for (int n = 0; !g.corrects && n < N; n++) wanted[n] = v[n];
        for (int n = 0; n < N; n++) e[n] = wanted[n] * splat(g.strength[of_head(row)]);
        if (to.data) learn<N, false>(from, to, token(row), e, g.key_dim, nullptr, unused);
    }

    void run() const {
        f32x16 wanted[SEGMENT][N];
        std::memset(states, 0, size() * sizeof(float));
        std::memset(dstate(), 0, size() * sizeof(float));
        for (int64_t s = 0; s + 1 < segments(); s++)
            for (int64_t t = 0; t < SEGMENT; t++) {
                const Block own = between(s, 1);
                advance(t ? own : checkpoint(s), t + 1 < SEGMENT ? own : checkpoint(s + 1), start + s * SEGMENT + t, wanted[0]);
            }
        for (int64_t s = segments() - 1; s >= 0; s--) {
            const int64_t first = start + s * SEGMENT, count = stop - first < SEGMENT ? stop - first : SEGMENT;
            for (int64_t t = 0; t < count; t++)
                advance(between(s, t), t + 1 < count ? between(s, t + 1) : Block{nullptr, 0}, first + t, wanted[t]);
            for (int64_t t = count - 1; t >= 0; t--) back(between(s, t), first + t, wanted[t]);
        }
    }

    void back(Block before, int64_t row, const f32x16* wanted) const {
        const float *q = g.q + of_key(row), *k = g.k + of_key(row), strength = g.strength[of_head(row)];
        float* d = dstate();
        f32x16 dout[N], e[N], derror[N], dwanted[N];
        read(g.dout, row, dout);
        in_lanes<N>(g.key_dim, derror, [&](int64_t i, f32x16* sum) __attribute__((always_inline)) {
            const f32x16 query = splat(q[i]), key = splat(k[i]);
            for (int n = 0; n < N; n++)
                sum[n] = multiply_add(key, multiply_add(query, dout[n], load<f32x16>(d + (i * N + n) * 16)), sum[n]);
        });
        for (int n = 0; n < N; n++) dwanted[n] = derror[n] * splat(strength), e[n] = wanted[n] * splat(strength);
        write_columns<N>(dwanted, g.value_dim - column, g.dv + of_head(row) * g.value_dim + column);
        add(g.dstrength + of_head(row), sum_of_products<N>(derror, wanted));
        const float along = sum_of_products<N>(e, dout);
        f32x16 fading[N];
        for (int n = 0; n < N; n++) fading[n] = splat(0.0f);
        for (int n = 0; !g.corrects && n < N; n++) dwanted[n] = splat(0.0f);
        for (int64_t i = 0; i < g.key_dim; i += 8) {
            const int64_t count = g.key_dim - i < 8 ? g.key_dim - i : 8;
            f32x8 query[8] = {}, key[8] = {};
            for (int64_t l = 0; l < count; l++)
                back_row(before.data + (i + l) * 16 * N, d + (i + l) * 16 * N, q[i + l], k[i + l], g.kept[of_head(row)],
                         dout, e, dwanted, query + l, key + l, fading);
            const f32x8 dq = sums_of_eight(query), dk = sums_of_eight(key);
            for (int64_t l = 0; l < count; l++) {
                add(g.dq + of_head(row) * g.key_dim + i + l, dq[l] + k[i + l] * along);
                add(g.dk + of_head(row) * g.key_dim + i + l, dk[l]);
            }
        }
        for (int n = 1; n < N; n++) fading[0] = fading[0] + fading[n];
        add(g.dkept + of_head(row), lane_sum(fading[0]));
    }

    // One row of the state: its part of dq but for e, and of dk, and its gradient for the token before.
    INLINE void back_row(const float* before, float* dstate, float q, float k, float kept, const f32x16* dout,
                         const f32x16* e, const f32x16* dwanted, f32x8* dq, f32x8* dk, f32x16* fading) const {
        f32x16 query = splat(0.0f), key = splat(0.0f), lost = splat(0.0f);
        for (int n = 0; n < N; n++) {
            const f32x16 state = load<f32x16>(before + 16 * n), faded = state * splat(kept);
            const f32x16 after = multiply_add(splat(q), dout[n], load<f32x16>(dstate + 16 * n));
            query = multiply_add(faded, dout[n], query);
            key = multiply_add(after, e[n], key), lost = multiply_add(faded, dwanted[n], lost);
            const f32x16 dfaded = multiply_add(splat(-k), dwanted[n], after);
            fading[n] = multiply_add(dfaded, state, fading[n]);
            store(dstate + 16 * n, dfaded * splat(kept));
        }
        *dq = halves(query), *dk = halves(key - lost);
    }

    // Sums over columns: the first ones begin.
    INLINE void add(float* sum, float part) const { *sum = column ? *sum + part : part; }
};

void run_head(const DeltaGradients& g, int64_t start, int64_t stop, int64_t head) {
    static thread_local Scratch scratch;
    const int64_t segments = (stop - start + SEGMENT - 1) / SEGMENT;
    float* states = (float*)scratch.get((segments + SEGMENT) * g.key_dim * 8 * WIDEST);
    for (int64_t column = 0; column < g.value_dim;) {
        const int64_t left = (g.value_dim - column + 15) / 16;
        if (left == 1) Strip<1>{g, start, stop, head, column, states}.run();
        else if (left == 2) Strip<2>{g, start, stop, head, column, states}.run();
        else if (left == 3) Strip<3>{g, start, stop, head, column, states}.run();
        else Strip<WIDEST>{g, start, stop, head, column, states}.run();
        column += 16 * WIDEST;
    }
}

}  // namespace

EXPORT void isobit_delta_rule_backward(const DeltaGradients* arguments) {
    const DeltaGradients& g = *arguments;
    const int64_t work = g.row_start[g.sequences] * g.value_heads * g.key_dim * g.value_dim / 2;
    for_each_in_turn(useful_threads(g.threads, work), g.sequences * g.value_heads, [&](int64_t task) {
        const int64_t *start = g.row_start + task / g.value_heads;
        if (start[0] < start[1]) run_head(g, start[0], start[1], task % g.value_heads);
    });
}
