// The gated delta rule, and Mamba-2's recurrence (kernels/delta/definition.py): state by state, token after token.
//
// The columns of a state are independent of one another. So a few of them, which a core's nearest cache holds, go through
// many tokens, and then the next ones; and bits do not depend on how many go together, nor on the number of threads.
#include "delta/delta.h"
#include "native/replay.h"

namespace {

#if defined(ISOBIT_AVX512)
constexpr int WIDEST = 4;  // vectors of columns that go together, with four sums each
#else
constexpr int WIDEST = 1;
#endif
constexpr int64_t CHUNK = 32;  // tokens whose queries and keys are made at a time
constexpr float LENGTH_EPS = 1e-6f, LINEAR = 20.0f;

// What tokens of one head are made into; of queries and keys [CHUNK][padded key_dim].
struct Chunk {
    int64_t first, count;  // rows of the batch
    float *q, *k;
    float kept[CHUNK], strength[CHUNK];
};

// x / |x| · scale, with zeros after it.
template <class T>
INLINE void make_unit(const T* x, int64_t dim, float scale, float* out) {
    const int64_t width = padded(dim, 16);
    decode_row(x, dim, out);
    for (int64_t i = dim; i < width; i++) out[i] = 0.0f;
    f32x16 squares = splat(0.0f);
    for (int64_t i = 0; i < width; i += 16) {
        const f32x16 value = load<f32x16>(out + i);
        squares = multiply_add(value, value, squares);
    }
    const float inverse = 1.0f / std::sqrt(lane_sum(squares) + LENGTH_EPS);
    for (int64_t i = 0; i < width; i += 16) store(out + i, load<f32x16>(out + i) * splat(inverse) * splat(scale));
}

// What is left of the state, exp(-exp(decay) · step) with step = softplus(a + step_bias), and the strength, which is 1 / (1 +
// exp(-b)); or with a skip the step, of at least `least_step`.
void make_gates(const DeltaRule& g, int64_t head, Chunk& chunk) {
    const int64_t width = g.skip ? g.value_heads : 2 * g.value_heads;
    const float* gates = g.gates + chunk.first * width + head;
    const f32x16 rate = exponential(splat(g.decay[head]));
    for (int64_t t = 0; t < chunk.count; t += 16) {
        const int64_t count = chunk.count - t < 16 ? chunk.count - t : 16;
        float b[16] = {0}, a[16] = {0}, grown[16];
        for (int64_t i = 0; i < count; i++) {
            b[i] = gates[(t + i) * width];
            a[i] = gates[(t + i) * width + width - g.value_heads] + g.step_bias[head];
        }
        store(grown, exponential(load<f32x16>(a)));
        for (int64_t i = 0; i < count; i++) {
            if (!(a[i] > LINEAR)) a[i] = float(logarithm(1.0 + double(grown[i])));
            if (g.skip && a[i] < float(g.least_step)) a[i] = float(g.least_step);
        }
        const f32x16 step = load<f32x16>(a);
        store(chunk.kept + t, exponential(-(rate * step)));
        store(chunk.strength + t, g.skip ? step : splat(1.0f) / (splat(1.0f) + exponential(-load<f32x16>(b))));
    }
}

template <class T>
void make_chunk(const DeltaRule& g, int64_t head, Chunk& chunk) {
    const int64_t width = padded(g.key_dim, 16), key_head = head / (g.value_heads / g.key_heads);
    for (int64_t t = 0; t < chunk.count; t++) {
        const T* x = (const T*)g.qkv + (chunk.first + t) * g.row() + key_head * g.key_dim;
        if (g.skip) {
            decode_row(x + g.queries_at(), g.key_dim, chunk.q + t * width);
            decode_row(x + g.keys_at(), g.key_dim, chunk.k + t * width);
        } else {
            make_unit(x + g.queries_at(), g.key_dim, float(g.scale), chunk.q + t * width);
            make_unit(x + g.keys_at(), g.key_dim, 1.0f, chunk.k + t * width);
        }
    }
    make_gates(g, head, chunk);
}

// One head of one sequence.
struct Head {
    const DeltaRule& g;
    const Sequences& sequences;
    int64_t sequence, head;
    float* state;  // of its own, between pages: [key_dim][16 N] of each block of columns

    float* on_page(int64_t page, int64_t column) const {
        return g.states + (page * g.value_heads + head) * g.key_dim * g.value_dim + column;
    }
    // The page that has the state before this row; -1 where none has.
    int64_t page_before(int64_t row) const {
        if (g.states == nullptr) return -1;
        return row == sequences.row_start[sequence] ? sequences.before(sequence) : sequences.kept(sequence, row - 1);
    }
    int64_t page_after(int64_t row) const { return g.states ? sequences.kept(sequence, row) : -1; }

    // 16 N columns through the tokens of a chunk. Whole blocks are read from pages and written to them where they lie; of
    // the last one, which may have fewer columns, there is always a copy.
    template <int N, class T>
    void run(const Chunk& chunk, int64_t column) const {
        const int64_t columns = g.value_dim - column, width = padded(g.key_dim, 16), size = g.values();
        const bool whole = columns >= 16 * N, begins = chunk.first == sequences.row_start[sequence];
        const Block own{state + g.key_dim * column, 16 * N};
        const int64_t page = page_before(chunk.first);
        if (begins) std::memset(own.data, 0, g.key_dim * 16 * N * sizeof(float));
        if (begins && page >= 0 && !whole) copy(on_page(page, column), g.value_dim, own.data, own.stride, columns);
        Block from = page >= 0 && whole ? Block{on_page(page, column), g.value_dim} : own;
        const T* values = (const T*)g.qkv + g.values_at() + head * g.value_dim + column;
        for (int64_t t = 0; t < chunk.count; t++) {
            const int64_t after = page_after(chunk.first + t);
            const Block to = after >= 0 && whole ? Block{on_page(after, column), g.value_dim} : own;
            const Token token{chunk.k + t * width, chunk.kept[t]};
            f32x16 v[N], error[N], out[N];
            read_columns<N>(values + (chunk.first + t) * g.row(), columns, v);
            if (!g.skip) surprise<N>(from, token, g.key_dim, v, error);
            for (int n = 0; n < N; n++) error[n] = (g.skip ? v[n] : error[n]) * splat(chunk.strength[t]);
            learn<N, true>(from, to, token, error, g.key_dim, chunk.q + t * width, out);
            for (int n = 0; g.skip && n < N; n++) out[n] = multiply_add(splat(g.skip[head]), v[n], out[n]);
            write_columns<N>(out, columns, (T*)g.out + (chunk.first + t) * size + head * g.value_dim + column);
            if (after >= 0 && !whole) copy(own.data, own.stride, on_page(after, column), g.value_dim, columns);
            from = to;
        }
    }

    void copy(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t columns) const {
        for (int64_t i = 0; i < g.key_dim; i++)
            std::memcpy(to + i * to_stride, from + i * from_stride, columns * sizeof(float));
    }
};

// Block first..last of one head's states in one sequence.
template <class T>
void run_head(const DeltaRule& g, const Sequences& sequences, int64_t sequence, int64_t head, int64_t first, int64_t last) {
    static thread_local Scratch scratch;
    const int64_t width = padded(g.key_dim, 16), state = padded(g.key_dim * padded(g.value_dim, 16), 16);
    float* memory = (float*)scratch.get((state + 2 * CHUNK * width) / 2);
    const Head one{g, sequences, sequence, head, memory};
    Chunk chunk{0, 0, memory + state, memory + state + CHUNK * width, {}, {}};
    const int64_t stop = sequences.row_start[sequence + 1];
    for (int64_t row = sequences.row_start[sequence]; row < stop; row += CHUNK) {
        chunk.first = row, chunk.count = stop - row < CHUNK ? stop - row : CHUNK;
        make_chunk<T>(g, head, chunk);
        int64_t column = first;
        for (; WIDEST > 1 && column + 16 * WIDEST <= last; column += 16 * WIDEST) one.run<WIDEST, T>(chunk, column);
        for (; column < last; column += 16) one.run<1, T>(chunk, column);
    }
}

template <class T>
void delta_rule(const DeltaRule& g, const Sequences& sequences) {
    const int64_t heads = sequences.count * g.value_heads, rows = sequences.row_start[sequences.count];
    const int64_t step = 16 * WIDEST, parts = heads < g.threads ? padded(g.value_dim, step) / step : 1;
    const int64_t work = rows * g.value_heads * g.key_dim * g.value_dim / 8;
    for_each_in_turn(useful_threads(g.threads, work), heads * parts, [&](int64_t task) {
        const int64_t one = task / parts, first = task % parts * step;
        const int64_t last = parts == 1 || first + step > g.value_dim ? g.value_dim : first + step;
        run_head<T>(g, sequences, one / g.value_heads, one % g.value_heads, first, last);
    });
}

}  // namespace

// Where a page is read by one sequence, no other one writes it.
EXPORT void isobit_delta_rule(const Sequences* sequences, const DeltaRule* arguments) {
    FOR_KIND(arguments->kind, delta_rule<T>(*arguments, *sequences))
}
REPLAYED(isobit_delta_rule)
