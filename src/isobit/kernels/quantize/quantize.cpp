// Quantization to E4M3 with block scales, back to bfloat16, and what is lost.
#include "native/replay.h"
#include "quantize/quantize.h"

#include <atomic>

// Blocks of `block_rows` x `block_columns`, rows row0..row1 (whole blocks). Returns false on NaN or infinity.
template <class T>
static bool quantize_tiles(const T* x, int64_t row0, int64_t row1, int64_t columns, int64_t block_rows,
                           int64_t block_columns, int64_t power_of_two, uint8_t* codes, float* scales) {
    int64_t blocks = (columns + block_columns - 1) / block_columns;
    for (int64_t row = row0; row < row1; row += block_rows) {
        int64_t last = row + block_rows < row1 ? row + block_rows : row1;
        for (int64_t b = 0; b < blocks; b++) {
            int64_t first = b * block_columns;
            int64_t count = columns - first < block_columns ? columns - first : block_columns;
            uint32_t amax = 0;
            for (int64_t r = row; r < last; r++) {
                uint32_t bits = run_amax(x + r * columns + first, count);
                amax = bits > amax ? bits : amax;
            }
            if (!is_finite(amax)) return false;
            float scale = scale_of(amax, power_of_two);
            scales[row / block_rows * blocks + b] = scale;
            for (int64_t r = row; r < last; r++)
                if (power_of_two) encode_run<true>(x + r * columns + first, count, scale, codes + r * columns + first);
                else encode_run<false>(x + r * columns + first, count, scale, codes + r * columns + first);
        }
    }
    return true;
}

// One scale per column over rows row..last: 16 columns at a time.
template <class Matrix>
static bool quantize_columns(const Matrix& x, int64_t row, int64_t last, int64_t power_of_two, uint8_t* codes,
                             float* scales) {
    for (int64_t c = 0; c < x.columns; c += 16) {
        int64_t width = x.columns - c < 16 ? x.columns - c : 16;
        f32x16 most = splat(0.0f), scale = splat(1.0f);
        for (int64_t r = row; r < last; r++) most = larger(most, magnitude(x.read(r, c)));
        for (int lane = 0; lane < width; lane++) {
            uint32_t bits = bits_of<uint32_t>(most[lane]);
            if (!is_finite(bits)) return false;
            scales[c + lane] = scale[lane] = scale_of(bits, power_of_two);
        }
        const f32x16 inverse = splat(1.0f) / scale;
        for (int64_t r = row; r < last; r++) {
            uint8_t line[16];
            f32x16 value = x.read(r, c);
            put_codes(line, encode(power_of_two ? value * inverse : value / scale));
            std::memcpy(codes + r * x.columns + c, line, width);
        }
    }
    return true;
}

template <class T>
static int64_t quantize(const T* x, int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns,
                        int64_t power_of_two, uint8_t* codes, float* scales, int64_t threads) {
    std::atomic<int64_t> bad{0};
    int64_t strips = (rows + block_rows - 1) / block_rows;
    bool by_column = block_columns == 1 && block_rows > 1;
    for_each(useful_threads(threads, rows * columns / 8), strips, [&](int64_t s) {
        int64_t row = s * block_rows, last = row + block_rows < rows ? row + block_rows : rows;
        bool good = by_column ? quantize_columns(Plain<T>{x, columns}, row, last, power_of_two, codes,
                                                 scales + s * columns)
                              : quantize_tiles(x, row, last, columns, block_rows, block_columns, power_of_two, codes,
                                               scales);
        if (!good) bad = 1;
    });
    return bad;
}

// x [rows, columns] contiguous. Returns 1 if it holds NaN or infinity.
EXPORT int64_t isobit_quantize(int64_t kind, const void* x, int64_t rows, int64_t columns, int64_t block_rows,
                               int64_t block_columns, int64_t power_of_two, void* codes, void* scales,
                               int64_t threads) {
    if (kind == BF16)
        return quantize((const uint16_t*)x, rows, columns, block_rows, block_columns, power_of_two, (uint8_t*)codes,
                        (float*)scales, threads);
    return quantize((const float*)x, rows, columns, block_rows, block_columns, power_of_two, (uint8_t*)codes,
                    (float*)scales, threads);
}
REPLAYED(isobit_quantize)

// E4M3 codes [rows, columns] under any scales, quantized again with one for each column of `block_rows` rows. Returns 1
// if a value is infinite.
EXPORT int64_t isobit_requantize(const uint8_t* x, int64_t rows, int64_t columns, const float* x_scales,
                                 int64_t x_block_rows, int64_t x_block_columns, int64_t block_rows,
                                 int64_t power_of_two, uint8_t* codes, float* scales, int64_t threads) {
    const Coded matrix{x, columns, x_scales, x_block_rows, x_block_columns};
    std::atomic<int64_t> bad{0};
    for_each(useful_threads(threads, rows * columns / 8), (rows + block_rows - 1) / block_rows, [&](int64_t s) {
        int64_t row = s * block_rows, last = row + block_rows < rows ? row + block_rows : rows;
        if (!quantize_columns(matrix, row, last, power_of_two, codes, scales + s * columns)) bad = 1;
    });
    return bad;
}

// ---- what quantization does to a matrix ----

INLINE f64x8 add_squares(f32x16 x, f64x8 sum) {
    f64x8 low = widen(low_half(x)), high = widen(high_half(x));
    return multiply_add(high, high, multiply_add(low, low, sum));
}

// Of 128 rows or fewer from `row` on: sums of squares of values and of noise, float64 in 8 lanes; counts are added.
template <class Matrix>
static void compare_rows(const Matrix& x, const Coded& quantized, int64_t row, int64_t last, double* values,
                         double* noise, std::atomic<int64_t>& clamped, std::atomic<int64_t>& flushed) {
    f64x8 squares = splat(0.0), errors = splat(0.0);
    int64_t most = 0, least = 0;
    for (int64_t r = row; r < last; r++) {
        i32x16 over = {}, lost = {};  // of a row: masks are -1
        for (int64_t c = 0; c < x.columns; c += 16) {
            const f32x16 value = x.read(r, c), restored = quantized.read(r, c);
            squares = add_squares(value, squares), errors = add_squares(restored - value, errors);
            over += magnitude(value) > LARGEST * (1 + 0x1p-20f) * quantized.scale(r, c);
            lost += (value != 0.0f) - (restored != 0.0f);
        }
        for (int lane = 0; lane < 16; lane++) most -= over[lane], least -= lost[lane];
    }
    *values = lane_sum(squares), *noise = lane_sum(errors);
    clamped += most, flushed += least;
}

template <class Matrix>
static void compare(const Matrix& x, const Coded& quantized, int64_t rows, double* counts, double* values,
                    double* noise, int64_t threads) {
    std::atomic<int64_t> clamped{0}, flushed{0};
    const int64_t blocks = (rows + 127) / 128;
    for_each(useful_threads(threads, rows * x.columns / 4), blocks, [&](int64_t b) {
        int64_t last = (b + 1) * 128 < rows ? (b + 1) * 128 : rows;
        compare_rows(x, quantized, b * 128, last, values + b, noise + b, clamped, flushed);
    });
    counts[0] = double(clamped.load()), counts[1] = double(flushed.load());
}

// x [rows, columns], codes with their scales or plain (x_scales null), and its quantization: counts [2], squares
// [2, blocks of 128 rows].
EXPORT void isobit_error_sums(int64_t kind, const void* x, const float* x_scales, int64_t x_block_rows,
                              int64_t x_block_columns, const uint8_t* codes, const float* scales, int64_t block_rows,
                              int64_t block_columns, int64_t rows, int64_t columns, double* counts, double* squares,
                              int64_t threads) {
    const Coded quantized{codes, columns, scales, block_rows, block_columns};
    double* noise = squares + (rows + 127) / 128;
    if (kind == E4M3) {
        const Coded given{(const uint8_t*)x, columns, x_scales, x_block_rows, x_block_columns};
        compare(given, quantized, rows, counts, squares, noise, threads);
    } else if (kind == BF16) {
        compare(Plain<uint16_t>{(const uint16_t*)x, columns}, quantized, rows, counts, squares, noise, threads);
    } else {
        compare(Plain<float>{(const float*)x, columns}, quantized, rows, counts, squares, noise, threads);
    }
}

// Code times scale in float32, rounded to bfloat16.
EXPORT void isobit_dequantize(const uint8_t* codes, int64_t rows, int64_t columns, const float* scales,
                              int64_t block_rows, int64_t block_columns, uint16_t* out, int64_t threads) {
    int64_t blocks = (columns + block_columns - 1) / block_columns;
    for_each(useful_threads(threads, rows * columns / 16), rows, [&](int64_t r) {
        for (int64_t b = 0; b < blocks; b++) {
            f32x16 scale = splat(scales[r / block_rows * blocks + b]);
            int64_t first = r * columns + b * block_columns;
            int64_t end = r * columns + ((b + 1) * block_columns < columns ? (b + 1) * block_columns : columns);
            for (; first + 16 <= end; first += 16) store(out + first, to_bf16(decode(codes + first) * scale));
            for (; first < end; first++) out[first] = to_bf16(decode_scalar(codes[first]) * scale[0]);
        }
    });
}
REPLAYED(isobit_dequantize)
