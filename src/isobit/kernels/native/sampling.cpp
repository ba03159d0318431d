// Log-probabilities and counter-based sampling, one row of logits at a time.
#include "common.h"

namespace {

constexpr int LANES = 16;

// Philox4x32-10 (Salmon et al. 2011) for LANES consecutive token blocks.
void philox(uint32_t first, uint32_t position, uint32_t sample, uint32_t prompt, uint64_t seed, uint32_t out[4][LANES]) {
    uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
    for (int l = 0; l < LANES; l++) c0[l] = first + l, c1[l] = position, c2[l] = sample, c3[l] = prompt;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        for (int l = 0; l < LANES; l++) {
            uint64_t a = (uint64_t)c0[l] * 0xD2511F53u, b = (uint64_t)c2[l] * 0xCD9E8D57u;
            c0[l] = (uint32_t)(b >> 32) ^ c1[l] ^ k0;
            c1[l] = (uint32_t)b;
            c2[l] = (uint32_t)(a >> 32) ^ c3[l] ^ k1;
            c3[l] = (uint32_t)a;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    std::memcpy(out[0], c0, sizeof c0);
    std::memcpy(out[1], c1, sizeof c1);
    std::memcpy(out[2], c2, sizeof c2);
    std::memcpy(out[3], c3, sizeof c3);
}

// weights[v] = exp(z_v - max z) with z = logits / temperature in float32; returns max z
double row_weights(const float* logits, long V, float temperature, double* weights) {
    float peak = -INFINITY;
    for (long v = 0; v < V; v++) {
        float z = logits[v] / temperature;
        weights[v] = z;
        peak = z > peak ? z : peak;
    }
    for (long v = 0; v < V; v++) weights[v] = exp_negative(weights[v] - (double)peak);
    return peak;
}

inline double tree(const double* x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }

// argmax of p / E with E = -log u >= 1 - u: the logarithm is needed only where p / (1 - u) could win
int64_t race(const double* weights, long V, const int64_t* key) {
    double best = -1.0;
    int64_t winner = 0;
    uint32_t words[4][LANES];
    for (long v0 = 0; v0 < V; v0 += 4 * LANES) {
        philox((uint32_t)(v0 / 4), (uint32_t)key[3], (uint32_t)key[2], (uint32_t)key[1], (uint64_t)key[0], words);
        for (long v = v0; v < std::min(V, v0 + 4 * LANES); v++) {
            double u = ((double)words[v & 3][(v - v0) / 4] + 0.5) * 0x1p-32;
            if (weights[v] <= best * (1.0 - u) * (1.0 - 1e-12)) continue;
            double ratio = weights[v] / -std::log(u);
            if (ratio > best) best = ratio, winner = v;
        }
    }
    return winner;
}

}  // namespace

extern "C" {

void isobit_token_logprobs(const float* logits, const int64_t* tokens, long T, long V, float temperature, float* logprobs,
                           float* entropy, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && T * V > 1 << 14)
    {
        Buffer weights(V);
#pragma omp for schedule(static)
        for (long t = 0; t < T; t++) {
            const float* row = logits + t * V;
            double peak = row_weights(row, V, temperature, weights.data);
            double sum[8] = {0}, energy[8] = {0};
            for (long v = 0; v < V; v++) sum[v & 7] += weights.data[v];
            for (long v = 0; v < V; v++) {
                double shifted = (double)(row[v] / temperature) - peak;
                energy[v & 7] += weights.data[v] > 0 ? weights.data[v] * shifted : 0.0;
            }
            double total = tree(sum), log_total = std::log(total);
            logprobs[t] = (float)((double)(row[tokens[t]] / temperature) - peak - log_total);
            entropy[t] = (float)(log_total - tree(energy) / total);
        }
    }
}

void isobit_sample(const float* logits, const int64_t* keys, long B, long V, float temperature, int64_t* tokens, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && B * V > 1 << 14)
    {
        Buffer weights(V);
#pragma omp for schedule(static)
        for (long b = 0; b < B; b++) {
            row_weights(logits + b * V, V, temperature, weights.data);
            tokens[b] = race(weights.data, V, keys + 4 * b);
        }
    }
}

}  // extern "C"
