// Causal grouped-query attention over paged keys and values: decoding, chunked prefill and packed rows in one loop.
//
// A task is a block of tokens of one sequence with all query heads of one key head. Scores, softmax and P·V are float64,
// or float32 in the order `rows32-v1` (kernels/attention/float32.py), keys in ascending position. The order of every sum of a
// row depends on positions only, so neither batch, nor chunk, nor page changes a bit. With a window a task begins at the
// block of its first row's lowest key: slots, scores and factors are those of the keys from `base` on.
#include "attention/attention_rows.h"
#include "native/replay.h"

#include <vector>

constexpr int64_t BLOCK = 32;  // rows (tokens times query heads) of a task

struct Task {
    int64_t sequence, first, tokens;  // tokens first..first+tokens of the sequence's new rows
    int64_t head, heads;              // key heads head..head+heads
};

// The factors of keys of the task's heads, of each head a row [padded keys + PANEL], of scores, then of weights: for float32
// only.
template <class R>
static void factors_of(const Attention& g, const Task& task, const int64_t* slots, int64_t keys, float* factors) {
    if constexpr (sizeof(R) == sizeof(float)) {
        const int64_t apart = padded(keys, PANEL) + PANEL;  // rows a power of two apart would share lines of the cache
        key_factors(g, g.k_scale, slots, task.head, task.heads, keys, float(g.scale), factors, apart);
        key_factors(g, g.v_scale, slots, task.head, task.heads, keys, 1.0f, factors + task.heads * apart, apart);
    }
}

// Scores [stride] of `rows` rows of a key head over `keys` keys to weights, totals and lse.
template <class R>
static void softmax(const Attention& g, const Task& task, int64_t kv_head, int64_t rows, int64_t keys, R* scores,
                    int64_t stride, R* total, const float* factors) {
    const int64_t apart = padded(keys, PANEL) + PANEL;
    const float* own = factors + (kv_head - task.head) * apart;
    const Factors32 both{own, own + task.heads * apart};
    const int64_t group = g.heads / g.kv_heads, position = g.context[task.sequence] + task.first;
    const int64_t row0 = g.row_start[task.sequence] + task.first, base = g.base(position);
    for (int64_t r = 0; r < rows; r++) {
        double lse;
        const int64_t last = position + r / group, head = kv_head * group + r % group;
        softmax_row(g, scores + r * stride, g.lowest(last) - base, last - base, padded(keys, PANEL), both, total + r, &lse,
                    g.sinks ? g.sinks + head : nullptr);
        g.lse[(row0 + r / group) * g.heads + head] = float(lse);
    }
}

// The rows' mixed values over their totals, rounded once.
template <class R>
static void finish(const Attention& g, const Task& task, int64_t kv_head, int64_t rows, int64_t width, R* mixed,
                   const R* total) {
    const int64_t group = g.heads / g.kv_heads, row0 = g.row_start[task.sequence] + task.first;
    for (int64_t r = 0; r < rows; r++) {
        R* row = mixed + r * width;
        for (int64_t i = 0; i < width; i++) row[i] = row[i] / total[r];
        int64_t offset = ((row0 + r / group) * g.heads + kv_head * group + r % group) * g.dim;
        if (g.kind == BF16) round_row(row, g.dim, (uint16_t*)g.out + offset);
        else round_row(row, g.dim, (float*)g.out + offset);
    }
}

// Scales with which keys and values are read: none in float32, where they are factors of scores and weights.
template <class R>
static const float* read_with(const float* scales) {
    return sizeof(R) == sizeof(float) ? nullptr : scales;
}

// Many rows of one key head: keys and values are decoded once for all of them.
template <class R>
static void attend_block(const Attention& g, const Task& task) {
    static thread_local Scratch scratch;
    const int64_t kv_head = task.head, group = g.heads / g.kv_heads, rows = task.tokens * group;
    const int64_t row0 = g.row_start[task.sequence] + task.first, width = padded(g.dim, PANEL);
    const int64_t position = g.context[task.sequence] + task.first, base = g.base(position);
    const int64_t keys = position + task.tokens - base, stride = padded(keys, KEY_BLOCK) + PANEL;
    int64_t* slots = (int64_t*)scratch.get(padded(keys, 8) + rows * (2 * width + stride) + KEY_BLOCK * width + rows +
                                          padded(keys, PANEL) + PANEL + 64);
    g.slots(task.sequence, base, keys, slots);
    R* query = (R*)(slots + padded(keys, 8));
    R *scores = query + rows * width, *mixed = scores + rows * stride, *block = mixed + rows * width;
    R* total = block + KEY_BLOCK * width;
    float* factors = (float*)(total + rows);
    for (int64_t h = 0; h < group; h++)
        read_tokens(g, g.q, kv_head * group + h, row0, task.tokens, width, group * width, query + h * width);
    for (int64_t j = 0; j < keys; j += KEY_BLOCK) {
        int64_t count = keys - j < KEY_BLOCK ? keys - j : KEY_BLOCK;
        if constexpr (sizeof(R) == sizeof(float)) {
            FOR_STORE(g, read_panels, g, g.k, nullptr, slots + j, kv_head, count, block)
            row_products_turned(rows, padded(count, PANEL) / PANEL, query, block, g.dim, width, scores + j, stride);
        } else {
            FOR_STORE(g, read_rows, g, g.k, g.k_scale, slots + j, kv_head, count, width, block)
            for (int64_t i = count * width; i < padded(count, 8) * width; i++) block[i] = R(0);
            row_products(rows, padded(count, 8), query, block, width, scores + j, stride);
        }
    }
    factors_of<R>(g, task, slots, keys, factors);
    softmax(g, task, kv_head, rows, keys, scores, stride, total, factors);
    std::memset(mixed, 0, rows * width * sizeof(R));
    for (int64_t j = 0; j < keys; j += KEY_BLOCK) {
        int64_t count = keys - j < KEY_BLOCK ? keys - j : KEY_BLOCK;
        FOR_STORE(g, read_rows, g, g.v, read_with<R>(g.v_scale), slots + j, kv_head, count, width, block)
        accumulate(rows, width / PANEL, scores + j, stride, block, width, count, mixed, width);
    }
    finish(g, task, kv_head, rows, width, mixed, total);
}

// A few rows of each key head (decoding): too few to decode keys for, so these are read as they are stored. For 8 keys, then
// some values at a time, the heads take turns: so a page is read once and in order, and the next one asked for early.
static bool reads_stored(const Attention& g, int64_t tokens) {
    return tokens * (g.heads / g.kv_heads) <= (g.single ? 16 : 4) && g.dim % PANEL == 0;
}

template <class R, class T>
static void stored_scores(const Attention& g, const Task& task, const int64_t* slots, int64_t keys, int64_t rows,
                          const R* query, R* scores, int64_t stride) {
    const Stored<T> stored{(const T*)g.k, g.k_scale, slots, g.kv_heads, g.dim, keys, g.scale_step};
    const Stored<T> next{(const T*)g.v, g.v_scale, slots, g.kv_heads, g.dim, keys, g.scale_step};
    for (int64_t j = 0; j < keys; j += 8) {
        const T *from[8], *ahead[8];
        for (int i = 0; i < 8; i++) {
            const int64_t later = j + i + AHEAD;
            from[i] = stored.row(j + i < keys ? j + i : keys - 1, task.head);  // what lies beyond, the softmax overwrites
            ahead[i] = later < keys ? stored.row(later, task.head)
                                    : next.row(later - keys < keys ? later - keys : keys - 1, task.head);
            stored.prefetch_scale(j + i, task.head), next.prefetch_scale(j + i, task.head);
        }
        for (int64_t h = 0; h < task.heads; h++) {
            const Lines lines(h, g.dim * int64_t(sizeof(T)));
            for (int i = 0; i < 8; i++) lines.ask(ahead[i]);
            float scale[8];
            for (int i = 0; i < 8 && sizeof(R) == sizeof(double); i++)
                scale[i] = stored.scale(j + i < keys ? j + i : keys - 1, task.head + h);
            const R* row = query + h * rows * g.dim;
            R* out = scores + h * rows * stride + j;
            int64_t r = 0;
            for (; r + 2 <= rows; r += 2)
                eight_keys<2>(row + r * g.dim, from, h * g.dim, scale, g.dim, out + r * stride, stride);
            if (r < rows) eight_keys<1>(row + r * g.dim, from, h * g.dim, scale, g.dim, out + r * stride, stride);
        }
    }
}

// NV vectors of the columns of some heads, from `first` on, with the `count` keys from j on.
template <int MR, int NV, class R, class T>
static void mix_columns(const Stored<T>& stored, const Rows<T>& rows, int64_t head, int64_t j, int64_t count,
                        int64_t first, Lines lines, const R* weights, int64_t stride, R* out) {
    constexpr int64_t chains = chains_of<R, MR * NV>, step = step_of<R>;
    int64_t at = 0;
    for (; chains > 1 && at + chains * step <= count; at += chains * step)
        mix_chains<MR, NV, chains>(stored, rows, at, head, j + at, step, first, lines, weights, stride, out);
    for (; at < count; at += step)
        mix_chains<MR, NV, 1>(stored, rows, at, head, j + at, count - at < step ? count - at : step, first, lines, weights,
                              stride, out);
}

// All columns of the h-th head of a task.
template <class R, class T>
static void mix_head(const Stored<T>& stored, const Rows<T>& from, const Task& task, int64_t h, int64_t j, int64_t count,
                     int64_t rows, const R* weights, int64_t stride, R* out) {
    constexpr int lanes = Columns<R>::lanes;
    decltype(&mix_columns<1, 1, R, T>) const mix[2][3] = {
        {mix_columns<1, 16 / lanes, R, T>, mix_columns<1, 32 / lanes, R, T>, mix_columns<1, 64 / lanes, R, T>},
        {mix_columns<2, 16 / lanes, R, T>, mix_columns<2, 32 / lanes, R, T>, mix_columns<2, 64 / lanes, R, T>},
    };
    Lines lines(h, stored.dim * int64_t(sizeof(T)));
    for (int64_t first = 0, width; first < stored.dim; first += width) {
        const int64_t left = stored.dim - first, wide = left >= 64 ? 2 : left >= 32;
        width = 16 << wide;
        for (int64_t r = 0; r < rows; r += 2, lines.to = lines.from)
            mix[rows - r >= 2][wide](stored, from, task.head + h, j, count, h * stored.dim + first, lines,
                                     weights + r * stride, stride, out + r * stored.dim + first);
    }
}

template <class R, class T>
static void stored_mix(const Attention& g, const Task& task, const int64_t* slots, int64_t keys, int64_t rows,
                       const R* weights, int64_t stride, R* mixed) {
    const Stored<T> stored{(const T*)g.v, g.v_scale, slots, g.kv_heads, g.dim, keys, g.scale_step};
    for (int64_t j = 0; j < keys; j += MIXED) {
        Rows<T> from;
        const int64_t count = keys - j < MIXED ? keys - j : MIXED;
        for (int64_t i = 0; i < count; i++) {
            from.now[i] = stored.row(j + i, task.head);
            from.next[i] = stored.row(j + i + MIXED < keys ? j + i + MIXED : keys - 1, task.head);
        }
        for (int64_t h = 0; h < task.heads; h++)
            mix_head(stored, from, task, h, j, count, rows, weights + h * rows * stride, stride, mixed + h * rows * g.dim);
    }
}

template <class R>
static void attend_stored(const Attention& g, const Task& task) {
    static thread_local Scratch scratch;
    const int64_t group = g.heads / g.kv_heads, rows = task.tokens * group, width = g.dim;
    const int64_t row0 = g.row_start[task.sequence] + task.first, all = task.heads * rows;
    const int64_t position = g.context[task.sequence] + task.first, base = g.base(position);
    const int64_t keys = position + task.tokens - base, stride = padded(keys, PANEL);
    int64_t* slots = (int64_t*)scratch.get(padded(keys, 8) + all * (2 * width + stride) + all + task.heads * (stride + PANEL) + 64);
    g.slots(task.sequence, base, keys, slots);
    R* query = (R*)(slots + padded(keys, 8));
    R *scores = query + all * width, *mixed = scores + all * stride, *total = mixed + all * width;
    float* factors = (float*)(total + all);
    for (int64_t h = 0; h < task.heads; h++)
        for (int64_t i = 0; i < group; i++)
            read_tokens(g, g.q, (task.head + h) * group + i, row0, task.tokens, width, group * width,
                        query + (h * rows + i) * width);
    FOR_STORE(g, stored_scores, g, task, slots, keys, rows, query, scores, stride)
    factors_of<R>(g, task, slots, keys, factors);
    for (int64_t h = 0; h < task.heads; h++)
        softmax(g, task, task.head + h, rows, keys, scores + h * rows * stride, stride, total + h * rows, factors);
    FOR_STORE(g, stored_mix, g, task, slots, keys, rows, scores, stride, mixed)
    for (int64_t h = 0; h < task.heads; h++)
        finish(g, task, task.head + h, rows, width, mixed + h * rows * width, total + h * rows);
}

EXPORT void isobit_attention(const Attention* arguments) {
    const Attention& g = *arguments;
    const int64_t group = g.heads / g.kv_heads, step = BLOCK / group > 1 ? BLOCK / group : 1;
    // Key heads of a sequence in one task read its pages in order: all of them, unless that leaves threads without work.
    const int64_t parts = (4 * g.threads + g.sequences - 1) / (g.sequences ? g.sequences : 1);
    const int64_t together = g.kv_heads > parts ? (g.kv_heads + parts - 1) / parts : 1;
    std::vector<Task> tasks;
    int64_t work = 0;
    for (int64_t s = g.sequences - 1; s >= 0; s--) {
        const int64_t tokens = g.row_start[s + 1] - g.row_start[s];
        for (int64_t first = (tokens - 1) / step * step; first >= 0 && tokens > 0; first -= step) {  // the longest first
            const int64_t count = tokens - first < step ? tokens - first : step;
            const int64_t heads = reads_stored(g, count) ? together : 1;
            for (int64_t head = 0; head < g.kv_heads; head += heads)
                tasks.push_back({s, first, count, head, g.kv_heads - head < heads ? g.kv_heads - head : heads});
            const int64_t position = g.context[s] + first;
            work += (position + count - g.base(position)) * (count * g.heads + g.kv_heads) * g.dim / 8;
        }
    }
    work += int64_t(tasks.size()) * 1500;  // slots, queries and scales, however few keys there are
    for_each_in_turn(useful_threads(g.threads, work), tasks.size(), [&](int64_t i) {
        if (reads_stored(g, tasks[i].tokens)) {
            if (g.single) attend_stored<float>(g, tasks[i]);
            else attend_stored<double>(g, tasks[i]);
        } else {
            if (g.single) attend_block<float>(g, tasks[i]);
            else attend_block<double>(g, tasks[i]);
        }
    });
}
REPLAYED(isobit_attention)
