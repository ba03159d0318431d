// C = A · Bᵀ in float32 in one of two fixed orders: the arithmetic of `consistency: bitwise`.
//
// `tdp32-v1`, that of TDPBF16PS (AMX): for every 32 of K an even and an odd chain of 16 fused multiply-adds, each from
// zero over a[2i] · b[2i] and a[2i + 1] · b[2i + 1]; then c += even + odd. Codes with scales that are no powers of two
// (BLOCKS): c begins at zero for every 128 of K, and total = fma(c, scale_a · scale_b, total).
//
// `vdp32-v1`, that of VDPBF16PS (AVX512-BF16): for every 128 of K one chain of fused multiply-adds from zero over the
// pairs, of each a[2i + 1] · b[2i + 1] first and a[2i] · b[2i] then; total += c, or fma(c, scale_a · scale_b, total).
//
// In both K is padded with zeros to a multiple of 32, and subnormal operands and results are zeros of their sign (FTZ and
// DAZ). Operands are BF16; codes under power-of-two scales are BF16 too (FOLD_A, FOLD_B). The definition in PyTorch is
// kernels/product/ordered.py.
//
// An instruction set is one function over some rows and panels, compiled in a file of its own with its own flags:
// ordered_portable.cpp, ordered_neon.cpp, ordered_avx2.cpp, ordered_avx512.cpp have both orders, ordered_amx.cpp and
// ordered_bf16.cpp the one of their instruction. ordered.cpp chooses, and tests the choice.
#pragma once

#include "product/product.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

enum Scaling : int64_t { FOLD_A = 1, FOLD_B = 2, BLOCKS = 4 };
enum Order : int64_t { TDP32, VDP32 };

// Rows row0..row1 times panels panel0..panel1; called with FTZ and DAZ set. Null where the compiler lacks the
// instructions.
typedef void (*OrderedPart)(const Product& g, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1);
extern const OrderedPart ordered_portable, ordered_neon, ordered_avx2, ordered_avx512, ordered_amx, ordered_bf16;

// That of an instruction set, by its index in ordered.cpp; null for what is none.
OrderedPart ordered_path(int64_t isa);

// Subnormal numbers are zeros in this thread, until the end of the scope.
class Flushing {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();

  public:
    Flushing() { _mm_setcsr(before | 0x8040); }
    ~Flushing() { _mm_setcsr(before); }
#elif defined(__aarch64__)
    uint64_t before;

  public:
    Flushing() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" : : "r"(before | (1ull << 24)));
    }
    ~Flushing() { asm volatile("msr fpcr, %0" : : "r"(before)); }
#endif
    Flushing(const Flushing&) = delete;
};

// The opposite: they are kept, as everywhere else.
class Keeping {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();

  public:
    Keeping() { _mm_setcsr(before & ~0x8040u); }
    ~Keeping() { _mm_setcsr(before); }
#elif defined(__aarch64__)
    uint64_t before;

  public:
    Keeping() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" : : "r"(before & ~(1ull << 24)));
    }
    ~Keeping() { asm volatile("msr fpcr, %0" : : "r"(before)); }
#endif
    Keeping(const Keeping&) = delete;
};

constexpr int64_t DEPTH = 32;  // K is padded to a multiple

// B is packed for the instructions on pairs, K padded to 32 with zeros. BF16: [panel][K / 2][16 columns][2]. Codes:
// [panel][K / 4][4 runs of 4 columns][2 pairs of k][4 columns][2], so that interleaving their bytes in lanes of 16 gives
// BF16's order.
INLINE int64_t packed_offset(const Product& g, int64_t panel, int64_t k) {
    return panel * padded(g.k, DEPTH) * PANEL + k * PANEL;
}

// Asks for what a tile of NP panels, each of `stride` bytes, will read AHEAD bytes after it has read BYTES at b + at: of
// the same panel, and at its end of the next tile's. The processor's own prefetching ends with every page of memory. Into
// the second cache: the first waits for a few lines at a time only, and memory is further away than those few.
constexpr int64_t AHEAD = 8192;
template <int NP, int64_t BYTES>
INLINE void ask_for(const uint8_t* b, int64_t at, int64_t stride) {
    const int64_t ahead = AHEAD < stride ? AHEAD : stride;
    const uint8_t* next = b + at + ahead + (at + ahead < stride ? 0 : (NP - 1) * stride);
#pragma GCC unroll 2
    for (int64_t line = 0; line < BYTES; line += 64) __builtin_prefetch(next + line, 0, 2);
}

// One code of a kind, or one BF16 number.
INLINE float one(uint8_t code, int64_t kind) {
    if (kind == E4M3) return decode_scalar(code);
    uint32_t magnitude = code & 0x7f;  // E5M2: two bits of mantissa under a bias of 15
    float value = magnitude < 4 ? float(magnitude) * 0x1p-16f : bits_of<float>((magnitude << 21) + (112u << 23));
    return code & 0x80 ? -value : value;
}
INLINE float one(uint16_t x, int64_t) { return decode_scalar(x); }
