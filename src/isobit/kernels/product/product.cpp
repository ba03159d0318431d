// C = A · Bᵀ in float64 with one rounding, for E4M3 operands with block scales and for plain BF16 and FP32 ones.
//
// E4M3: per block of 128 along K the exact sum of code products, times (scale_a · scale_b), blocks added ascending.
// Plain: products are exact in float64; each element is one chain of additions in ascending k. B is packed beforehand
// into panels [N/16][K][16] of its own format, so that the inner loop reads it in order; A is decoded per call. Nibbles
// are read as they are stored, 16 rows at a time: blocks of 16 along K against codes, values in float32 against plain A.
#include "native/replay.h"
#include "product/nibbles.h"

constexpr int64_t GROUP = 4;   // panels of B that are decoded together

template <class T>
static void pack(const T* b, int64_t n, int64_t k, int64_t row_stride, int64_t column_stride, T* out, int64_t threads) {
    int64_t panels = padded(n, PANEL) / PANEL;
    for_each(useful_threads(threads, n * k / 4), panels,
             [&](int64_t p) { pack_panel(b, n, k, row_stride, column_stride, p, out + p * k * PANEL); });
}

EXPORT void isobit_pack(int64_t kind, const void* b, int64_t n, int64_t k, int64_t row_stride, int64_t column_stride,
                        void* out, int64_t threads) {
    if (kind == E4M3) pack((const uint8_t*)b, n, k, row_stride, column_stride, (uint8_t*)out, threads);
    if (kind == BF16) pack((const uint16_t*)b, n, k, row_stride, column_stride, (uint16_t*)out, threads);
    if (kind == FP32) pack((const float*)b, n, k, row_stride, column_stride, (float*)out, threads);
}
REPLAYED(isobit_pack)

template <class T>
static void decode_block(const T* a, int64_t rows, int64_t count, int64_t row_stride, int64_t column_stride,
                         double* out) {
    if (column_stride == 1) {
        for (int64_t r = 0; r < rows; r++) decode_row(a + r * row_stride, count, out + r * STEP);
        return;
    }
    static thread_local Scratch scratch;
    T* turned = (T*)scratch.get(rows * PANEL * sizeof(T) / sizeof(double) + 8);
    int64_t k = 0;
    for (; k + PANEL <= count && row_stride == 1; k += PANEL) {  // a transposed view: 16 of its columns are 16 runs
        const T* runs[PANEL];
        for (int64_t i = 0; i < PANEL; i++) runs[i] = a + (k + i) * column_stride;
        transpose_rows(runs, rows, turned);
        for (int64_t r = 0; r < rows; r++) put(out + r * STEP + k, decode(turned + r * PANEL));
    }
    for (; k < count; k++)
        for (int64_t r = 0; r < rows; r++) out[r * STEP + k] = decode_scalar(a[r * row_stride + k * column_stride]);
}

static void decode_a(const Product& g, int64_t row, int64_t rows, int64_t k, int64_t count, double* out) {
    int64_t offset = row * g.a_row + k * g.a_column;
    if (g.kind_a == E4M3) decode_block((const uint8_t*)g.a + offset, rows, count, g.a_row, g.a_column, out);
    if (g.kind_a == BF16) decode_block((const uint16_t*)g.a + offset, rows, count, g.a_row, g.a_column, out);
    if (g.kind_a == FP32) decode_block((const float*)g.a + offset, rows, count, g.a_row, g.a_column, out);
}

// A panel's columns of nibbles, multiples of 16: out[count][16]; times their scales, rounded to float32, where A has none.
static void decode_nibbles(const Product& g, const Nibbles& nibbles, int64_t count, double* out) {
    alignas(16) uint8_t codes[2 * PANEL];
    for (int64_t j = 0; j < count; j += 2, out += 2 * PANEL) {
        const u8x16 pair = load<u8x16>(nibbles.pairs[j / 2]);
        store(codes, e4m3_of_e2m1(pair & 15)), store(codes + PANEL, e4m3_of_e2m1(pair >> 4));
        for (int64_t i = 0; i < 2; i++) {
            const f32x16 value = decode(codes + i * PANEL);
            put(out + i * PANEL, g.scaled ? value : value * load<f32x16>(nibbles.scale[j / PANEL]));
        }
    }
}

static void decode_b(const Product& g, int64_t panel, int64_t k, int64_t count, Nibbles& nibbles, double* out) {
    int64_t offset = (panel * g.k + k) * PANEL;
    if (g.kind_b == E2M1) read_nibbles(g, panel, k, count, nibbles), decode_nibbles(g, nibbles, count, out);
    if (g.kind_b == E4M3) decode_row((const uint8_t*)g.packed + offset, count * PANEL, out);
    if (g.kind_b == BF16) decode_row((const uint16_t*)g.packed + offset, count * PANEL, out);
    if (g.kind_b == FP32) decode_row((const float*)g.packed + offset, count * PANEL, out);
}

template <class T>
static void finish(const Product& g, int64_t row, int64_t rows, int64_t column, int64_t columns, double* total,
                   int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        double* line = total + r * width;
        for (int64_t j = 0; g.bias && j < columns; j++)
            line[j] += g.bias_kind == BF16 ? decode_scalar(((const uint16_t*)g.bias)[column + j])
                                           : decode_scalar(((const float*)g.bias)[column + j]);
        round_row(line, columns, (T*)g.out + (row + r) * g.n + column);
    }
}

// Rows row0..row1 times panels panel0..panel1.
static void product_part(const Product& g, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    static thread_local Scratch scratch;
    const int64_t steps = (g.k + STEP - 1) / STEP, width = GROUP * PANEL;
    const int64_t block = g.kind_b == E2M1 ? PANEL : STEP, blocks = (g.k + block - 1) / block;  // that have a scale
    int64_t chunk = (1 << 17) / (steps * STEP) / 8 * 8;  // rows of A whose decoded values stay within a megabyte
    chunk = chunk < 32 ? 32 : chunk > 256 ? 256 : chunk;
    if (chunk > row1 - row0) chunk = padded(row1 - row0, 8);
    double* decoded_a = scratch.get(chunk * (steps * STEP + blocks) + width * (STEP + 1) + chunk * width);
    double* decoded_b = decoded_a + chunk * steps * STEP;
    double *total = decoded_b + width * STEP, *scale_a = total + chunk * width, *scale_b = scale_a + chunk * blocks;
    Nibbles nibbles[GROUP];
    for (int64_t row = row0; row < row1; row += chunk) {
        int64_t rows = row1 - row < chunk ? row1 - row : chunk;
        for (int64_t s = 0; s < steps; s++) {
            int64_t count = g.k - s * STEP < STEP ? g.k - s * STEP : STEP;
            decode_a(g, row, rows, s * STEP, count, decoded_a + s * chunk * STEP);
        }
        for (int64_t i = 0; g.scaled && i < blocks; i++) g.scale_a.fill(row, rows, g.m, i * block, scale_a + i * chunk);
        for (int64_t panel = panel0; panel < panel1; panel += GROUP) {
            int64_t panels = panel1 - panel < GROUP ? panel1 - panel : GROUP, column = panel * PANEL;
            std::memset(total, 0, rows * width * sizeof(double));
            for (int64_t s = 0; s < steps; s++) {
                int64_t k = s * STEP, count = g.k - k < STEP ? g.k - k : STEP;
                const double* a = decoded_a + s * chunk * STEP;
                for (int64_t p = 0; p < panels; p++)
                    decode_b(g, panel + p, k, count, nibbles[p], decoded_b + p * PANEL * STEP);
                if (g.scaled) {
                    for (int64_t j = 0; j < count; j += block) {
                        if (g.kind_b != E2M1) g.scale_b.fill(column, panels * PANEL, g.n, k, scale_b);
                        else for (int64_t p = 0; p < panels; p++)
                            decode_row(nibbles[p].scale[j / PANEL], PANEL, scale_b + p * PANEL);
                        tile_product<ADD_SCALED>(rows, panels, a + j, STEP, decoded_b + j * PANEL, PANEL, PANEL * STEP,
                                                 count - j < block ? count - j : block, total, width,
                                                 {scale_a + (k + j) / block * chunk, scale_b});
                    }
                } else {
                    tile_product<CONTINUE>(rows, panels, a, STEP, decoded_b, PANEL, PANEL * STEP, count, total, width);
                }
            }
            int64_t columns = g.n - column < panels * PANEL ? g.n - column : panels * PANEL;
            if (g.out_kind == BF16) finish<uint16_t>(g, row, rows, column, columns, total, width);
            if (g.out_kind == FP32) finish<float>(g, row, rows, column, columns, total, width);
        }
    }
}

EXPORT void isobit_product(const Product* arguments) {
    const Product& g = *arguments;
    if (g.m == 0 || g.n == 0) return;
    const int threads = useful_threads(g.threads, g.n * g.k * (g.m + 4) / 48);
    in_cells(g, threads, 8, 1, [&](int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
        product_part(g, row, row_end, panel, panel_end);
    });
}
REPLAYED(isobit_product)
