// Products in a fixed order: packing, the choice of the instruction set, threads with FTZ and DAZ, and the self-test.
#include "product/ordered.h"

#include <algorithm>
#include <vector>

#include "native/replay.h"
#include "native/self_test.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

// ---- the processor ----

enum Isa : int64_t { PORTABLE, NEON, AVX2, AVX512, AMX, AVX512_BF16, ISAS };

}  // namespace

OrderedPart ordered_path(int64_t isa) {
    const OrderedPart parts[ISAS] = {ordered_portable, ordered_neon, ordered_avx2,
                                     ordered_avx512,   ordered_amx,  ordered_bf16};
    return isa >= 0 && isa < ISAS ? parts[isa] : nullptr;
}

namespace {

bool computes(int64_t isa, int64_t order) {
    return isa == AMX ? order == TDP32 : isa == AVX512_BF16 ? order == VDP32 : true;
}

bool processor_has(int64_t isa) {
    if (isa == PORTABLE) return true;
#if defined(__aarch64__)
    return isa == NEON;
#elif defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    __builtin_cpu_init();
    if (isa == AVX2) {
        bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
        return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    }
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vbmi");
    if (isa == AVX512) return avx512;
    if (isa == AVX512_BF16) return avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
#if defined(__linux__)
    if (isa == AMX && avx512 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & (1u << 22)) && (d & (1u << 24))) {
        const long request_permission = 0x1023, tile_data = 18;
        return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    }
#endif
#endif
    return false;
}

// ---- packing ----

// Four rows of k of 16 columns: the pairs of k in turn, in lanes of 16 bytes for 4 columns each.
void interleave(const uint8_t* rows, uint8_t* out) {
    typedef uint64_t Halves __attribute__((vector_size(16)));
    typedef Bytes16<uint8_t> B;
    B::V row[4], pair[2][2];
    for (int i = 0; i < 4; i++) row[i] = load<B::V>(rows + 16 * i);
    for (int i = 0; i < 2; i++) {
        pair[i][0] = B::low(row[2 * i], row[2 * i + 1]);
        pair[i][1] = B::high(row[2 * i], row[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        Halves first = (Halves)pair[0][i], second = (Halves)pair[1][i];
        store(out + 32 * i, __builtin_shufflevector(first, second, 0, 2));
        store(out + 32 * i + 16, __builtin_shufflevector(first, second, 1, 3));
    }
}
void interleave(const uint16_t* rows, uint16_t* out) {
    typedef Bytes16<uint16_t> B;
    for (int half = 0; half < 2; half++, rows += 32, out += 32)
        for (int i = 0; i < 2; i++) {
            B::V even = load<B::V>(rows + 8 * i), odd = load<B::V>(rows + 16 + 8 * i);
            store(out + 16 * i, B::low(even, odd));
            store(out + 16 * i + 8, B::high(even, odd));
        }
}

template <class T>
void pack(const T* b, int64_t n, int64_t k, int64_t row_stride, int64_t column_stride, T* out, int64_t threads) {
    const int64_t panels = padded(n, PANEL) / PANEL, depth = padded(k, DEPTH);
    for_each(useful_threads(threads, n * k / 4), panels, [&](int64_t p) {
        static thread_local Scratch scratch;
        T* panel = (T*)scratch.get(depth * PANEL * sizeof(T) / sizeof(double));
        pack_panel(b, n, k, row_stride, column_stride, p, panel);
        std::memset(panel + k * PANEL, 0, (depth - k) * PANEL * sizeof(T));
        for (int64_t i = 0; i < depth; i += 4) interleave(panel + i * PANEL, out + (p * depth + i) * PANEL);
    });
}

// ---- the self-test ----

// BF16 numbers that are hard to add: wide exponents, cancelling magnitudes, sums that are subnormal, raw bits.
uint16_t hard(Random& random, int64_t data) {
    const uint32_t r = random.next(), sign = r >> 15 & 0x8000, mantissa = r & 0x7f, any = r >> 7 & 0xff;
    if (data == 0) return uint16_t(sign | (127 - 30 + any % 61) << 7 | mantissa);
    if (data == 1) return uint16_t(sign | (127 + any % 3 * 8) << 7 | (mantissa & 3));
    if (data == 2) return uint16_t(sign | (127 - 68 + any % 8) << 7 | mantissa);
    return uint16_t(sign | (any < 192 ? any : any - 64) << 7 | mantissa);  // no infinity, and few sums overflow
}

// One element by the definition, with the library's scalar fused multiply-add; called with FTZ and DAZ set.
__attribute__((noinline)) float scalar_sum(const float* a, const float* b, int64_t k, int64_t order) {
    volatile float sum = 0.0f;
    if (order == VDP32) {
        for (int64_t start = 0; start < k; start += STEP) {
            volatile float chain = 0.0f;
            for (int64_t i = start; i < start + STEP && i < k; i += 2) {
                if (i + 1 < k) chain = std::fma(a[i + 1], b[i + 1], chain);
                chain = std::fma(a[i], b[i], chain);
            }
            sum = sum + chain;
        }
        return sum;
    }
    for (int64_t start = 0; start < k; start += DEPTH) {
        volatile float even = 0.0f, odd = 0.0f;
        for (int64_t i = start; i < start + DEPTH && i < k; i += 2) {
            even = std::fma(a[i], b[i], even);
            if (i + 1 < k) odd = std::fma(a[i + 1], b[i + 1], odd);
        }
        volatile float both = even + odd;
        sum = sum + both;
    }
    return sum;
}

int64_t differing(const float* found, const float* wanted, int64_t count) {
    int64_t different = 0;
    for (int64_t i = 0; i < count; i++) {
        bool nan = found[i] != found[i] && wanted[i] != wanted[i];
        different += !nan && bits_of<uint32_t>(found[i]) != bits_of<uint32_t>(wanted[i]);
    }
    return different;
}

}  // namespace

// The best instruction set of this processor and this build for an order, or -1 where `wanted` >= 0 is not there.
EXPORT int64_t isobit_ordered_isa(int64_t wanted, int64_t order) {
    for (int64_t isa = wanted < 0 ? ISAS - 1 : wanted; isa >= 0; isa--) {
        if (ordered_path(isa) && computes(isa, order) && processor_has(isa)) return isa;
        if (wanted >= 0) return -1;
    }
    return -1;
}

EXPORT void isobit_ordered_pack(int64_t kind, const void* b, int64_t n, int64_t k, int64_t row_stride,
                              int64_t column_stride, void* out, int64_t threads) {
    if (kind == BF16)
        pack((const uint16_t*)b, n, k, row_stride, column_stride, (uint16_t*)out, threads);
    else
        pack((const uint8_t*)b, n, k, row_stride, column_stride, (uint8_t*)out, threads);
}
REPLAYED(isobit_ordered_pack)

EXPORT void isobit_ordered_product(const Product* arguments) {
    const Product& g = *arguments;
    if (g.m == 0 || g.n == 0) return;
    const OrderedPart run = ordered_path(g.isa);
    const int threads = useful_threads(g.threads, g.n * g.k * (g.m + 4) / 96);
    // AMX reads B from memory as fast as it can multiply by the rows that the second cache holds
    const int64_t few = g.isa == AMX ? BAND : 127;
    in_cells(g, threads, 16, 4, [&](int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
        Flushing flushing;
        run(g, row, row_end, panel, panel_end);
    }, few);
}
REPLAYED(isobit_ordered_product)

// Several products of one B each, such as those of experts: threads take panels of any of them, so that many small ones
// keep all busy.
EXPORT void isobit_ordered_products(const Product* each, int64_t count, int64_t threads) {
    constexpr int64_t GROUP = 4;  // panels that are computed together
    std::vector<int64_t> first(count + 1, 0);
    int64_t work = 0;
    for (int64_t i = 0; i < count; i++) {
        const Product& g = each[i];
        work += g.n * g.k * (g.m + 4) / 96;
        first[i + 1] = first[i] + (g.m == 0 ? 0 : padded(padded(g.n, PANEL) / PANEL, GROUP) / GROUP);
    }
    for_each_in_turn(useful_threads(threads, work), first[count], [&](int64_t t) {
        Flushing flushing;
        const int64_t i = std::upper_bound(first.begin(), first.end(), t) - first.begin() - 1;
        const Product& g = each[i];
        const int64_t panels = padded(g.n, PANEL) / PANEL, from = (t - first[i]) * GROUP;
        ordered_path(g.isa)(g, 0, g.m, from, from + GROUP < panels ? from + GROUP : panels);
    });
}

// Rows of sums of a thread, [rows][stride], whose subnormal numbers are kept: 0 plus them, or what `out` has.
static __attribute__((noinline)) void add_sums(const float* sums, int64_t rows, int64_t columns, int64_t stride, bool adds,
                                               float* out) {
    for (int64_t r = 0; r < rows; r++, sums += stride, out += stride) {
        int64_t j = 0;
        for (; j + 16 <= columns; j += 16)
            store(out + j, (adds ? load<f32x16>(out + j) : splat(0.0f)) + load<f32x16>(sums + j));
        for (; j < columns; j++) out[j] = (adds ? out[j] : 0.0f) + sums[j];
    }
}

// The sum of products of as many rows and columns, which are added in their order, each as `adds` does: float32, of BF16
// numbers. With ADDS it is added to what `out` has, with FROM_ZERO to 0, so that none of its zeros is negative. A cell's
// sums stay in the second cache from one product to the next.
EXPORT void isobit_ordered_sum(const Product* each, int64_t count, int64_t begins) {
    enum { REPLACES, ADDS, FROM_ZERO };
    constexpr int64_t ROWS = 256, PANELS = 64;
    const int64_t m = each[0].m, n = each[0].n, panels = padded(n, PANEL) / PANEL;
    const int64_t wide = (panels + PANELS - 1) / PANELS, cells = (m + ROWS - 1) / ROWS * wide;
    int64_t work = 0;
    for (int64_t i = 0; i < count; i++) work += n * each[i].k * (m + 4) / 96;
    for_each(useful_threads(each[0].threads, work), cells, [&](int64_t cell) {
        static thread_local Scratch scratch;
        const int64_t row = cell / wide * ROWS, rows = m - row < ROWS ? m - row : ROWS;
        const int64_t first = cell % wide * PANELS, last = first + PANELS < panels ? first + PANELS : panels;
        float *out = (float*)each[0].out + row * n, *sums = begins == ADDS ? (float*)scratch.get((rows * n + 1) / 2) : out;
        for (int64_t i = 0; i < count; i++) {
            const Flushing flushing;
            Product g = each[i];
            g.a = (const uint16_t*)g.a + row * g.a_row, g.m = rows, g.out = sums, g.adds = i > 0;
            ordered_path(g.isa)(g, 0, rows, first, last);
        }
        const int64_t column = first * PANEL, columns = (last * PANEL < n ? last * PANEL : n) - column;
        if (begins != REPLACES) add_sums(sums + column, rows, columns, n, begins == ADDS, out + column);
    });
}

// How many elements of adversarial products differ from scalar fused multiply-adds: of BF16 numbers and of codes, alone
// and in tiles, with K that fills no block.
EXPORT int64_t isobit_ordered_self_test(int64_t isa, int64_t order) {
    constexpr int64_t M = 21, N = 40, K = 150, DEEP = 160, PANELS = 3;
    static float a[M][K], b[N][K], wanted[M][N], found[M][N];
    static uint16_t a_bits[M][K], b_bits[N][K], packed_bits[PANELS * DEEP * PANEL];
    static uint8_t b_codes[N][K], packed_codes[PANELS * DEEP * PANEL];
    Random random{1};
    int64_t different = 0;
    for (int64_t data = 0; data < 8; data++) {
        const bool codes = data >= 4;
        Flushing flushing;
        for (int64_t k = 0; k < K; k++) {
            for (int64_t i = 0; i < M; i++) a_bits[i][k] = hard(random, data % 4), a[i][k] = decode_scalar(a_bits[i][k]);
            for (int64_t j = 0; j < N; j++) {
                b_bits[j][k] = hard(random, data % 4);
                do b_codes[j][k] = uint8_t(random.next()); while ((b_codes[j][k] & 0x7f) == 0x7f);
                b[j][k] = codes ? decode_scalar(b_codes[j][k]) : decode_scalar(b_bits[j][k]);
            }
        }
        for (int64_t i = 0; i < M; i++)
            for (int64_t j = 0; j < N; j++) wanted[i][j] = scalar_sum(a[i], b[j], K, order);
        Product g{};
        g.kind_a = BF16, g.n = N, g.k = K, g.a_row = K, g.a_column = 1, g.out_kind = FP32, g.threads = 1, g.isa = isa, g.order = order;
        g.kind_b = codes ? E4M3 : BF16;
        if (codes)
            pack(&b_codes[0][0], N, K, K, 1, packed_codes, 1), g.packed = packed_codes;
        else
            pack(&b_bits[0][0], N, K, K, 1, packed_bits, 1), g.packed = packed_bits;
        for (int64_t rows = M; rows > 0; rows -= M - 1) {
            g.m = rows, g.a = a_bits[M - rows], g.out = found[M - rows];
            isobit_ordered_product(&g);
            different += differing(found[M - rows], wanted[M - rows], rows * N);
        }
    }
    return different;
}
