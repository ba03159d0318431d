// Both orders with AVX-512 and VBMI: B's codes are decoded in registers, for up to 8 rows at a time.
#include "product/ordered.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VBMI__)
#include "product/ordered_avx512.h"

namespace {

typedef __m512i Pairs;
constexpr int64_t FEW = INT64_MAX, MOST = 8, PANELS_OF_ONE = 4, PANELS_OF_TWO = 2;

}  // namespace

#include "product/ordered_registers.h"

const OrderedPart ordered_avx512 = ordered_part;
#else
const OrderedPart ordered_avx512 = nullptr;
#endif
