// `tdp32-v1` on 64-bit ARM: a vector of 16 is four registers. Run under an emulator only (tests/kernels/test_arm.py).
//
// ARM takes a result for subnormal before it rounds, x86 after: a sum that lies below 2^-126 by less than half a unit is
// zero here and 2^-126 there. The self-test meets none.
#include "product/ordered.h"

#if defined(__aarch64__)
#include <arm_neon.h>

namespace {

struct Vec {
    float32x4_t q[4];
};
template <class F>
INLINE Vec each(F f) {
    return {{f(0), f(1), f(2), f(3)}};
}
INLINE Vec vzero() { return each([](int) { return vdupq_n_f32(0.0f); }); }
INLINE Vec vsplat(float x) { return each([x](int) { return vdupq_n_f32(x); }); }
INLINE Vec vload(const float* p) { return each([p](int i) { return vld1q_f32(p + 4 * i); }); }
INLINE void vstore(float* p, const Vec& v) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, v.q[i]);
}
INLINE Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return each([&](int i) { return vfmaq_f32(c.q[i], a.q[i], b.q[i]); });
}
INLINE Vec add(const Vec& a, const Vec& b) { return each([&](int i) { return vaddq_f32(a.q[i], b.q[i]); }); }
INLINE Vec mul(const Vec& a, const Vec& b) { return each([&](int i) { return vmulq_f32(a.q[i], b.q[i]); }); }

constexpr int TILE_ROWS = 2, TILE_PANELS = 2;

// Eight E4M3 codes as float16, off by 2^-8; E5M2 codes are the upper bytes of float16 numbers.
INLINE float16x8_t halves(uint8x8_t codes, int64_t kind) {
    if (kind != E4M3) return vreinterpretq_f16_u16(vshll_n_u8(codes, 8));
    uint16x8_t wide = vreinterpretq_u16_s16(vshlq_n_s16(vmovl_s8(vreinterpret_s8_u8(codes)), 7));
    return vreinterpretq_f16_u16(vandq_u16(wide, vdupq_n_u16(0xbf80)));
}
INLINE Vec decode16(const uint8_t* p, int64_t kind) {
    const float16x8_t low = halves(vld1_u8(p), kind), high = halves(vld1_u8(p + 8), kind);
    const Vec v{{vcvt_f32_f16(vget_low_f16(low)), vcvt_f32_f16(vget_high_f16(low)), vcvt_f32_f16(vget_low_f16(high)),
                 vcvt_f32_f16(vget_high_f16(high))}};
    return kind == E4M3 ? mul(v, vsplat(256.0f)) : v;
}
INLINE Vec decode16(const uint16_t* p, int64_t) {
    return each([p](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
INLINE uint32x4_t pairs(const uint16_t* p) { return vreinterpretq_u32_u16(vld1q_u16(p)); }
INLINE void split(const uint16_t* p, Vec& even, Vec& odd) {
    even = each([p](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(pairs(p + 8 * i), 16)); });
    odd = each([p](int i) { return vreinterpretq_f32_u32(vandq_u32(pairs(p + 8 * i), vdupq_n_u32(0xffff0000))); });
}
INLINE void decode_quad(const uint8_t* p, Vec* v) {
    for (int run = 0; run < 4; run++) {  // of 4 columns: two vectors of the first pair of k, two of the second
        const Vec pair = decode16(p + 16 * run, E4M3);
        for (int i = 0; i < 2; i++) {
            v[2 * i].q[run] = vuzp1q_f32(pair.q[2 * i], pair.q[2 * i + 1]);
            v[2 * i + 1].q[run] = vuzp2q_f32(pair.q[2 * i], pair.q[2 * i + 1]);
        }
    }
}

}  // namespace

#include "product/ordered_kernel.h"

namespace {
bool in_registers(const Product&, int64_t, int64_t, int64_t, int64_t, const float*, int64_t) { return false; }
}  // namespace

const OrderedPart ordered_neon = ordered_part;
#else
const OrderedPart ordered_neon = nullptr;
#endif
