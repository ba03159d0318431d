// What the attention operators read: rows in sequences, keys and values in pages.
#pragma once

#include "quantize/quantize.h"
#include "native/tile.h"

constexpr int64_t KEY_BLOCK = 64;  // keys that are decoded at a time

struct Attention {
    int64_t kind;        // of q and the result
    int64_t store_kind;  // of k and v
    const void *q, *k, *v;
    const float *k_scale, *v_scale;  // [slots, kv_heads], or one; for E4M3 and INT8
    const int64_t *row_start, *context;
    const int32_t* page_table;
    int64_t pages, page_size, sequences, heads, kv_heads, dim;
    double scale;
    void* out;
    float* lse;
    const void* dout;
    void *dq, *dk, *dv;
    int64_t threads, rows, single;
    int64_t scale_step;  // 1, or 0 where one scale holds for the whole store
    int64_t probabilities;  // the Kind to which weights are rounded before they meet values: FP32 is none, BF16 for `single`
    int64_t window;         // a row at position p sees the keys p - window + 1 to p
    const float* sinks;     // of each head one score more, of a key whose value is 0; or none
    const double* boundaries;  // [CODES] the least score - peak of every code of a weight in E4M3 but 0

    int64_t lowest(int64_t position) const { return position < window ? 0 : position - window + 1; }

    // Where the keys that are computed for a row at `position` and later ones begin: at a multiple of every panel and
    // chain, so that the keys left out would have added zeros, and all others keep their lanes.
    int64_t base(int64_t position) const { return lowest(position) / KEY_BLOCK * KEY_BLOCK; }

    // Where `count` keys of a sequence are, from key `first` on.
    void slots(int64_t sequence, int64_t first, int64_t count, int64_t* out) const {
        const int32_t* page = page_table + sequence * pages + first / page_size;
        for (int64_t j = 0, i = first % page_size; j < count; page++, i = 0)
            for (; i < page_size && j < count; i++, j++) out[j] = *page * page_size + i;
    }
};

EXPORT void isobit_attention(const Attention* arguments);
EXPORT void isobit_attention_backward(const Attention* arguments);

// Values [count][width], natural order, as double or float; columns beyond dim are zero. Codes times their scale, or
// where `scales` is null as `decode_off` gives them.
template <class R, class T>
static void read_rows(const Attention& g, const void* data, const float* scales, const int64_t* slots, int64_t kv_head,
                      int64_t count, int64_t width, R* out) {
    int64_t ahead = 0;  // rows of one head are far apart: ask for them early
    for (int64_t j = 0; j < count; j++) {
        for (; ahead < count && ahead <= j + 8; ahead++) {
            const char* next = (const char*)((const T*)data + (slots[ahead] * g.kv_heads + kv_head) * g.dim);
            for (int64_t byte = 0; byte < g.dim * int64_t(sizeof(T)); byte += 64) __builtin_prefetch(next + byte);
        }
        int64_t row = slots[j] * g.kv_heads + kv_head, i = 0;
        const T* source = (const T*)data + row * g.dim;
        R* target = out + j * width;
        const float plain = 1.0f / OFF<T>, scale = scales ? scales[row * g.scale_step] : plain;
        for (; i + 16 <= g.dim; i += 16) {
            if constexpr (sizeof(T) == 1)
                put(target + i, scales ? decode(source + i) * splat(scale) : decode_off(source + i));
            else put(target + i, decode(source + i));
        }
        for (; i < g.dim; i++) target[i] = R(decode_scalar(source[i]) * scale);
        for (; i < width; i++) target[i] = R(0);
    }
}

// Panels of 16 rows, transposed: out[panel][dim][16]; rows beyond count are zero. Codes as `read_rows` gives them.
template <class R, class T>
static void read_panels(const Attention& g, const void* data, const float* scales, const int64_t* slots,
                        int64_t kv_head, int64_t count, R* out) {
    static thread_local Scratch scratch;
    T* zeros = (T*)scratch.get((17 * g.dim * sizeof(T) + 64) / 8 + 8);
    T* turned = zeros + g.dim;
    std::memset(zeros, 0, g.dim * sizeof(T));
    for (int64_t p = 0; p * PANEL < count; p++, out += g.dim * PANEL) {
        const T* rows[16];
        f32x16 scale = splat(1.0f);
        for (int64_t i = 0; i < PANEL; i++) {
            rows[i] = zeros;
            if (p * PANEL + i >= count) continue;
            int64_t row = slots[p * PANEL + i] * g.kv_heads + kv_head;
            rows[i] = (const T*)data + row * g.dim;
            if (scales) scale[i] = scales[row * g.scale_step];
        }
        transpose_rows(rows, g.dim, turned);
        for (int64_t d = 0; d < g.dim; d++) {
            if constexpr (sizeof(T) == 1)
                put(out + d * PANEL, scales ? decode(turned + d * PANEL) * scale : decode_off(turned + d * PANEL));
            else put(out + d * PANEL, decode(turned + d * PANEL));
        }
    }
}

// The scales of keys, of each of some heads a row [padded keys], `apart` from the next.
static INLINE void read_scales(const Attention& g, const float* scales, const int64_t* slots, int64_t kv_head,
                               int64_t heads, int64_t keys, float* out, int64_t apart) {
    typedef Bytes16<float> Four;
    int64_t h = 0;
    for (; g.scale_step == 1 && h + 4 <= heads; h += 4)  // a key has them side by side: four keys are turned
        for (int64_t j = 0; j < keys; j += 4) {
            Four::V own[4], even[2], odd[2];
            for (int i = 0; i < 4; i++)
                own[i] = load<Four::V>(scales + slots[j + i < keys ? j + i : keys - 1] * g.kv_heads + kv_head + h);
            for (int i = 0; i < 2; i++) {
                even[i] = i ? Four::high(own[0], own[2]) : Four::low(own[0], own[2]);
                odd[i] = i ? Four::high(own[1], own[3]) : Four::low(own[1], own[3]);
                store(out + (h + 2 * i) * apart + j, Four::low(even[i], odd[i]));
                store(out + (h + 2 * i + 1) * apart + j, Four::high(even[i], odd[i]));
            }
        }
    for (; h < heads; h++)
        for (int64_t j = 0; j < keys; j++)
            out[h * apart + j] = scales[(slots[j] * g.kv_heads + kv_head + h) * g.scale_step];
}

// What a float32 score, or weight, of each key is multiplied by: `by`, times its scale and what its code is off by.
static INLINE void key_factors(const Attention& g, const float* scales, const int64_t* slots, int64_t kv_head,
                               int64_t heads, int64_t keys, float by, float* out, int64_t apart) {
    const float off = g.store_kind == E4M3 ? OFF<uint8_t> : OFF<int8_t>;
    if (scales) read_scales(g, scales, slots, kv_head, heads, keys, out, apart);
    for (int64_t h = 0; h < heads; h++, out += apart) {
        for (int64_t j = scales ? keys : 0; j < padded(keys, PANEL); j++) out[j] = scales ? 1.0f : by;
        for (int64_t j = 0; scales && j < keys; j += PANEL) store(out + j, load<f32x16>(out + j) * splat(off) * splat(by));
    }
}

#define FOR_STORE(g, NAME, ...)                                                    \
    switch ((g).store_kind) {                                                      \
        case E4M3: NAME<R, uint8_t>(__VA_ARGS__); break;                           \
        case INT8: NAME<R, int8_t>(__VA_ARGS__); break;                            \
        case BF16: NAME<R, uint16_t>(__VA_ARGS__); break;                          \
        default: NAME<R, float>(__VA_ARGS__);                                      \
    }

// Rows of q, out or their gradients: head `head` of `count` tokens from `first`, as R [count][width].
template <class R>
static void read_tokens(const Attention& g, const void* data, int64_t head, int64_t first, int64_t count, int64_t width,
                        int64_t stride, R* out) {
    for (int64_t t = 0; t < count; t++) {
        int64_t offset = ((first + t) * g.heads + head) * g.dim;
        R* target = out + t * stride;
        if (g.kind == BF16) decode_row((const uint16_t*)data + offset, g.dim, target);
        else decode_row((const float*)data + offset, g.dim, target);
        for (int64_t i = g.dim; i < width; i++) target[i] = R(0);
    }
}
