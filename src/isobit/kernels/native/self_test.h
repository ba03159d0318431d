// What the self-tests share: numbers that look random, the same at every start.
#pragma once

#include <cstdint>

namespace {

struct Random {
    uint64_t state;
    uint32_t next() {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return uint32_t(state >> 33);
    }
};

}  // namespace
