// The short convolution of linear attention and its SiLU (kernels/delta/definition.py), and its gradients: a strip of channels
// through all rows, with the last rows that the convolution sees at hand.
#include "delta/delta.h"
#include "native/replay.h"

namespace {

constexpr int VECTORS = 4;
constexpr int64_t STRIP = 16 * VECTORS;
constexpr int64_t CHAINED = 32;  // rows whose terms of a weight's gradient are one chain

struct Convolution {
    const Sequences& sequences;
    const float *weight, *bias;  // [channels][width]; [channels], or null
    int64_t channels, width;

    int64_t in_strip(int64_t first) const { return channels - first < STRIP ? channels - first : STRIP; }
    // The weights of a strip, [width][STRIP].
    void weights(int64_t first, float* out) const {
        for (int64_t c = 0; c < STRIP; c++)
            for (int64_t j = 0; j < width; j++)
                out[j * STRIP + c] = first + c < channels ? weight[(first + c) * width + j] : 0.0f;
    }
    // Where its sums begin, [STRIP].
    void biases(int64_t first, float* out) const {
        for (int64_t c = 0; c < STRIP; c++) out[c] = bias && first + c < channels ? bias[first + c] : 0.0f;
    }
};

// The last `width` inputs of a strip, as a ring of rows [STRIP]; input i is at i % width.
struct Ring {
    float* data;
    int64_t width;
    float* at(int64_t i) const { return data + i % width * STRIP; }
};

// Σ_j w[j] · x[first + j], a chain from `begin` [STRIP].
INLINE void convolved(const Ring& inputs, int64_t first, const float* weights, const float* begin, f32x16* total) {
    for (int n = 0; n < VECTORS; n++) total[n] = load<f32x16>(begin + 16 * n);
    for (int64_t j = 0; j < inputs.width; j++) {
        const float *x = inputs.at(first + j), *w = weights + j * STRIP;
        for (int n = 0; n < VECTORS; n++)
            total[n] = multiply_add(load<f32x16>(x + 16 * n), load<f32x16>(w + 16 * n), total[n]);
    }
}

template <class T>
void convolve_strip(const Convolution& g, const T* x, T* stored, int64_t first, T* y) {
    static thread_local Scratch scratch;
    const int64_t count = g.in_strip(first), earlier = g.width - 1;
    float* weights = (float*)scratch.get((3 * g.width + 1) * STRIP / 2);
    const Ring ring{weights + g.width * STRIP, g.width};
    T* history = (T*)(weights + 2 * g.width * STRIP);
    float* bias = weights + 3 * g.width * STRIP;
    g.weights(first, weights);
    g.biases(first, bias);
    std::memset(ring.data, 0, g.width * STRIP * sizeof(float));
    for (int64_t s = 0; s < g.sequences.count; s++) {
        const int64_t start = g.sequences.row_start[s], stop = g.sequences.row_start[s + 1];
        const int64_t before = stored && start < stop ? g.sequences.before(s) : -1;
        for (int64_t i = 0; i < earlier; i++) {
            T* one = history + i * STRIP;
            std::memset(one, 0, STRIP * sizeof(T));
            if (before >= 0) std::memcpy(one, stored + (before * earlier + i) * g.channels + first, count * sizeof(T));
            decode_row(one, STRIP, ring.at(i));
        }
        for (int64_t row = start; row < stop; row++) {
            f32x16 total[VECTORS];
            decode_row(x + row * g.channels + first, count, ring.at(row - start + earlier));
            convolved(ring, row - start, weights, bias, total);
            for (int n = 0; n < VECTORS; n++) total[n] = total[n] / (splat(1.0f) + exponential(-total[n]));
            write_columns<VECTORS>(total, count, y + row * g.channels + first);
            const int64_t page = stored ? g.sequences.kept(s, row) : -1;
            for (int64_t i = 0; page >= 0 && i < earlier; i++) {
                const int64_t seen = row - start + 1 + i;
                const T* one = seen < earlier ? history + seen * STRIP : x + (start + seen - earlier) * g.channels + first;
                std::memcpy(stored + (page * earlier + i) * g.channels + first, one, count * sizeof(T));
            }
        }
    }
}

template <class T>
void convolve(const Convolution& g, const T* x, T* stored, T* y, int64_t threads) {
    const int64_t rows = g.sequences.row_start[g.sequences.count];
    for_each(useful_threads(threads, rows * g.channels / 2), padded(g.channels, STRIP) / STRIP, [&](int64_t strip) {
        convolve_strip(g, x, stored, strip * STRIP, y);
    });
}

// The sums of the gradients of weight and bias: chains of CHAINED rows of the batch, added in ascending order.
struct WeightSums {
    float *chain, *total;  // [width + 1][STRIP]: the bias is the last
    int64_t width;

    void add(const Ring& inputs, int64_t first, const f32x16* dtotal, bool ends) const {
        for (int64_t j = 0; j <= width; j++) {
            const float* x = inputs.at(first + j);
            for (int n = 0; n < VECTORS; n++) {
                float *one = chain + j * STRIP + 16 * n, *all = total + j * STRIP + 16 * n;
                const f32x16 by = j < width ? load<f32x16>(x + 16 * n) : splat(1.0f);
                const f32x16 sum = multiply_add(dtotal[n], by, load<f32x16>(one));
                store(one, ends ? splat(0.0f) : sum);
                if (ends) store(all, load<f32x16>(all) + sum);
            }
        }
    }
};

// dx[t] = Σ_d dtotal[t + d] · w[width - 1 - d], where dtotal is zero after a sequence's last row.
template <class T>
void gradient_strip(const Convolution& g, const T* dy, const T* x, int64_t first, T* dx, float* dweight, float* dbias) {
    static thread_local Scratch scratch;
    const int64_t count = g.in_strip(first), earlier = g.width - 1, size = g.width * STRIP;
    float *weights = (float*)scratch.get(3 * size + 2 * STRIP), *backward = weights + size;
    const Ring inputs{backward + size, g.width}, later{inputs.data + size, g.width};
    const WeightSums sums{later.data + size, later.data + 2 * size + STRIP, g.width};
    float *bias = sums.total + size + STRIP, *zeros = bias + STRIP;
    g.weights(first, weights);
    g.biases(first, bias);
    for (int64_t j = 0; j < g.width; j++) std::memcpy(backward + j * STRIP, weights + (earlier - j) * STRIP, STRIP * sizeof(float));
    std::memset(sums.chain, 0, 2 * (size + STRIP) * sizeof(float));
    std::memset(zeros, 0, STRIP * sizeof(float));
    const int64_t rows = g.sequences.row_start[g.sequences.count];
    for (int64_t s = 0; s < g.sequences.count; s++) {
        const int64_t start = g.sequences.row_start[s], stop = g.sequences.row_start[s + 1];
        std::memset(inputs.data, 0, size * sizeof(float));
        for (int64_t row = start; row < stop + (stop > start ? earlier : 0); row++) {
            f32x16 total[VECTORS], gradient[VECTORS];
            float* own = later.at(row - start);
            if (row < stop) {
                decode_row(x + row * g.channels + first, count, inputs.at(row - start + earlier));
                convolved(inputs, row - start, weights, bias, total);
                read_columns<VECTORS>(dy + row * g.channels + first, count, gradient);
                for (int n = 0; n < VECTORS; n++) {
                    const f32x16 one = splat(1.0f), sigma = one / (one + exponential(-total[n]));
                    gradient[n] = gradient[n] * sigma * (one + total[n] * (one - sigma));
                }
                sums.add(inputs, row - start, gradient, row % CHAINED == CHAINED - 1 || row + 1 == rows);
            } else {
                for (int n = 0; n < VECTORS; n++) gradient[n] = splat(0.0f);
            }
            for (int n = 0; n < VECTORS; n++) store(own + 16 * n, gradient[n]);
            if (row - start < earlier) continue;
            convolved(later, row - start - earlier, backward, zeros, total);
            write_columns<VECTORS>(total, count, dx + (row - earlier) * g.channels + first);
        }
    }
    for (int64_t c = 0; c < count; c++)
        for (int64_t j = 0; j < g.width; j++) dweight[(first + c) * g.width + j] = sums.total[j * STRIP + c];
    if (dbias) std::memcpy(dbias + first, sums.total + size, count * sizeof(float));
}

template <class T>
void gradients(const Convolution& g, const T* dy, const T* x, T* dx, float* dweight, float* dbias, int64_t threads) {
    const int64_t rows = g.sequences.row_start[g.sequences.count];
    for_each(useful_threads(threads, rows * g.channels), padded(g.channels, STRIP) / STRIP, [&](int64_t strip) {
        gradient_strip(g, dy, x, strip * STRIP, dx, dweight, dbias);
    });
}

}  // namespace

// Where a page is read by one sequence, no earlier one writes it. `stored` [pages][width - 1][channels], or null.
EXPORT void isobit_short_convolution(const Sequences* sequences, int64_t kind, const void* x, const float* weight,
                                     const float* bias, int64_t channels, int64_t width, void* stored, void* y,
                                     int64_t threads) {
    const Convolution g{*sequences, weight, bias, channels, width};
    FOR_KIND(kind, convolve(g, (const T*)x, (T*)stored, (T*)y, threads))
}
REPLAYED(isobit_short_convolution)

// Of whole sequences.
EXPORT void isobit_short_convolution_backward(const Sequences* sequences, int64_t kind, const void* dy, const void* x,
                                              const float* weight, const float* bias, int64_t channels,
                                              int64_t width, void* dx, float* dweight, float* dbias, int64_t threads) {
    const Convolution g{*sequences, weight, bias, channels, width};
    FOR_KIND(kind, gradients(g, (const T*)dy, (const T*)x, (T*)dx, dweight, dbias, threads))
}
