// d log p(token) / d logits of rows of probabilities [V]: ((v == token) - p) · factor, rounded to BF16.
#include "native/native.h"

static void gradient_row(const float* p, int64_t token, float factor, int64_t count, uint16_t* out) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store(out + i, to_bf16(-load<f32x16>(p + i) * splat(factor)));
    for (; i < count; i++) out[i] = to_bf16(-p[i] * factor);
    out[token] = to_bf16((-p[token] + 1.0f) * factor);
}

// probabilities [rows, count], tokens and factor [rows].
EXPORT void isobit_logits_gradient(const float* probabilities, const int64_t* tokens, const float* factor, int64_t rows,
                                   int64_t count, uint16_t* out, int64_t threads) {
    for_each(useful_threads(threads, rows * count / 8), rows, [&](int64_t r) {
        gradient_row(probabilities + r * count, tokens[r], factor[r], count, out + r * count);
    });
}
