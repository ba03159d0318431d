// The self-test of `rows32-v1` and `delta32-v1` (kernels/norms/float32.py, delta.py): norms, gates, attention and linear
// attention of hard numbers against scalar arithmetic.
#include <initializer_list>

#include "attention/attention.h"
#include "delta/delta.h"
#include "norms/norms.h"
#include "native/self_test.h"

namespace {

// Numbers that are hard to add: of size one, with wide exponents, of few magnitudes of either sign, and tiny ones.
float hard(Random& random, int64_t data) {
    const uint32_t r = random.next(), sign = (r & 1) << 31, mantissa = r >> 1 & 0x7fffff, any = r >> 24;
    if (data == 0) return bits_of<float>(sign | (124 + any % 4) << 23 | mantissa);
    if (data == 1) return bits_of<float>(sign | (127 - 20 + any % 25) << 23 | mantissa);
    if (data == 2) return bits_of<float>(sign | (127 - any % 3 * 8) << 23 | (mantissa & 0x600000));
    return bits_of<float>(sign | (any % 66) << 23 | mantissa);
}

// ---- scalar arithmetic, with constants of its own ----

__attribute__((noinline)) float fused(float a, float b, float c) { return std::fma(a, b, c); }

float halves(float* lane, int64_t lanes) {
    for (int64_t half = lanes / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; i++) lane[i] = lane[i] + lane[i + half];
    return lane[0];
}
float dot(const float* a, const float* b, int64_t count, int64_t lanes) {
    float lane[64] = {0};
    for (int64_t i = 0; i < count; i++) lane[i % lanes] = fused(a[i], b[i], lane[i % lanes]);
    for (int64_t i = count; i % lanes; i++) lane[i % lanes] = lane[i % lanes] + 0.0f;  // zeros follow: a -0 becomes 0
    return halves(lane, lanes);
}
float scalar_exp(float x) {
    if (x < -87.0f) return 0.0f;
    if (x > 88.0f) x = 88.0f;
    const float magic = 0x1.8p23f, shifted = x * 1.44269504f + magic, n = shifted - magic;
    const float r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x));
    float p = 1.0f / 5040.0f;
    for (float term : {720.0f, 120.0f, 24.0f, 6.0f, 2.0f, 1.0f, 1.0f}) p = fused(p, r, 1.0f / term);
    return p * bits_of<float>(uint32_t(int32_t(n) + 127) << 23);
}

int64_t differing(const float* found, const float* wanted, int64_t count) {
    int64_t different = 0;
    for (int64_t i = 0; i < count; i++) different += bits_of<uint32_t>(found[i]) != bits_of<uint32_t>(wanted[i]);
    return different;
}

// ---- norms and gates ----

int64_t differing_rows(Random& random, int64_t data) {
    constexpr int64_t N = 150;
    float x[2 * N], weight[N], found[N], wanted[N], rstd = 0;
    for (float& one : x) one = hard(random, data);
    for (float& one : weight) one = hard(random, 0);
    isobit_rms_norm(FP32, FP32, 1, x, nullptr, weight, 1, N, 1e-6, found, nullptr, &rstd, nullptr, nullptr, 1, 0, 1);
    const float wanted_rstd = 1.0f / std::sqrt(dot(x, x, N, 64) / float(N) + 1e-6f);
    for (int64_t i = 0; i < N; i++) wanted[i] = x[i] * wanted_rstd * weight[i];
    int64_t different = differing(&rstd, &wanted_rstd, 1) + differing(found, wanted, N);
    isobit_gate_mul(SILU, FP32, 1, x, 1, N, found, nullptr, nullptr, 1, 0, 1);
    for (int64_t i = 0; i < N; i++) wanted[i] = x[i] / (1.0f + scalar_exp(-x[i])) * x[N + i];
    different += differing(found, wanted, N);
    isobit_gate_mul(GELU_TANH, FP32, 1, x, 1, N, found, nullptr, nullptr, 1, 0, 1);
    for (int64_t i = 0; i < N; i++) {
        const float near = x[i] > 16.0f ? 16.0f : x[i] < -16.0f ? -16.0f : x[i];
        const float k = near * fused(near * near, 0.0713548163f, 1.59576912f);
        wanted[i] = x[i] / (1.0f + scalar_exp(-k)) * x[N + i];
    }
    different += differing(found, wanted, N);
    isobit_gate_mul(CLAMPED, FP32, 1, x, 1, N, found, nullptr, nullptr, 1, 0, 1);
    for (int64_t i = 0; i < N; i++) {
        const float gate = x[i] > 7.0f ? 7.0f : x[i], up = x[N + i];
        const float more = (up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up) + 1.0f;
        wanted[i] = gate / (1.0f + scalar_exp(-(gate * 1.702f))) * more;
    }
    different += differing(found, wanted, N);
    isobit_gate_mul(SIGMOID, FP32, 1, x, 1, N, found, nullptr, nullptr, 1, 0, 1);
    for (int64_t i = 0; i < N; i++) wanted[i] = x[N + i] / (1.0f + scalar_exp(-x[i]));
    return different + differing(found, wanted, N);
}

// ---- attention ----

constexpr int64_t CHAINED = 32, KEYS = 77, DIM = 80, PAGE = 4, PAGES = (KEYS + PAGE - 1) / PAGE;

struct Store {
    float keys[KEYS][DIM], values[KEYS][DIM];  // by position, codes times 2^-8
    float key_factor[KEYS], value_factor[KEYS];
};

// E4M3 of 2^8 times a weight, over 2^8: a multiple of a step, ties to even.
float scalar_e4m3(float weight) {
    const float step = weight < 0x1p-14f ? 0x1p-17f : std::ldexp(1.0f, std::ilogb(weight) - 3);
    return std::nearbyint(weight / step) * step;
}

// Over the keys lowest..keys - 1; weights of those before add nothing.
void scalar_attention(const Store& store, const float* q, int64_t lowest, int64_t keys, const float* sink, bool rounded,
                      float* out, float* lse) {
    float weight[KEYS], lane[16] = {0}, peak = -INFINITY;
    for (int64_t j = lowest; j < keys; j++) {
        weight[j] = dot(q, store.keys[j], DIM, 16) * store.key_factor[j];
        peak = weight[j] > peak ? weight[j] : peak;
    }
    if (sink) peak = *sink > peak ? *sink : peak;
    for (int64_t j = lowest; j < keys; j++) {
        weight[j] = scalar_exp(weight[j] - peak);
        lane[j % 16] = lane[j % 16] + weight[j];
        weight[j] = (rounded ? scalar_e4m3(weight[j]) : weight[j]) * store.value_factor[j];
    }
    const float total = sink ? halves(lane, 16) + scalar_exp(*sink - peak) : halves(lane, 16);
    for (int64_t d = 0; d < DIM; d++) {
        float mixed = 0.0f;
        for (int64_t first = 0; first < keys; first += CHAINED) {
            float chain = 0.0f;
            for (int64_t j = first < lowest ? lowest : first; j < first + CHAINED && j < keys; j++)
                chain = fused(weight[j], store.values[j][d], chain);
            mixed = mixed + chain;
        }
        out[d] = mixed / total;
    }
    *lse = float(double(peak) + logarithm(double(total)));
}

// A few new rows after stored ones, and the last row alone, as C++ has two loops; `heads` share one key head.
int64_t differing_attention(Random& random, int64_t data, Kind kind, int64_t heads, int64_t window, bool sinks,
                            Kind probabilities) {
    static Store store;
    static float plain[2][PAGES * PAGE][DIM], scales[2][PAGES * PAGE];
    static uint8_t coded[2][PAGES * PAGE][DIM];
    constexpr int64_t ROWS = 6;
    static float q[ROWS][2][DIM], found[ROWS][2][DIM], found_lse[ROWS][2], wanted[DIM];
    int32_t pages[PAGES];
    for (int64_t p = 0; p < PAGES; p++) pages[p] = int32_t(PAGES - 1 - p);
    const bool codes = kind != FP32;
    const float factor = 0.3f, off = kind == E4M3 ? 256.0f : 1.0f;
    for (int64_t j = 0; j < KEYS; j++) {
        const int64_t slot = pages[j / PAGE] * PAGE + j % PAGE;
        for (int side = 0; side < 2; side++) {
            float *natural = side ? store.values[j] : store.keys[j], *where = side ? store.value_factor : store.key_factor;
            scales[side][slot] = std::fabs(hard(random, 0)) * 0x1p-4f;
            where[j] = codes ? scales[side][slot] * off * (side ? 1.0f : factor) : side ? 1.0f : factor;
            for (int64_t d = 0; d < DIM; d++) {
                do coded[side][slot][d] = uint8_t(random.next()); while ((coded[side][slot][d] & 0x7f) == 0x7f);
                plain[side][slot][d] = hard(random, data);
                const uint8_t code = coded[side][slot][d];
                const float value = kind == INT8 ? float(int8_t(code)) : decode_scalar(code) / off;
                natural[d] = codes ? value : plain[side][slot][d];
            }
        }
    }
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t d = 0; d < DIM; d++) (&q[0][0][0])[(r * heads + h) * DIM + d] = hard(random, data);
    const float sink[2] = {hard(random, data), hard(random, 0)};
    int64_t different = 0;
    for (int64_t rows : {ROWS, int64_t(1)}) {
        const int64_t row_start[2] = {0, rows}, context = KEYS - rows;
        Attention g{};
        g.kind = FP32, g.store_kind = kind, g.q = q, g.out = found, g.lse = &found_lse[0][0];
        g.k = codes ? (void*)coded[0] : (void*)plain[0], g.v = codes ? (void*)coded[1] : (void*)plain[1];
        g.k_scale = codes ? scales[0] : nullptr, g.v_scale = codes ? scales[1] : nullptr, g.scale_step = 1;
        g.row_start = row_start, g.context = &context, g.page_table = pages, g.pages = PAGES, g.page_size = PAGE;
        g.sequences = 1, g.heads = heads, g.kv_heads = 1, g.dim = DIM, g.scale = factor, g.threads = 1, g.rows = rows;
        g.single = 1, g.window = window, g.sinks = sinks ? sink : nullptr;
        g.probabilities = probabilities;
        isobit_attention(&g);
        for (int64_t i = 0; i < rows * heads; i++) {
            float lse;
            const int64_t position = context + i / heads;
            scalar_attention(store, &q[0][0][0] + i * DIM, g.lowest(position), position + 1,
                             sinks ? sink + i % heads : nullptr, probabilities == E4M3, wanted, &lse);
            different += differing(&found[0][0][0] + i * DIM, wanted, DIM) + differing(&found_lse[0][0] + i, &lse, 1);
        }
    }
    return different;
}

// ---- linear attention ----

constexpr int64_t TOKENS = 5, WIDTH = 4, KEY = 22, VALUE = 40, CHANNELS = 2 * KEY + VALUE;

float scalar_sigmoid(float x) { return 1.0f / (1.0f + scalar_exp(-x)); }

// One head of one sequence, from nothing: the delta rule; with a skip Mamba-2's recurrence, and a bias of the convolution.
void scalar_delta(const float (*x)[CHANNELS], const float (*weight)[WIDTH], const float* bias, const float (*gates)[2],
                  float decay, float step_bias, const float* skip, float (*mixed)[CHANNELS], float (*out)[VALUE]) {
    static float state[VALUE][KEY];
    std::memset(state, 0, sizeof state);
    for (int64_t t = 0; t < TOKENS; t++) {
        for (int64_t c = 0; c < CHANNELS; c++) {
            float total = skip ? bias[c] : 0.0f;
            for (int64_t j = 0; j < WIDTH; j++)
                total = fused(t + j < WIDTH - 1 ? 0.0f : x[t + j - WIDTH + 1][c], weight[c][j], total);
            mixed[t][c] = total / (1.0f + scalar_exp(-total));
        }
        float unit[2][KEY];
        for (int64_t side = 0; side < 2; side++) {
            const float* one = mixed[t] + (skip ? VALUE + (1 - side) * KEY : side * KEY);
            const float inverse = 1.0f / std::sqrt(dot(one, one, KEY, 16) + 1e-6f), scale = side ? 1.0f : 0.21320072f;
            for (int64_t i = 0; i < KEY; i++) unit[side][i] = skip ? one[i] : one[i] * inverse * scale;
        }
        const float step = (skip ? (&gates[0][0])[t] : gates[t][1]) + step_bias;
        const float soft = step > 20.0f ? step : float(logarithm(1.0 + double(scalar_exp(step))));
        const float kept = scalar_exp(-(scalar_exp(decay) * soft)), strength = skip ? soft : scalar_sigmoid(gates[t][0]);
        for (int64_t j = 0; j < VALUE; j++) {
            for (int64_t i = 0; i < KEY; i++) state[j][i] = state[j][i] * kept;
            const float value = mixed[t][skip ? j : 2 * KEY + j];
            const float error = (skip ? value : value - dot(unit[1], state[j], KEY, 4)) * strength;
            for (int64_t i = 0; i < KEY; i++) state[j][i] = fused(unit[1][i], error, state[j][i]);
            const float recalled = dot(unit[0], state[j], KEY, 4);
            out[t][j] = skip ? fused(*skip, value, recalled) : recalled;
        }
    }
}

// Three tokens, and the others one after the other, over pages of two.
int64_t differing_delta(Random& random, int64_t data, bool skips) {
    static float x[TOKENS][CHANNELS], weight[CHANNELS][WIDTH], mixed[TOKENS][CHANNELS], found_mixed[TOKENS][CHANNELS];
    static float bias[CHANNELS], out[TOKENS][VALUE], found[TOKENS][VALUE], inputs[3][WIDTH - 1][CHANNELS], states[3][KEY][VALUE];
    float gates[TOKENS][2];
    for (auto& row : x)
        for (float& one : row) one = hard(random, data);
    for (auto& row : weight)
        for (float& one : row) one = hard(random, 0);
    for (auto& row : gates)
        for (float& one : row) one = hard(random, 0) * 8.0f;
    for (float& one : bias) one = hard(random, 0);
    const float decay = hard(random, 0), step_bias = hard(random, 0), skip = hard(random, 0);
    scalar_delta(x, weight, bias, gates, decay, step_bias, skips ? &skip : nullptr, mixed, out);
    const int32_t pages[3] = {2, 0, 1};
    for (int64_t first = 0, rows = 3; first < TOKENS; first += rows, rows = 1) {
        const int64_t row_start[2] = {0, rows};
        const Sequences sequences{row_start, &first, pages, 3, 2, 1};
        isobit_short_convolution(&sequences, FP32, x[first], weight[0], skips ? bias : nullptr, CHANNELS, WIDTH, inputs,
                                 found_mixed[first], 1);
        const float* own = skips ? gates[0] + first : gates[first];
        const DeltaRule g{FP32, 1, 1, KEY, VALUE, found_mixed[first], own, &decay, &step_bias, 0.21320071635561041,
                          states[0][0], found[first], 1, skips ? &skip : nullptr, 0.0};
        isobit_delta_rule(&sequences, &g);
    }
    return differing(found_mixed[0], mixed[0], TOKENS * CHANNELS) + differing(found[0], out[0], TOKENS * VALUE);
}

}  // namespace

// How many results differ.
EXPORT int64_t isobit_rows32_self_test() {
    Random random{1};
    int64_t different = 0;
    for (int64_t data = 0; data < 4; data++) {
        different += differing_rows(random, data) + differing_delta(random, data, false);
        different += differing_delta(random, data, true);
        for (int64_t heads = 1; heads <= 2; heads++)
            for (Kind kind : {FP32, E4M3, INT8})
                for (int64_t window : {KEYS, int64_t(6)})  // 6 keys: their block is not the first
                    for (bool sinks : {false, true})
                        for (Kind probabilities : {FP32, E4M3})
                            different += differing_attention(random, data, kind, heads, window, sinks, probabilities);
    }
    return different;
}
