// Causal grouped-query attention over paged keys and values: decoding, chunked prefill and packed rows in one loop.
//
// A task is a block of tokens of one sequence with all query heads of one key head. Scores, softmax and P·V are float64,
// or float32 in the order `rows32-v1` (reference/attention32.py), keys in ascending position. The order of every sum of a
// row depends on positions only, so neither batch, nor chunk, nor page changes a bit. With a window a task begins at the
// block of its first row's lowest key: slots, scores and factors are those of the keys from `base` on.
#include "attention_rows.h"

#include <vector>

constexpr int64_t BLOCK = 32;  // rows (tokens times query heads) of a task

struct Task {
    int64_t sequence, first, tokens;  // tokens first..first+tokens of the sequence's new rows
    int64_t head, heads;              // key heads head..head+heads
};

// Scores [stride] of `rows` rows over `keys` keys to weights, totals and lse. The factors of keys, [2][padded keys], are
// for float32 only.
template <class R>
static void softmax(const Attention& g, const Task& task, const int64_t* slots, int64_t kv_head, int64_t rows,
                    int64_t keys, R* scores, int64_t stride, R* total, float* factors) {
    const Factors32 both{factors, factors + padded(keys, PANEL)};
    if constexpr (sizeof(R) == sizeof(float)) {
        key_factors(g, g.k_scale, slots, kv_head, keys, float(g.scale), factors);
        key_factors(g, g.v_scale, slots, kv_head, keys, 1.0f, factors + padded(keys, PANEL));
    }
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
                                          padded(keys, PANEL) + 64);
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
    softmax(g, task, slots, kv_head, rows, keys, scores, stride, total, factors);
    std::memset(mixed, 0, rows * width * sizeof(R));
    for (int64_t j = 0; j < keys; j += KEY_BLOCK) {
        int64_t count = keys - j < KEY_BLOCK ? keys - j : KEY_BLOCK;
        FOR_STORE(g, read_rows, g, g.v, read_with<R>(g.v_scale), slots + j, kv_head, count, width, block)
        accumulate(rows, width / PANEL, scores + j, stride, block, width, count, mixed, width);
    }
    finish(g, task, kv_head, rows, width, mixed, total);
}

// One or two rows of each key head (decoding): too few to decode keys for, so these are read as they are stored. For 8 keys,
// then some values at a time, the heads take turns: so a page is read once and in order, and the next one asked for early.
static bool reads_stored(const Attention& g, int64_t tokens) {
    return tokens * (g.heads / g.kv_heads) <= 2 && g.dim % PANEL == 0;
}

template <class R, class T>
static void stored_scores(const Attention& g, const Task& task, const int64_t* slots, int64_t keys, int64_t rows,
                          const R* query, R* scores, int64_t stride) {
    const Stored<T> stored{(const T*)g.k, g.k_scale, slots, g.kv_heads, g.dim, keys, g.scale_step};
    const Stored<T> next{(const T*)g.v, g.v_scale, slots, g.kv_heads, g.dim, keys, g.scale_step};
    for (int64_t j = 0; j < keys; j += 8) {
        for (int64_t i = j; i < j + 8; i++) stored.prefetch_scale(i, task.head), next.prefetch_scale(i, task.head);
        for (int64_t h = 0; h < task.heads; h++) {
            const T* eight[8];
            float scale[8];
            for (int i = 0; i < 8; i++) {
                int64_t key = j + i < keys ? j + i : keys - 1;  // what lies beyond is overwritten by the softmax
                eight[i] = stored.row(key, task.head + h), scale[i] = stored.scale(key, task.head + h);
                if (j + i + AHEAD < keys) stored.prefetch(j + i + AHEAD, task.head + h);
                else next.prefetch(j + i + AHEAD - keys, task.head + h);
            }
            const R* row = query + h * rows * g.dim;
            if (rows == 2) eight_keys<2>(row, eight, scale, g.dim, scores + h * rows * stride + j, stride);
            else eight_keys<1>(row, eight, scale, g.dim, scores + h * rows * stride + j, stride);
        }
    }
}

template <class R, class T>
static void stored_mix(const Attention& g, const Task& task, const int64_t* slots, int64_t keys, int64_t rows,
                       const R* weights, int64_t stride, R* mixed) {
    constexpr int lanes = Columns<R>::lanes, many = 64 / lanes, few = 16 / lanes;
    const Stored<T> stored{(const T*)g.v, g.v_scale, slots, g.kv_heads, g.dim, keys, g.scale_step};
    for (int64_t j = 0; j < keys; j += step_of<R>)
        for (int64_t h = 0; h < task.heads; h++) {
            const R* weight = weights + h * rows * stride;
            R* out = mixed + h * rows * g.dim;
            for (int64_t first = 0; first < g.dim;) {
                const bool wide = first + 64 <= g.dim;
                if (rows == 2 && wide) mix_columns<2, many>(stored, task.head + h, j, first, weight, stride, out);
                else if (rows == 2) mix_columns<2, few>(stored, task.head + h, j, first, weight, stride, out);
                else if (wide) mix_columns<1, many>(stored, task.head + h, j, first, weight, stride, out);
                else mix_columns<1, few>(stored, task.head + h, j, first, weight, stride, out);
                first += wide ? 64 : 16;
            }
        }
}

template <class R>
static void attend_stored(const Attention& g, const Task& task) {
    static thread_local Scratch scratch;
    const int64_t group = g.heads / g.kv_heads, rows = task.tokens * group, width = g.dim;
    const int64_t row0 = g.row_start[task.sequence] + task.first, all = task.heads * rows;
    const int64_t position = g.context[task.sequence] + task.first, base = g.base(position);
    const int64_t keys = position + task.tokens - base, stride = padded(keys, PANEL);
    int64_t* slots = (int64_t*)scratch.get(padded(keys, 8) + all * (2 * width + stride) + all + stride + 64);
    g.slots(task.sequence, base, keys, slots);
    R* query = (R*)(slots + padded(keys, 8));
    R *scores = query + all * width, *mixed = scores + all * stride, *total = mixed + all * width;
    float* factors = (float*)(total + all);
    for (int64_t h = 0; h < task.heads; h++)
        for (int64_t i = 0; i < group; i++)
            read_tokens(g, g.q, (task.head + h) * group + i, row0, task.tokens, width, group * width,
                        query + (h * rows + i) * width);
    FOR_STORE(g, stored_scores, g, task, slots, keys, rows, query, scores, stride)
    for (int64_t h = 0; h < task.heads; h++)
        softmax(g, task, slots, task.head + h, rows, keys, scores + h * rows * stride, stride, total + h * rows, factors);
    FOR_STORE(g, stored_mix, g, task, slots, keys, rows, scores, stride, mixed)
    for (int64_t h = 0; h < task.heads; h++)
        finish(g, task, task.head + h, rows, width, mixed + h * rows * width, total + h * rows);
}

EXPORT void isobit_attention(const Attention* arguments) {
    const Attention& g = *arguments;
    const int64_t group = g.heads / g.kv_heads, step = BLOCK / group > 1 ? BLOCK / group : 1;
    // All key heads of a sequence in one task read its pages in order; unless that would leave threads without work.
    const int64_t together = g.sequences >= 4 * g.threads ? g.kv_heads : 1;
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
            work += (position + count - g.base(position)) * (count * g.heads + g.kv_heads) * g.dim / 16;
        }
    }
#pragma omp parallel for num_threads(useful_threads(g.threads, work)) schedule(dynamic, 1)
    for (size_t i = 0; i < tasks.size(); i++) {
        if (reads_stored(g, tasks[i].tokens)) {
            if (g.single) attend_stored<float>(g, tasks[i]);
            else attend_stored<double>(g, tasks[i]);
        } else {
            if (g.single) attend_block<float>(g, tasks[i]);
            else attend_block<double>(g, tasks[i]);
        }
    }
}
