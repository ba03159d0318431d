// Queries, keys and values before attention: rotary embedding, and the write into their slots of the cache.
//
// Elementwise expressions are those of the reference backend, rounding by rounding. Heads of a token are contiguous,
// tokens a stride apart.
#include "heads/heads.h"

#include "native/replay.h"
#include "norms/norms.h"

#include <atomic>

// The heads of one token, turned by the angles of its position (Su et al. 2021).
template <class T>
static INLINE void rotate(const T* x, const float* c, const float* s, int64_t heads, int64_t dim, float direction,
                          T* out) {
    const int64_t half = dim / 2;
    for (int64_t h = 0; h < heads; h++, x += dim, out += dim) {
        int64_t i = 0;
        for (; i + 16 <= half; i += 16) {
            f32x16 first = decode(x + i), second = decode(x + half + i);
            f32x16 cs = load<f32x16>(c + i), sn = load<f32x16>(s + i) * splat(direction);
            round_once(first * cs - second * sn, out + i);
            round_once(second * cs + first * sn, out + half + i);
        }
        for (; i < half; i++) {
            float first = decode_scalar(x[i]), second = decode_scalar(x[half + i]);
            float sn = s[i] * direction;
            round_to(first * c[i] - second * sn, out + i);
            round_to(second * c[i] + first * sn, out + half + i);
        }
    }
}

template <class T>
static void rotary(const T* x, int64_t stride, const float* cosine, const float* sine, const int64_t* positions,
                   int64_t tokens, int64_t heads, int64_t dim, float direction, T* out, int64_t threads) {
    for_each(useful_threads(threads, tokens * heads * dim / 4), tokens, [&](int64_t t) {
        const int64_t place = positions[t] * (dim / 2);
        rotate(x + t * stride, cosine + place, sine + place, heads, dim, direction, out + t * heads * dim);
    });
}

EXPORT void isobit_rotary(int64_t kind, const void* x, int64_t stride, const float* cosine, const float* sine,
                          const int64_t* positions, int64_t tokens, int64_t heads, int64_t dim, int64_t inverse,
                          void* out, int64_t threads) {
    FOR_KIND(kind, rotary((const T*)x, stride, cosine, sine, positions, tokens, heads, dim, inverse ? -1.0f : 1.0f,
                          (T*)out, threads))
}
REPLAYED(isobit_rotary)

// Keys or values in the cache: codes with a scale a token and head, or, where the scales are null, as they are.
struct Cache {
    void* data;
    float* scales;
    int64_t heads, dim, form, power_of_two;

    // One head. Returns false on NaN or infinity.
    template <Kind Form, class T>
    INLINE bool code(const T* row, int64_t place) const {
        const uint32_t amax = run_amax(row, dim);
        if (!is_finite(amax)) return false;
        const float scale = scales[place] = scale_of(amax, power_of_two, Form == INT8 ? LARGEST_INT8 : LARGEST);
        uint8_t* codes = (uint8_t*)data + place * dim;
        if (power_of_two) encode_run<true, Form>(row, dim, scale, codes);
        else encode_run<false, Form>(row, dim, scale, codes);
        return true;
    }

    // The heads of one token. Returns false on NaN or infinity, which codes cannot hold.
    template <class T>
    INLINE bool write(const T* x, int64_t slot) const {
        if (scales == nullptr) {
            std::memcpy((T*)data + slot * heads * dim, x, heads * dim * sizeof(T));
            return true;
        }
        for (int64_t h = 0; h < heads; h++) {
            const T* row = x + h * dim;
            const int64_t place = slot * heads + h;
            if (!(form == INT8 ? code<INT8>(row, place) : code<E4M3>(row, place))) return false;
        }
        return true;
    }
};

template <class T>
static bool write_all(const Cache& cache, const T* x, int64_t stride, const int64_t* slots, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t++)
        if (!cache.write(x + t * stride, slots[t])) return false;
    return true;
}

// Keys and values [tokens, heads, dim] into their slots. Returns 1 on NaN or infinity.
EXPORT int64_t isobit_kv_write(int64_t kind, const void* k, const void* v, int64_t k_stride, int64_t v_stride,
                               const int64_t* slots, int64_t tokens, int64_t heads, int64_t dim, int64_t form,
                               int64_t power_of_two, void* store_k, void* store_v, float* scale_k, float* scale_v) {
    const Cache keys{store_k, scale_k, heads, dim, form, power_of_two};
    const Cache values{store_v, scale_v, heads, dim, form, power_of_two};
    bool good;
    FOR_KIND(kind, good = write_all(keys, (const T*)k, k_stride, slots, tokens) &&
                          write_all(values, (const T*)v, v_stride, slots, tokens))
    return !good;
}
REPLAYED(isobit_kv_write)

// Heads of one token, each normed first if there are weights: padded ones, with room for a row as R and as T.
template <class R, class T>
static INLINE void make_heads(const T* x, const R* weight, double eps, const float* c, const float* s, int64_t heads,
                              int64_t dim, R* wide, T* normed, T* out) {
    if (weight == nullptr) {
        rotate(x, c, s, heads, dim, 1.0f, out);
        return;
    }
    for (int64_t h = 0; h < heads; h++) {
        rms_norm_row(x + h * dim, (const T*)nullptr, (T*)nullptr, weight, dim, eps, wide, normed);
        rotate(normed, c, s, 1, dim, 1.0f, out + h * dim);
    }
}

template <class R, class T>
static bool make_inputs(const HeadInputs& g) {
    const Cache keys{g.store_k, g.scale_k, g.kv_heads, g.dim, g.form, g.power_of_two};
    const Cache values{g.store_v, g.scale_v, g.kv_heads, g.dim, g.form, g.power_of_two};
    std::atomic<bool> good{true};
    const int64_t work = g.tokens * (g.heads + 2 * g.kv_heads) * g.dim / 4, width = norm_width<R>(g.dim);
    for_ranges(useful_threads(g.threads, work), g.tokens, 1, [&](int64_t first, int64_t last) {
        static thread_local Scratch scratch;
        R *q_norm = (R*)scratch.get(4 * width), *k_norm = q_norm + width, *wide = k_norm + width;
        T* normed = (T*)(wide + width);
        if (g.q_norm) decode_weight(g.norm_kind, g.q_norm, g.dim, q_norm), decode_weight(g.norm_kind, g.k_norm, g.dim, k_norm);
        else q_norm = k_norm = nullptr;
        for (int64_t t = first; t < last; t++) {
            const float *c = g.cosine + g.positions[t] * (g.dim / 2), *s = g.sine + g.positions[t] * (g.dim / 2);
            const T *q = (const T*)g.q + t * g.q_stride, *k = (const T*)g.k + t * g.k_stride;
            T *query = (T*)g.rotated_q + t * g.heads * g.dim, *key = (T*)g.rotated_k + t * g.kv_heads * g.dim;
            make_heads(q, q_norm, g.eps, c, s, g.heads, g.dim, wide, normed, query);
            make_heads(k, k_norm, g.eps, c, s, g.kv_heads, g.dim, wide, normed, key);
            if (!keys.write(key, g.slots[t]) || !values.write((const T*)g.v + t * g.v_stride, g.slots[t])) good = false;
        }
    }, 1);
    return good;
}

// Queries and keys normed and turned, keys and values written, in one pass. No two tokens have one slot. Returns 1 on NaN or
// infinity.
EXPORT int64_t isobit_head_inputs(const HeadInputs* arguments) {
    bool good;
    const HeadInputs& g = *arguments;
    FOR_KIND(g.kind, good = (g.single ? make_inputs<float, T>(g) : make_inputs<double, T>(g)))
    return !good;
}
REPLAYED(isobit_head_inputs)
