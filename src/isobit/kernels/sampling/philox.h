// Random words that are a function of a seed and a counter, eight counters at a time.
#pragma once
#include "native/native.h"

// Philox4x32-10 (Salmon et al. 2011) for 8 counters (first .. first+7, key[3], key[2], key[1]) under the seed key[0]: 32
// words, in the order word 0..3 of the first counter, then of the next.
static INLINE void philox(uint64_t first, const int64_t* key, uint32_t* words) {
    const u64x8 mask = u64x8{} + 0xffffffffull;
    const uint64_t seed = uint64_t(key[0]);
    uint64_t k0 = seed & 0xffffffffu, k1 = seed >> 32;
    u64x8 c0 = (ascending() + first) & mask, c1 = (u64x8{} + uint64_t(key[3])) & mask;
    u64x8 c2 = (u64x8{} + uint64_t(key[2])) & mask, c3 = (u64x8{} + uint64_t(key[1])) & mask;
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        u64x8 first = c0 * 0xD2511F53ull, second = c2 * 0xCD9E8D57ull;
        c0 = (second >> 32) ^ c1 ^ k0;
        c1 = second & mask;
        c2 = (first >> 32) ^ c3 ^ k1;
        c3 = first & mask;
        k0 = (k0 + 0x9E3779B9u) & 0xffffffffu, k1 = (k1 + 0xBB67AE85u) & 0xffffffffu;
    }
    const u32x8 a = narrow(c0), b = narrow(c1), c = narrow(c2), d = narrow(c3);
    const u32x8 ac[2] = {__builtin_shufflevector(a, c, 0, 8, 1, 9, 2, 10, 3, 11),
                         __builtin_shufflevector(a, c, 4, 12, 5, 13, 6, 14, 7, 15)};
    const u32x8 bd[2] = {__builtin_shufflevector(b, d, 0, 8, 1, 9, 2, 10, 3, 11),
                         __builtin_shufflevector(b, d, 4, 12, 5, 13, 6, 14, 7, 15)};
    for (int half = 0; half < 2; half++) {
        store(words + 16 * half, __builtin_shufflevector(ac[half], bd[half], 0, 8, 1, 9, 2, 10, 3, 11));
        store(words + 16 * half + 8, __builtin_shufflevector(ac[half], bd[half], 4, 12, 5, 13, 6, 14, 7, 15));
    }
}
