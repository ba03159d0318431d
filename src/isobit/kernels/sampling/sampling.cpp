// Log-probabilities, entropy, and counter-based sampling: each a function of one row of logits [V] and its
// temperature, temperature[r * step]. And logits that are capped.
#include "native/replay.h"
#include "sampling/philox.h"

// z = logits / temperature in float32, then exp(z - max z) in float64, 16 at a time; tails are filled with -infinity.
static INLINE f32x16 scaled_logits(const float* logits, int64_t i, int64_t count, f32x16 temperature) {
    if (i + 16 <= count) return load<f32x16>(logits + i) / temperature;
    f32x16 result = splat(-INFINITY);
    for (int64_t j = i; j < count; j++) result[j - i] = logits[j] / temperature[0];
    return result;
}

// The largest scaled logit; NaN if there is one.
static INLINE float peak_of(const float* logits, int64_t count, float temperature) {
    f32x16 most = splat(-INFINITY), divisor = splat(temperature);
    i32x16 unordered = {};
    for (int64_t i = 0; i < count; i += 16) {
        f32x16 z = scaled_logits(logits, i, count, divisor);
        most = larger_of(z, most);
        unordered |= z != z;
    }
    float peak = -INFINITY;
    for (int lane = 0; lane < 16; lane++) {
        if (unordered[lane]) return NAN;
        peak = most[lane] > peak ? most[lane] : peak;
    }
    return peak;
}

static void logprob_row(const float* logits, int64_t count, int64_t token, float temperature, float* logprob,
                        float* entropy) {
    double peak = peak_of(logits, count, temperature);
    f32x16 divisor = splat(temperature);
    f64x8 total[2] = {splat(0.0), splat(0.0)}, energy[2] = {splat(0.0), splat(0.0)};
    for (int64_t i = 0; i < count; i += 16) {
        f32x16 z = scaled_logits(logits, i, count, divisor);
        f64x8 shifted[2] = {widen(low_half(z)) - splat(peak), widen(high_half(z)) - splat(peak)};
        for (int half = 0; half < 2; half++) {
            f64x8 weight = exponential(shifted[half]);
            i64x8 positive = weight > 0.0;
            total[half] = total[half] + weight;
            energy[half] = energy[half] + (f64x8)((i64x8)(weight * shifted[half]) & positive);
        }
    }
    double sum = lane_sum(total[0] + total[1]), log_total = std::log(sum);
    if (!(sum > 0.0)) log_total = NAN;
    *logprob = float((double(logits[token] / temperature) - peak) - log_total);
    *entropy = float(log_total - lane_sum(energy[0] + energy[1]) / sum);
}

// Returns 1 where a token is none of the vocabulary.
EXPORT int64_t isobit_token_logprobs(const float* logits, const int64_t* tokens, int64_t rows, int64_t count,
                                     const float* temperature, int64_t step, float* logprobs, float* entropy,
                                     int64_t threads) {
    for (int64_t r = 0; r < rows; r++)
        if (tokens[r] < 0 || tokens[r] >= count) return 1;
    for_each(useful_threads(threads, rows * count * 2), rows, [&](int64_t r) {
        logprob_row(logits + r * count, count, tokens[r], temperature[r * step], logprobs + r, entropy + r);
    });
    return 0;
}
REPLAYED(isobit_token_logprobs)

// cap tanh(x / cap): with t = exp(-2 |x| / cap) its magnitude is cap (1 - t) / (1 + t).
static INLINE f64x8 capped(f64x8 x, double cap) {
    const i64x8 sign = (i64x8)splat(-0.0);
    const f64x8 t = exponential((f64x8)((i64x8)x & ~sign) * splat(-2.0) / splat(cap));
    const f64x8 magnitude = splat(cap) * (splat(1.0) - t) / (splat(1.0) + t);
    return (f64x8)(((i64x8)magnitude & ~sign) | ((i64x8)x & sign));
}
static INLINE void cap_sixteen(float* x, double cap) {
    const f32x16 given = load<f32x16>(x);
    round_once(capped(widen(low_half(given)), cap), capped(widen(high_half(given)), cap), x);
}

// logits [count], in place, float64 inside.
EXPORT void isobit_cap_logits(float* logits, int64_t count, double cap, int64_t threads) {
    constexpr int64_t part = 4096;
    for_each(useful_threads(threads, count), (count + part - 1) / part, [&](int64_t p) {
        const int64_t end = std::min(count, (p + 1) * part);
        int64_t i = p * part;
        for (; i + 16 <= end; i += 16) cap_sixteen(logits + i, cap);
        if (i == end) return;
        float rest[16] = {};
        std::memcpy(rest, logits + i, (end - i) * sizeof(float));
        cap_sixteen(rest, cap);
        std::memcpy(logits + i, rest, (end - i) * sizeof(float));
    });
}
REPLAYED(isobit_cap_logits)

static INLINE double uniform(uint32_t word) { return (double(word) + 0.5) * 0x1p-32; }

// argmax of weight / -log(u). Since -log(u) >= 1 - u, a token whose weight is below best · (1 - u) cannot win, and only
// the others need a logarithm. Where no logit is finite: the first NaN, else the first infinity, else token 0.
static int64_t race(const float* logits, const int64_t* key, int64_t count, float temperature) {
    float peak = peak_of(logits, count, temperature);
    f32x16 divisor = splat(temperature);
    if (peak != peak || std::isinf(peak)) {
        for (int64_t i = 0; peak > 0 && i < count; i++)
            if (logits[i] / temperature == peak) return i;
        return 0;
    }
    double best = 0.0;
    int64_t winner = 0;
    for (int64_t i = 0; i < count; i += 32) {
        uint32_t words[32];
        philox(uint64_t(i / 4), key, words);
        for (int64_t j = i; j < i + 32 && j < count; j += 16) {
            f32x16 z = scaled_logits(logits, j, count, divisor);
            for (int half = 0; half < 2; half++) {
                f64x8 weight = exponential(widen(half ? high_half(z) : low_half(z)) - splat(double(peak)));
                u32x8 bits = load<u32x8>(words + (j - i) + 8 * half);
                f64x8 u = (to_double(bits) + splat(0.5)) * splat(0x1p-32);
                i64x8 open = weight >= splat(best) * (splat(1.0) - u);
                int64_t any = 0;
                for (int lane = 0; lane < 8; lane++) any |= open[lane];
                if (!any) continue;
                for (int lane = 0; lane < 8 && j + 8 * half + lane < count; lane++) {
                    if (!open[lane] || weight[lane] < best * (1.0 - u[lane])) continue;
                    double score = weight[lane] / -std::log(u[lane]);
                    if (score > best) best = score, winner = j + 8 * half + lane;
                }
            }
        }
    }
    return winner;
}

EXPORT void isobit_sample(const float* logits, const int64_t* keys, int64_t rows, int64_t count,
                          const float* temperature, int64_t step, int64_t* tokens, int64_t threads) {
    for_each(useful_threads(threads, rows * count * 2), rows, [&](int64_t r) {
        tokens[r] = race(logits + r * count, keys + r * 4, count, temperature[r * step]);
    });
}
REPLAYED(isobit_sample)
