// Causal grouped-query attention over stored keys and values, forward and backward, in float64.
//
// One (row, head) is one loop over its keys in ascending position, through the same functions whether it decodes, prefills or
// is learned from: its bits cannot depend on the batch, the chunk or the pages. Sums over keys run in eight lanes of the
// absolute position.
#include "common.h"

namespace {

struct Store {
    const void *k, *v;
    const float *k_scale, *v_scale;  // [slots, kv_heads], or null
    int type;                        // 0 e4m3, 1 bf16, 2 fp32
};

struct Layout {
    const int64_t *row_start, *context;
    const int32_t* page_table;
    long sequences, pages, page_size;
};

inline float e4m3_value(uint8_t code) {
    // an E4M3 code is a float16 with the exponent's bias off by 8: exact for subnormals too
    uint32_t magnitude = code & 0x7f, exponent = magnitude >> 3, mantissa = magnitude & 7;
    float value = exponent ? (float)(8 + mantissa) * (float)(1u << exponent) * 0x1p-10f : (float)mantissa * 0x1p-9f;
    return code & 0x80 ? -value : value;
}

struct CodeTable {
    float value[256];
    CodeTable() {
        for (int code = 0; code < 256; code++) value[code] = e4m3_value((uint8_t)code);
    }
} table;

// Row `slot` of head `head` as float64 [padded D]: code * scale rounded to float32, as QTensor.dequantize does.
inline void read_row(const void* data, const float* scale, int type, long slot, long heads, long head, long D, long padded,
                     double* out) {
    long at = slot * heads + head;
    if (type == 1) {
        const uint16_t* row = (const uint16_t*)data + at * D;
        for (long d = 0; d < D; d++) out[d] = bf16_to_float(row[d]);
    } else if (type == 2) {
        const float* row = (const float*)data + at * D;
        for (long d = 0; d < D; d++) out[d] = row[d];
    } else {
        const uint8_t* row = (const uint8_t*)data + at * D;
        float s = scale[at];
        for (long d = 0; d < D; d++) out[d] = table.value[row[d]] * s;
    }
    for (long d = D; d < padded; d++) out[d] = 0.0;
}

inline void read_plain(const void* data, int bf16, long at, long D, long padded, double* out) {
    for (long d = 0; d < D; d++) out[d] = bf16 ? bf16_to_float(((const uint16_t*)data)[at + d]) : ((const float*)data)[at + d];
    for (long d = D; d < padded; d++) out[d] = 0.0;
}

inline void write_plain(void* data, int bf16, long at, long D, const double* values) {
    for (long d = 0; d < D; d++) {
        if (bf16) ((uint16_t*)data)[at + d] = double_to_bf16(values[d]);
        else ((float*)data)[at + d] = (float)values[d];
    }
}

inline double tree(v8 x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }

// Products of stored values are exact in float64, so the fused multiply-add of a dot product changes nothing; where
// probabilities are multiplied it does, but every caller comes through here.
#if defined(__GNUC__) && !defined(__clang__)
#define FUSED __attribute__((noinline, optimize("fp-contract=fast")))
#else
#define FUSED __attribute__((noinline))
#endif

FUSED void dots(const double* x, const double* rows, long count, long padded, double scale, double* out) {
    for (long j = 0; j < count; j++) {
        v8 sum = {};
        for (long d = 0; d < padded; d += 8) sum += *(const v8*)(x + d) * *(const v8*)(rows + j * padded + d);
        out[j] = tree(sum) * scale;
    }
}

// out[d] += sum over j of weight[j] * rows[j][d], ascending
FUSED void combine(const double* weight, const double* rows, long count, long padded, double* out) {
    for (long d = 0; d < padded; d += 8) {
        v8 sum = *(v8*)(out + d);
        for (long j = 0; j < count; j++) sum += (weight[j] - (v8){}) * *(const v8*)(rows + j * padded + d);
        *(v8*)(out + d) = sum;
    }
}

// rows[j][d] += weight[j] * x[d]
FUSED void spread(const double* weight, const double* x, long count, long padded, double* rows) {
    for (long j = 0; j < count; j++)
        for (long d = 0; d < padded; d += 8) *(v8*)(rows + j * padded + d) += (weight[j] - (v8){}) * *(const v8*)(x + d);
}

// exp(score - shift) in place, and their sum in eight lanes of the position
double exponentials(double* scores, long count, double shift) {
    for (long j = 0; j < count; j++) scores[j] = exp_negative(std::min(scores[j] - shift, 0.0));
    v8 sum = {};
    long j = 0;
    for (; j + 8 <= count; j += 8) sum += *(const v8*)(scores + j);
    for (long lane = 0; j < count; j++, lane++) sum[lane] += scores[j];
    return tree(sum);
}

inline long slot_of(const Layout& layout, long sequence, long position) {
    long page = layout.page_table[sequence * layout.pages + position / layout.page_size];
    return page * layout.page_size + position % layout.page_size;
}

void read_keys(const Store& store, const Layout& layout, long sequence, long count, long heads, long head, long D, long padded,
               double* keys, double* values) {
    for (long j = 0; j < count; j++) {
        long slot = slot_of(layout, sequence, j);
        read_row(store.k, store.k_scale, store.type, slot, heads, head, D, padded, keys + j * padded);
        read_row(store.v, store.v_scale, store.type, slot, heads, head, D, padded, values + j * padded);
    }
}

void attend(const void* q, int bf16, const Store& store, const Layout& layout, double scale, long sequence, long head, long H,
            long KV, long D, void* out, float* lse) {
    long begin = layout.row_start[sequence], end = layout.row_start[sequence + 1], context = layout.context[sequence];
    long padded = (D + 7) / 8 * 8, count = context + end - begin, group = H / KV;
    if (begin == end) return;
    Buffer keys(count * padded), values(count * padded), scores(count), query(padded), mixed(padded);
    read_keys(store, layout, sequence, count, KV, head, D, padded, keys.data, values.data);
    for (long row = begin; row < end; row++) {
        long visible = context + row - begin + 1;
        for (long h = head * group; h < (head + 1) * group; h++) {
            read_plain(q, bf16, (row * H + h) * D, D, padded, query.data);
            dots(query.data, keys.data, visible, padded, scale, scores.data);
            double peak = *std::max_element(scores.data, scores.data + visible);
            double total = exponentials(scores.data, visible, peak);
            std::memset(mixed.data, 0, padded * sizeof(double));
            combine(scores.data, values.data, visible, padded, mixed.data);
            for (long d = 0; d < D; d++) mixed.data[d] = mixed.data[d] / total;
            write_plain(out, bf16, (row * H + h) * D, D, mixed.data);
            lse[row * H + h] = (float)(peak + std::log(total));
        }
    }
}

struct Gradients {
    const void *dout, *q, *out;
    const float* lse;
    void *dq, *dk, *dv;
};

void attend_backward(const Gradients& g, int bf16, const Store& store, const Layout& layout, double scale, long sequence,
                     long head, long H, long KV, long D) {
    long begin = layout.row_start[sequence], end = layout.row_start[sequence + 1], count = end - begin;
    long padded = (D + 7) / 8 * 8, group = H / KV, size = count * padded;
    Buffer keys(size), values(size), dkeys(size), dvalues(size), weights(count), dscores(count);
    Buffer query(padded), gradient(padded), output(padded), dquery(padded);
    std::memset(dkeys.data, 0, size * sizeof(double));
    std::memset(dvalues.data, 0, size * sizeof(double));
    read_keys(store, layout, sequence, count, KV, head, D, padded, keys.data, values.data);
    for (long row = begin; row < end; row++) {
        long visible = row - begin + 1;
        for (long h = head * group; h < (head + 1) * group; h++) {
            long at = (row * H + h) * D;
            read_plain(g.q, bf16, at, D, padded, query.data);
            read_plain(g.dout, bf16, at, D, padded, gradient.data);
            read_plain(g.out, bf16, at, D, padded, output.data);
            double inner;
            dots(gradient.data, output.data, 1, padded, 1.0, &inner);
            dots(query.data, keys.data, visible, padded, scale, weights.data);
            for (long j = 0; j < visible; j++)  // the rounding of lse may lift the largest one a little above 0
                weights.data[j] = std::exp(weights.data[j] - (double)g.lse[row * H + h]);
            dots(gradient.data, values.data, visible, padded, 1.0, dscores.data);
            for (long j = 0; j < visible; j++) dscores.data[j] = weights.data[j] * (dscores.data[j] - inner) * scale;
            std::memset(dquery.data, 0, padded * sizeof(double));
            combine(dscores.data, keys.data, visible, padded, dquery.data);
            write_plain(g.dq, bf16, at, D, dquery.data);
            spread(dscores.data, query.data, visible, padded, dkeys.data);
            spread(weights.data, gradient.data, visible, padded, dvalues.data);
        }
    }
    for (long j = 0; j < count; j++) {
        long at = ((begin + j) * KV + head) * D;
        write_plain(g.dk, bf16, at, D, dkeys.data + j * padded);
        write_plain(g.dv, bf16, at, D, dvalues.data + j * padded);
    }
}

}  // namespace

extern "C" {

void isobit_attention(const void* q, int bf16, const Store* store, const Layout* layout, double scale, long H, long KV, long D,
                      void* out, float* lse, int threads) {
    long tasks = layout->sequences * KV;
#pragma omp parallel for num_threads(threads) if (threads > 1 && tasks > 1) schedule(dynamic, 4)
    for (long task = 0; task < tasks; task++)
        attend(q, bf16, *store, *layout, scale, task / KV, task % KV, H, KV, D, out, lse);
}

void isobit_attention_backward(const Gradients* gradients, int bf16, const Store* store, const Layout* layout, double scale,
                               long H, long KV, long D, int threads) {
    long tasks = layout->sequences * KV;
#pragma omp parallel for num_threads(threads) if (threads > 1 && tasks > 1) schedule(dynamic, 4)
    for (long task = 0; task < tasks; task++)
        attend_backward(*gradients, bf16, *store, *layout, scale, task / KV, task % KV, H, KV, D);
}

}  // extern "C"
