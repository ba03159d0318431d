// What the operators on BF16 and FP32 rows share.
#pragma once

#include "native/native.h"

#define FOR_KIND(kind, CALL) \
    if ((kind) == BF16) {    \
        typedef uint16_t T;  \
        CALL;                \
    } else {                 \
        typedef float T;     \
        CALL;                \
    }

INLINE void round_to(float x, uint16_t* out) { *out = to_bf16(x); }
INLINE void round_to(float x, float* out) { *out = x; }
