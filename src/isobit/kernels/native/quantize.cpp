// Quantization to E4M3 with block scales, quantized keys and values, and back to bfloat16.
#include "quantize.h"

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
template <class T>
static bool quantize_columns(const T* x, int64_t row, int64_t last, int64_t columns, int64_t power_of_two,
                             uint8_t* codes, float* scales) {
    for (int64_t c = 0; c < columns; c += 16) {
        int64_t width = columns - c < 16 ? columns - c : 16;
        T padded_row[16];
        std::memset(padded_row, 0, sizeof padded_row);
        f32x16 most = splat(0.0f), scale = splat(1.0f);
        for (int64_t r = row; r < last; r++) {
            const T* p = x + r * columns + c;
            if (width < 16) std::memcpy(padded_row, p, width * sizeof(T)), p = padded_row;
            most = larger(most, magnitude(decode(p)));
        }
        for (int lane = 0; lane < width; lane++) {
            uint32_t bits = bits_of<uint32_t>(most[lane]);
            if (!is_finite(bits)) return false;
            scales[c + lane] = scale[lane] = scale_of(bits, power_of_two);
        }
        const f32x16 inverse = splat(1.0f) / scale;
        for (int64_t r = row; r < last; r++) {
            const T* p = x + r * columns + c;
            uint8_t line[16];
            if (width < 16) std::memcpy(padded_row, p, width * sizeof(T)), p = padded_row;
            put_codes(line, encode(power_of_two ? decode(p) * inverse : decode(p) / scale));
            std::memcpy(codes + r * columns + c, line, width);
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
#pragma omp parallel for num_threads(useful_threads(threads, rows * columns / 8)) schedule(static)
    for (int64_t s = 0; s < strips; s++) {
        int64_t row = s * block_rows, last = row + block_rows < rows ? row + block_rows : rows;
        bool good = by_column ? quantize_columns(x, row, last, columns, power_of_two, codes, scales + s * columns)
                              : quantize_tiles(x, row, last, columns, block_rows, block_columns, power_of_two, codes,
                                               scales);
        if (!good) bad = 1;
    }
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

// Code times scale in float32, rounded to bfloat16.
EXPORT void isobit_dequantize(const uint8_t* codes, int64_t rows, int64_t columns, const float* scales,
                              int64_t block_rows, int64_t block_columns, uint16_t* out, int64_t threads) {
    int64_t blocks = (columns + block_columns - 1) / block_columns;
#pragma omp parallel for num_threads(useful_threads(threads, rows * columns / 16)) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < blocks; b++) {
            f32x16 scale = splat(scales[r / block_rows * blocks + b]);
            int64_t first = r * columns + b * block_columns;
            int64_t end = r * columns + ((b + 1) * block_columns < columns ? (b + 1) * block_columns : columns);
            for (; first + 16 <= end; first += 16) store(out + first, to_bf16(decode(codes + first) * scale));
            for (; first < end; first++) out[first] = to_bf16(decode_scalar(codes[first]) * scale[0]);
        }
}

template <class T>
static bool write_rows(const T* x, int64_t row_stride, const int64_t* slots, int64_t tokens, int64_t heads, int64_t dim,
                       int64_t power_of_two, uint8_t* store_codes, float* store_scales) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            const T* row = x + t * row_stride + h * dim;
            uint32_t amax = run_amax(row, dim);
            if (!is_finite(amax)) return false;
            float scale = scale_of(amax, power_of_two);
            store_scales[slots[t] * heads + h] = scale;
            uint8_t* codes = store_codes + (slots[t] * heads + h) * dim;
            if (power_of_two) encode_run<true>(row, dim, scale, codes);
            else encode_run<false>(row, dim, scale, codes);
        }
    return true;
}

// Keys and values [tokens, heads, dim], rows `row_stride` elements apart, into their slots: quantized, or copied where
// the scales are null. Returns 1 on NaN or infinity.
EXPORT int64_t isobit_kv_write(int64_t kind, const void* k, const void* v, int64_t k_stride, int64_t v_stride,
                               const int64_t* slots, int64_t tokens, int64_t heads, int64_t dim, int64_t power_of_two,
                               void* store_k, void* store_v, float* scale_k, float* scale_v) {
    const void* sources[2] = {k, v};
    void* stores[2] = {store_k, store_v};
    float* scales[2] = {scale_k, scale_v};
    int64_t strides[2] = {k_stride, v_stride}, size = kind == BF16 ? 2 : 4;
    for (int side = 0; side < 2; side++) {
        if (scales[side] == nullptr) {
            for (int64_t t = 0; t < tokens; t++)
                std::memcpy((char*)stores[side] + slots[t] * heads * dim * size,
                            (const char*)sources[side] + t * strides[side] * size, heads * dim * size);
            continue;
        }
        bool good = kind == BF16 ? write_rows((const uint16_t*)sources[side], strides[side], slots, tokens, heads, dim,
                                              power_of_two, (uint8_t*)stores[side], scales[side])
                                 : write_rows((const float*)sources[side], strides[side], slots, tokens, heads, dim,
                                              power_of_two, (uint8_t*)stores[side], scales[side]);
        if (!good) return 1;
    }
    return 0;
}
