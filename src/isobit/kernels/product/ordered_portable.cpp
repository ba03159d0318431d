// Both orders in plain C++. Where the target has no fused multiply-add, it is computed in double: the product of two BF16
// numbers is exact there, the sum is rounded to odd, and so the rounding to float is the only one that counts.
#include "product/ordered.h"

namespace {

struct Vec {
    float v[16];
};
INLINE Vec vzero() { return Vec{}; }
INLINE Vec vsplat(float x) {
    Vec out;
    for (float& y : out.v) y = x;
    return out;
}
INLINE Vec vload(const float* p) { return load<Vec>(p); }
INLINE void vstore(float* p, const Vec& v) { store(p, v); }

INLINE float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    double product = double(a) * double(b), sum = product + double(c);
    double part = sum - product, error = (product - (sum - part)) + (double(c) - part);
    uint64_t bits = bits_of<uint64_t>(sum);
    if (error != 0 && !(bits & 1) && error - error == 0) bits += (error > 0) == (sum > 0) ? 1 : -1;
    return float(bits_of<double>(bits));
#endif
}
INLINE Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    Vec out;
    for (int i = 0; i < 16; i++) out.v[i] = fused(a.v[i], b.v[i], c.v[i]);
    return out;
}
INLINE Vec add(const Vec& a, const Vec& b) {
    Vec out;
    for (int i = 0; i < 16; i++) out.v[i] = a.v[i] + b.v[i];
    return out;
}
INLINE Vec mul(const Vec& a, const Vec& b) {
    Vec out;
    for (int i = 0; i < 16; i++) out.v[i] = a.v[i] * b.v[i];
    return out;
}

constexpr int TILE_ROWS = 2, TILE_PANELS = 2;
INLINE Vec decode16(const uint8_t* p, int64_t kind) {
    Vec out;
    for (int i = 0; i < 16; i++) out.v[i] = one(p[i], kind);
    return out;
}
INLINE Vec decode16(const uint16_t* p, int64_t) {
    Vec out;
    for (int i = 0; i < 16; i++) out.v[i] = decode_scalar(p[i]);
    return out;
}
INLINE void split(const uint16_t* p, Vec& even, Vec& odd) {
    for (int i = 0; i < 16; i++) even.v[i] = decode_scalar(p[2 * i]), odd.v[i] = decode_scalar(p[2 * i + 1]);
}
INLINE void decode_quad(const uint8_t* p, Vec* v) {
    for (int i = 0; i < 64; i++) v[i / 8 % 2 * 2 + i % 2].v[i / 16 * 4 + i % 8 / 2] = decode_scalar(p[i]);
}

}  // namespace

#include "product/ordered_kernel.h"

namespace {
bool in_registers(const Product&, int64_t, int64_t, int64_t, int64_t, const float*, int64_t) { return false; }
}  // namespace

const OrderedPart ordered_portable = ordered_part;
