// float32 to BF16 with stochastic rounding: a number's own 16 random bits are added to the half that is cut off.
#include "sampling/philox.h"

// x [count], elements number `first` (a multiple of 8) and on of a tensor, to out [count]. The bits of an element are
// those of its number, the seed and the step. What would be infinite is the largest BF16 number.
EXPORT void isobit_round_stochastically(const float* x, uint16_t* out, int64_t count, int64_t first, int64_t seed,
                                        int64_t step, int64_t threads) {
    const int64_t key[4] = {seed, 0, 0, step};
    for_each(useful_threads(threads, count), (count + 63) / 64, [&](int64_t block) {
        const int64_t i = block * 64;
        uint32_t words[32];
        philox(uint64_t(first + i) / 8, key, words);
        const int64_t end = count - i < 64 ? count - i : 64;
        for (int64_t j = 0; j < end; j++) {
            const uint32_t bits = bits_of<uint32_t>(x[i + j]), magnitude = bits & 0x7fffffffu;
            const uint32_t noise = words[j / 2] >> (j % 2 * 16) & 0xffffu;
            uint32_t rounded = (magnitude + noise) >> 16;
            rounded = rounded > 0x7f7fu ? 0x7f7fu : rounded;
            rounded = magnitude == 0x7f800000u ? 0x7f80u : magnitude > 0x7f800000u ? 0x7fc0u : rounded;
            out[i + j] = uint16_t(bits >> 16 & 0x8000u) | uint16_t(rounded);
        }
    });
}
