// Both orders with AVX-512 and VBMI: B's codes are decoded in registers, for up to 8 rows at a time.
#include "ordered.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VBMI__)
#include "ordered_avx512.h"

namespace {

typedef __m512i Pairs;
constexpr int64_t FEW = INT64_MAX, MOST = 8, PANELS_OF_ONE = 4, PANELS_OF_TWO = 2;

struct Bf16Source {
    static constexpr int64_t bytes = 2;
    INLINE void begin(const Product&, int64_t, int64_t) {}
    INLINE void load(const uint8_t* p, Pairs& first, Pairs& second) const {
        first = _mm512_loadu_si512(p), second = _mm512_loadu_si512(p + 64);
    }
    INLINE Vec value(Vec v) const { return v; }
};
template <bool FOLDED>
struct CodeSource {
    static constexpr int64_t bytes = 1;
    Table table;
    float made = 0.0f;
    INLINE void begin(const Product& g, int64_t panel, int64_t k) {
        float scale = 1.0f;
        if (FOLDED) g.scale_b.fill(panel * PANEL, 1, g.n, k, &scale);
        if (scale != made) table.make(scale), made = scale;
    }
    INLINE void load(const uint8_t* p, Pairs& first, Pairs& second) const { decode_pairs(p, table, first, second); }
    INLINE Vec value(Vec v) const { return v; }  // the table has the scale
};

}  // namespace

#include "ordered_registers.h"

const OrderedPart ordered_avx512 = ordered_part;
#else
const OrderedPart ordered_avx512 = nullptr;
#endif
