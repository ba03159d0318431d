// A program that prints a digest of what each operator computes from the same numbers, and what the self-tests find:
// `test_arm.py` compares those of two processors.
#include <cinttypes>
#include <cstdio>
#include <vector>

#include "attention/attention.h"
#include "delta/delta.h"
#include "product/product.h"
#include "norms/norms.h"
#include "native/self_test.h"
#include "product/ordered.h"

EXPORT int64_t isobit_ordered_isa(int64_t wanted, int64_t order);
EXPORT int64_t isobit_ordered_self_test(int64_t isa, int64_t order);
EXPORT int64_t isobit_rows32_self_test();
EXPORT void isobit_ordered_pack(int64_t kind, const void* b, int64_t n, int64_t k, int64_t row_stride,
                              int64_t column_stride, void* out, int64_t threads);
EXPORT void isobit_ordered_product(const Product* arguments);
EXPORT void isobit_product(const Product* arguments);
EXPORT int64_t isobit_quantize(int64_t kind, const void* x, int64_t rows, int64_t columns, int64_t block_rows,
                               int64_t block_columns, int64_t power_of_two, void* codes, void* scales, int64_t threads);
EXPORT int64_t isobit_kv_write(int64_t kind, const void* k, const void* v, int64_t k_stride, int64_t v_stride,
                               const int64_t* slots, int64_t tokens, int64_t heads, int64_t dim, int64_t form,
                               int64_t power_of_two, void* store_k, void* store_v, float* scale_k, float* scale_v);
EXPORT void isobit_token_logprobs(const float* logits, const int64_t* tokens, int64_t rows, int64_t count,
                                  const float* temperature, int64_t step, float* logprobs, float* entropy,
                                  int64_t threads);
EXPORT void isobit_cap_logits(float* logits, int64_t count, double cap, int64_t threads);
EXPORT void isobit_sample(const float* logits, const int64_t* keys, int64_t rows, int64_t count,
                          const float* temperature, int64_t step, int64_t* tokens, int64_t threads);
EXPORT void isobit_square_sums(const float* x, int64_t rows, int64_t columns, double* sums, int64_t threads);
EXPORT void isobit_round_stochastically(const float* x, uint16_t* out, int64_t count, int64_t first, int64_t seed,
                                        int64_t step, int64_t threads);

namespace {

Random random_numbers{7};

// Of either sign, over 2^-6 to 2^6.
float number() {
    const uint32_t r = random_numbers.next();
    return bits_of<float>((r & 1) << 31 | (121 + (r >> 1) % 12) << 23 | (random_numbers.next() & 0x7fffff));
}
template <class T>
std::vector<T> drawn(int64_t count);
template <>
std::vector<float> drawn(int64_t count) {
    std::vector<float> out(count);
    for (float& x : out) x = number();
    return out;
}
template <>
std::vector<uint16_t> drawn(int64_t count) {
    std::vector<uint16_t> out(count);
    for (uint16_t& x : out) x = to_bf16(number());
    return out;
}
template <>
std::vector<uint8_t> drawn(int64_t count) {
    std::vector<uint8_t> out(count);
    for (uint8_t& x : out)
        do x = uint8_t(random_numbers.next()); while ((x & 0x7f) == 0x7f);
    return out;
}

template <class T>
void print(const char* name, const std::vector<T>& values) {
    uint64_t hash = 14695981039346656037ull;
    const uint8_t* bytes = (const uint8_t*)values.data();
    for (size_t i = 0; i < values.size() * sizeof(T); i++) hash = (hash ^ bytes[i]) * 1099511628211ull;
    std::printf("%s %016" PRIx64 "\n", name, hash);
}

constexpr int64_t M = 21, N = 70, K = 320;

void products(int64_t isa, int64_t order) {
    const auto a = drawn<uint16_t>(M * K), b = drawn<uint16_t>(N * K);
    const auto a_codes = drawn<uint8_t>(M * K), b_codes = drawn<uint8_t>(N * K);
    auto a_scales = drawn<float>(M * 3), b_scales = drawn<float>(3);
    std::vector<uint16_t> packed(80 * K);
    std::vector<uint8_t> packed_codes(80 * K);
    isobit_ordered_pack(BF16, b.data(), N, K, K, 1, packed.data(), 1);
    isobit_ordered_pack(E4M3, b_codes.data(), N, K, K, 1, packed_codes.data(), 1);
    std::vector<uint16_t> out(M * N);
    std::vector<float> exact(M * N);
    Product g{BF16, M, N, K, a.data(), K, 1, BF16, packed.data(), nullptr, 0, out.data(), BF16, 2, 0, {}, {}, isa,
              order, nullptr, nullptr};
    isobit_ordered_product(&g);
    print("bf16", out);
    g.kind_a = E4M3, g.a = a_codes.data(), g.kind_b = E4M3, g.packed = packed_codes.data(), g.scaled = BLOCKS;
    g.scale_a = {a_scales.data(), 1, 128, 3, 1}, g.scale_b = {b_scales.data(), 128, 128, 3, 1};
    g.out = exact.data(), g.out_kind = FP32;
    isobit_ordered_product(&g);
    print("blocks", exact);
    for (float& s : a_scales) s = 0x1p-3f;
    for (float& s : b_scales) s = 0x1p+2f;
    g.scaled = FOLD_A | FOLD_B;
    isobit_ordered_product(&g);
    print("folded", exact);
    const float common = 0.37f;
    const auto small_scales = drawn<uint8_t>(N * K / 16);
    const auto block_scales = drawn<float>(M * K / 16);
    g.kind_b = E2M1, g.packed = b_codes.data(), g.small_scales = small_scales.data(), g.common = &common, g.scaled = 1;
    g.scale_a = {block_scales.data(), 1, 16, K / 16, 1};
    isobit_product(&g);
    print("nibbles", exact);
    g.kind_a = BF16, g.a = a.data(), g.scaled = 0;
    isobit_product(&g);
    print("nibbles and bf16", exact);
}

void rows() {
    const auto x = drawn<uint16_t>(M * K), more = drawn<uint16_t>(M * K), weight = drawn<uint16_t>(K);
    std::vector<uint16_t> y(M * K), summed(M * K), half(M * K / 2);
    std::vector<uint8_t> codes(M * K);
    std::vector<float> rstd(M), scales(M * 3);
    isobit_rms_norm(BF16, BF16, 1, x.data(), more.data(), weight.data(), M, K, 1e-6, y.data(), summed.data(), rstd.data(),
                    nullptr, nullptr, 0, 0, 2);
    print("norm", y), print("rstd", rstd);
    isobit_rms_norm(BF16, BF16, 1, x.data(), more.data(), weight.data(), M, K, 1e-6, nullptr, summed.data(), rstd.data(),
                    codes.data(), scales.data(), 128, 0, 2);
    print("norm's codes", codes), print("norm's scales", scales);
    isobit_gate_mul(SILU, BF16, 1, x.data(), M, K / 2, half.data(), nullptr, nullptr, 0, 0, 2);
    print("gate", half);
    isobit_gate_mul(GELU_TANH, BF16, 1, x.data(), M, K / 2, half.data(), nullptr, nullptr, 0, 0, 2);
    print("gate with GELU", half);
    isobit_gate_mul(CLAMPED, BF16, 1, x.data(), M, K / 2, half.data(), nullptr, nullptr, 0, 0, 2);
    print("clamped gate", half);
    isobit_quantize(BF16, x.data(), M, K, 1, 128, 1, codes.data(), scales.data(), 2);
    print("codes", codes), print("scales", scales);
    std::vector<double> sums(M);
    const auto gradient = drawn<float>(M * K);
    isobit_square_sums(gradient.data(), M, K, sums.data(), 2);
    print("squares", sums);
    std::vector<uint16_t> masters(M * K);
    isobit_round_stochastically(gradient.data(), masters.data(), M * K, 8, 7, 3, 2);
    print("stochastic", masters);
}

// Keys and values of one head of 40 to a token, and attention over what was stored.
void cache(const char* name, Kind form) {
    constexpr int64_t TOKENS = 40, DIM = 40, PAGE = 16, PAGES = 3;
    const auto q = drawn<uint16_t>(TOKENS * DIM), k = drawn<uint16_t>(TOKENS * DIM), v = drawn<uint16_t>(TOKENS * DIM);
    std::vector<uint8_t> keys(PAGES * PAGE * DIM), values(PAGES * PAGE * DIM);
    std::vector<float> key_scales(PAGES * PAGE), value_scales(PAGES * PAGE), lse(TOKENS);
    std::vector<uint16_t> out(q.size());
    std::vector<int64_t> slots(TOKENS);
    const int64_t row_start[] = {0, TOKENS}, context[] = {0};
    const int32_t pages[] = {2, 0, 1};
    for (int64_t t = 0; t < TOKENS; t++) slots[t] = pages[t / PAGE] * PAGE + t % PAGE;
    isobit_kv_write(BF16, k.data(), v.data(), DIM, DIM, slots.data(), TOKENS, 1, DIM, form, 0, keys.data(), values.data(),
                    key_scales.data(), value_scales.data());
    Attention g{BF16, form, q.data(), keys.data(), values.data(), key_scales.data(), value_scales.data(), row_start,
                context, pages, PAGES, PAGE, 1, 1, 1, DIM, 0.15, out.data(), lse.data(), nullptr, nullptr, nullptr,
                nullptr, 2, TOKENS, 1, 1, FP32, TOKENS, nullptr, nullptr};
    isobit_attention(&g);
    std::printf("%s: ", name), print("stored keys", keys);
    std::printf("%s: ", name), print("stored values", values);
    std::printf("%s: ", name), print("attention", out);
}

void attention() {
    constexpr int64_t TOKENS = 40, HEADS = 4, KV = 2, DIM = 40, PAGE = 16, PAGES = 3;
    const auto q = drawn<uint16_t>(TOKENS * HEADS * DIM), dout = drawn<uint16_t>(TOKENS * HEADS * DIM);
    const auto k = drawn<uint8_t>(PAGES * PAGE * KV * DIM), v = drawn<uint8_t>(PAGES * PAGE * KV * DIM);
    std::vector<float> ones(PAGES * PAGE * KV, 0x1p-5f), lse(TOKENS * HEADS);
    const int64_t row_start[] = {0, TOKENS}, context[] = {0};
    const int32_t pages[] = {2, 0, 1};
    std::vector<uint16_t> out(q.size()), dq(q.size()), dk(TOKENS * KV * DIM), dv(TOKENS * KV * DIM);
    Attention g{BF16, E4M3, q.data(), k.data(), v.data(), ones.data(), ones.data(), row_start, context, pages, PAGES, PAGE,
                1, HEADS, KV, DIM, 0.15, out.data(), lse.data(), nullptr, nullptr, nullptr, nullptr, 2, TOKENS, 1, 1, FP32,
                TOKENS, nullptr, nullptr};
    isobit_attention(&g);
    print("attention", out), print("lse", lse);
    g.dout = dout.data(), g.dq = dq.data(), g.dk = dk.data(), g.dv = dv.data();
    isobit_attention_backward(&g);
    print("dq", dq), print("dk", dk), print("dv", dv);
    const float sinks[HEADS] = {-3.0f, 0.5f, 2.0f, 9.0f};
    g.sinks = sinks;
    isobit_attention(&g);
    print("attention with sinks", out), print("lse with sinks", lse);
    g.probabilities = E4M3;
    isobit_attention(&g);
    print("attention with probabilities in E4M3", out);
}

// Two sequences of which one goes on, and gradients of both as whole ones.
void linear_attention() {
    constexpr int64_t ROWS = 37, HEADS = 4, KEYS = 2, KEY = 22, VALUE = 72, WIDTH = 4, PAGE = 4, PAGES = 9;
    constexpr int64_t CHANNELS = 2 * KEYS * KEY + HEADS * VALUE;
    const auto x = drawn<uint16_t>(ROWS * CHANNELS), dy = drawn<uint16_t>(ROWS * CHANNELS);
    const auto weight = drawn<float>(CHANNELS * WIDTH), gates = drawn<float>(ROWS * 2 * HEADS);
    const auto decay = drawn<float>(HEADS), step_bias = drawn<float>(HEADS);
    auto states = drawn<float>(2 * PAGES * HEADS * KEY * VALUE);
    auto inputs = drawn<uint16_t>(2 * PAGES * (WIDTH - 1) * CHANNELS);
    const int64_t row_start[] = {0, 7, ROWS}, context[] = {3, 0};
    int32_t pages[2 * PAGES];
    for (int32_t p = 0; p < 2 * PAGES; p++) pages[p] = p * 5 % (2 * PAGES);
    const Sequences sequences{row_start, context, pages, PAGES, PAGE, 2};
    std::vector<uint16_t> mixed(x.size()), out(ROWS * HEADS * VALUE);
    isobit_short_convolution(&sequences, BF16, x.data(), weight.data(), nullptr, CHANNELS, WIDTH, inputs.data(),
                             mixed.data(), 2);
    print("convolved", mixed), print("inputs of the convolution", inputs);
    const DeltaRule g{BF16, KEYS, HEADS, KEY, VALUE, mixed.data(), gates.data(), decay.data(), step_bias.data(), 0.21,
                      states.data(), out.data(), 2, nullptr, 0.0};
    isobit_delta_rule(&sequences, &g);
    print("recalled", out), print("states", states);
    std::vector<float> dweight(weight.size());
    isobit_short_convolution_backward(&sequences, BF16, dy.data(), x.data(), weight.data(), nullptr, CHANNELS, WIDTH,
                                      mixed.data(), dweight.data(), nullptr, 2);
    print("gradient of the convolution", mixed), print("of its weight", dweight);
    std::vector<float> q(ROWS * KEYS * KEY), k(q.size()), found[5];
    for (size_t i = 0; i < q.size(); i++) q[i] = 0.01f * number(), k[i] = 0.01f * number();
    std::vector<float> kept(ROWS * HEADS, 0.9f), strength(ROWS * HEADS, 0.6f);
    const auto v = drawn<float>(ROWS * HEADS * VALUE), dout = drawn<float>(ROWS * HEADS * VALUE);
    for (int64_t i = 0; i < 5; i++) found[i].resize(ROWS * HEADS * (i < 2 ? KEY : i == 2 ? VALUE : 1));
    const DeltaGradients b{KEYS, HEADS, KEY, VALUE, 2, row_start, q.data(), k.data(), v.data(), dout.data(), kept.data(),
                           strength.data(), found[0].data(), found[1].data(), found[2].data(), found[3].data(),
                           found[4].data(), 2, 1};
    isobit_delta_rule_backward(&b);
    print("delta rule's dq", found[0]), print("dk", found[1]), print("dv", found[2]), print("dkept", found[3]);
    print("dstrength", found[4]);
}

void head() {
    constexpr int64_t V = 1000;
    const auto logits = drawn<float>(M * V);
    std::vector<int64_t> tokens(M), drawn_tokens(M), keys(M * 4);
    for (int64_t& t : tokens) t = random_numbers.next() % V;
    for (int64_t& key : keys) key = random_numbers.next();
    std::vector<float> logprobs(M), entropy(M);
    const float temperature = 0.9f;
    isobit_token_logprobs(logits.data(), tokens.data(), M, V, &temperature, 0, logprobs.data(), entropy.data(), 2);
    print("logprobs", logprobs), print("entropy", entropy);
    isobit_sample(logits.data(), keys.data(), M, V, &temperature, 0, drawn_tokens.data(), 2);
    print("tokens", drawn_tokens);
    auto capped = logits;
    isobit_cap_logits(capped.data(), M * V, 30.0, 2);
    print("capped logits", capped);
}

}  // namespace

int main() {
    int64_t best[2];
    for (int64_t order : {TDP32, VDP32}) {
        best[order] = isobit_ordered_isa(-1, order);
        for (int64_t isa : {int64_t(0), best[order]})
            if (const int64_t found = isobit_ordered_self_test(isa, order))
                return std::printf("path %" PRId64 ": %" PRId64 " differ\n", isa, found), 1;
    }
    if (const int64_t found = isobit_rows32_self_test()) return std::printf("rows: %" PRId64 " differ\n", found), 1;
    products(best[TDP32], TDP32);
    products(best[VDP32], VDP32);
    rows();
    attention();
    cache("e4m3", E4M3);
    cache("int8", INT8);
    linear_attention();
    head();
    std::printf("path %" PRId64 "\n", best[TDP32]);
    return 0;
}
