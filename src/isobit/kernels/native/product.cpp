// Matrix products C = A * B^T with float64 sums in an order that depends on K alone.
//
// Operands are decoded to float64 panels; every product of two codes, BF16 or FP32 values is exact there, so fused
// multiply-add changes no bit of a dot product and is allowed inside it. For FP8 the sum of a block of 128 is exact
// whatever its order; blocks are scaled by (scale_a * scale_b) and added in ascending order, without fusing. For plain
// operands each element is one ascending chain over k. Padding rows and columns are computed and dropped, so there is
// no second code path for remainders.
#include "common.h"

namespace {

constexpr long MR = 8;    // rows of a tile
constexpr long NR = 16;   // columns of a tile: two vectors of eight doubles
constexpr long BLOCK = 128;

struct Operand {
    const void* data;     // row-major [rows, K] (ld = row stride in elements), or transposed [K, rows]
    long row_stride, column_stride;
    int type;             // 0 fp8 e4m3, 1 bf16, 2 fp32, 3 fp8 e5m2
    const float* scale;   // [row blocks, k blocks] or null
    long scale_row_stride, scale_column_stride;
    long rows_per_scale;  // rows that share a scale
    long k_scales;        // scales along K: 1 or one per block
};

double e4m3_table[256], e5m2_table[256];

double decode_fp8(int code, int exponent_bits, int mantissa_bits, int bias) {
    int sign = code >> 7, exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1);
    int mantissa = code & ((1 << mantissa_bits) - 1);
    double value = exponent ? std::ldexp(1.0 + std::ldexp((double)mantissa, -mantissa_bits), exponent - bias)
                            : std::ldexp((double)mantissa, 1 - bias - mantissa_bits);
    return sign ? -value : value;
}

struct Tables {
    Tables() {
        for (int code = 0; code < 256; code++) {
            e4m3_table[code] = decode_fp8(code, 4, 3, 7);
            e5m2_table[code] = decode_fp8(code, 5, 2, 15);
        }
    }
} tables;

inline double load(const Operand& x, long row, long k) {
    long at = row * x.row_stride + k * x.column_stride;
    switch (x.type) {
        case 0: return e4m3_table[((const uint8_t*)x.data)[at]];
        case 1: return bf16_to_double(((const uint16_t*)x.data)[at]);
        case 2: return ((const float*)x.data)[at];
        default: return e5m2_table[((const uint8_t*)x.data)[at]];
    }
}

template <typename T, typename Decode>
void pack_rows(const T* data, long row_stride, long column_stride, long rows, long k0, long k1, long width, double* panel,
               Decode decode) {
    // panel[k][width]; rows beyond the operand are zero
    for (long row = 0; row < rows; row++) {
        const T* from = data + row * row_stride + k0 * column_stride;
        for (long k = 0; k < k1 - k0; k++) panel[k * width + row] = decode(from[k * column_stride]);
    }
    for (long row = rows; row < width; row++)
        for (long k = 0; k < k1 - k0; k++) panel[k * width + row] = 0.0;
}

void pack(const Operand& x, long first, long rows, long k0, long k1, long width, double* panel) {
    long at = first * x.row_stride;
    if (x.type == 1)
        pack_rows((const uint16_t*)x.data + at, x.row_stride, x.column_stride, rows, k0, k1, width, panel, bf16_to_double);
    else if (x.type == 2)
        pack_rows((const float*)x.data + at, x.row_stride, x.column_stride, rows, k0, k1, width, panel,
                  [](float v) { return (double)v; });
    else {
        const double* table = x.type == 0 ? e4m3_table : e5m2_table;
        pack_rows((const uint8_t*)x.data + at, x.row_stride, x.column_stride, rows, k0, k1, width, panel,
                  [table](uint8_t code) { return table[code]; });
    }
}

// c[8][16] += a[k][8] outer b[k][16], ascending k; products are exact, so contraction changes nothing
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("fp-contract=fast")))
#endif
__attribute__((noinline)) void micro(const double* a, const double* b, double* c, long length) {
#ifdef __clang__
#pragma clang fp contract(fast)
#endif
    v8 sum[MR][2];
    for (long r = 0; r < MR; r++) {
        sum[r][0] = *(const v8*)(c + r * NR);
        sum[r][1] = *(const v8*)(c + r * NR + 8);
    }
    for (long k = 0; k < length; k++) {
        v8 b0 = *(const v8*)(b + k * NR), b1 = *(const v8*)(b + k * NR + 8);
#pragma GCC unroll 8
        for (long r = 0; r < MR; r++) {
            v8 value = a[k * MR + r] - (v8){};
            sum[r][0] += value * b0;
            sum[r][1] += value * b1;
        }
    }
    for (long r = 0; r < MR; r++) {
        *(v8*)(c + r * NR) = sum[r][0];
        *(v8*)(c + r * NR + 8) = sum[r][1];
    }
}

inline double scale_of(const Operand& x, long row, long block) {
    return x.scale[row / x.rows_per_scale * x.scale_row_stride + (x.k_scales > 1 ? block : 0) * x.scale_column_stride];
}

// total[8][16] += dot * (scale_a * scale_b), rounded twice as the reference does
void add_scaled(double* total, const double* dot, const Operand& a, const Operand& b, long m, long rows, long n, long columns,
                long block) {
    double scale_b[NR];
    for (long j = 0; j < columns; j++) scale_b[j] = scale_of(b, n + j, block);
    for (long i = 0; i < rows; i++) {
        double scale_a = scale_of(a, m + i, block);
        for (long j = 0; j < columns; j++) {
            double term = dot[i * NR + j] * (scale_a * scale_b[j]);
            total[i * NR + j] = total[i * NR + j] + term;
        }
    }
}

void store(const double* total, void* out, int out_type, const float* bias, long m, long rows, long n, long columns, long N) {
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < columns; j++) {
            double value = total[i * NR + j];
            if (bias) value = value + (double)bias[n + j];
            long at = (m + i) * N + n + j;
            if (out_type == 1) ((uint16_t*)out)[at] = double_to_bf16(value);
            else ((float*)out)[at] = (float)value;
        }
}

// Columns [n, n + 16 * groups) of all rows: B is decoded once per block of K, A comes decoded.
struct Tile {
    alignas(64) double dot[MR * NR];
};

void columns(const Operand& a, const Operand& b, const double* packed_a, long M, long N, long K, long n, const float* bias,
             void* out, int out_type, double* packed_b, double* totals) {
    bool scaled = a.scale != nullptr;
    long width = std::min(NR, N - n), row_tiles = (M + MR - 1) / MR, padded = row_tiles * MR;
    std::memset(totals, 0, sizeof(double) * padded * NR);
    Tile tile;
    for (long k0 = 0, block = 0; k0 < K; k0 += BLOCK, block++) {
        long k1 = std::min(K, k0 + BLOCK);
        pack(b, n, width, k0, k1, NR, packed_b);
        for (long t = 0; t < row_tiles; t++) {
            const double* panel = packed_a + (t * K + k0) * MR;
            double* total = totals + t * MR * NR;
            if (!scaled) {
                micro(panel, packed_b, total, k1 - k0);
                continue;
            }
            std::memset(tile.dot, 0, sizeof tile.dot);
            micro(panel, packed_b, tile.dot, k1 - k0);
            add_scaled(total, tile.dot, a, b, t * MR, std::min(MR, M - t * MR), n, width, block);
        }
    }
    for (long t = 0; t < row_tiles; t++)
        store(totals + t * MR * NR, out, out_type, bias, t * MR, std::min(MR, M - t * MR), n, width, N);
}

}  // namespace

extern "C" void isobit_product(const Operand* a, const Operand* b, long M, long N, long K, const float* bias, void* out,
                               int out_type, int threads) {
    // Rows in slices, so that the decoded A and the totals stay in cache.
    constexpr long SLICE = 256;
    long column_tiles = (N + NR - 1) / NR;
    bool parallel = threads > 1 && M * N * K > 1 << 15;
    for (long m0 = 0; m0 < M; m0 += SLICE) {
        long rows = std::min(SLICE, M - m0), row_tiles = (rows + MR - 1) / MR;
        Operand slice = *a;
        size_t element = a->type == 1 ? 2 : a->type == 2 ? 4 : 1;
        slice.data = (const char*)a->data + m0 * a->row_stride * element;
        if (a->scale) {
            slice.scale = a->scale;
            if (a->rows_per_scale == 1) slice.scale += m0 * a->scale_row_stride;
            else slice.scale += m0 / a->rows_per_scale * a->scale_row_stride;  // SLICE is a multiple of 128
        }
        void* target = (char*)out + m0 * N * (out_type == 1 ? 2 : 4);
        Buffer packed_a(row_tiles * MR * K);
#pragma omp parallel for num_threads(threads) if (parallel) schedule(static)
        for (long t = 0; t < row_tiles; t++)
            pack(slice, t * MR, std::min(MR, rows - t * MR), 0, K, MR, packed_a.data + t * MR * K);
#pragma omp parallel num_threads(threads) if (parallel)
        {
            Buffer packed_b(BLOCK * NR), totals(row_tiles * MR * NR);
#pragma omp for schedule(static)
            for (long t = 0; t < column_tiles; t++)
                columns(slice, *b, packed_a.data, rows, N, K, t * NR, bias, target, out_type, packed_b.data, totals.data);
        }
    }
}
