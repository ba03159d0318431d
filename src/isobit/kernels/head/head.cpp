// d log p(token) / d logits of rows of probabilities [V]: ((v == token) - p) · factor, rounded to BF16.
#include "native/native.h"

// `out` may be the beginning of the row itself: nothing is written before it was read.
static void gradient_row(const float* p, int64_t token, float factor, int64_t count, uint16_t* out) {
    const uint16_t chosen = to_bf16((-p[token] + 1.0f) * factor);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store(out + i, to_bf16(-load<f32x16>(p + i) * splat(factor)));
    if (i < count) {
        float rest[16] = {0};
        uint16_t rounded[16];
        std::memcpy(rest, p + i, (count - i) * sizeof *p);
        store(rounded, to_bf16(-load<f32x16>(rest) * splat(factor)));
        std::memcpy(out + i, rounded, (count - i) * sizeof *out);
    }
    out[token] = chosen;
}

// probabilities [rows, count], tokens and factor [rows]; rows of the result are 2 · count apart, in the memory of the
// probabilities.
EXPORT void isobit_logits_gradient(float* probabilities, const int64_t* tokens, const float* factor, int64_t rows,
                                   int64_t count, int64_t threads) {
    for_each(useful_threads(threads, rows * count / 8), rows, [&](int64_t r) {
        float* row = probabilities + r * count;
        gradient_row(row, tokens[r], factor[r], count, (uint16_t*)row);
    });
}
