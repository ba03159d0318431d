// How large a gradient is.
#include "native/native.h"

// Of each row of x [rows, columns] the sum of its squares, which are exact in float64: the second half of the row is added
// to the first, until one number is left.
EXPORT void isobit_square_sums(const float* x, int64_t rows, int64_t columns, double* sums, int64_t threads) {
    for_ranges(useful_threads(threads, rows * columns / 8), rows, 1, [&](int64_t first, int64_t last) {
        static thread_local Scratch scratch;
        double* part = scratch.get((columns + 1) / 2);
        for (int64_t r = first; r < last; r++) {
            const float* row = x + r * columns;
            int64_t width = columns, half = (width + 1) / 2;
            for (int64_t i = 0; i < width - half; i++) {
                double a = row[i], b = row[half + i];
                part[i] = a * a + b * b;
            }
            if (width % 2) part[half - 1] = double(row[half - 1]) * double(row[half - 1]);
            while (half > 1) {
                width = half, half = (width + 1) / 2;
                for (int64_t i = 0; i < width - half; i++) part[i] += part[half + i];
            }
            sums[r] = part[0];
        }
    });
}
