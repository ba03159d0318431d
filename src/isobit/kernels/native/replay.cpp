// Makes a list of operators' calls, as `recording.py` has taken them down: nothing of Python stands between them, and the
// helpers of `threads.h` find the next one before they sleep.
#include <cstdint>

#include "native/replay.h"

namespace {

struct Call {
    int64_t (*function)(const int64_t* words);
    const int64_t* words;
};

// To each of `count` rows of `bytes` the row of `from` that `index` has for it, or the one at its own place: what PyTorch
// copies between operators. 1 where `from`, of `rows`, has no such row.
int64_t copy_rows(uint8_t* to, const uint8_t* from, const int64_t* index, int64_t count, int64_t bytes, int64_t rows) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = index ? index[i] : i;
        if (row < 0 || row >= rows) return 1;
        std::memmove(to + i * bytes, from + row * bytes, bytes);
    }
    return 0;
}

}  // namespace

REPLAYED(copy_rows)

// 0 when all are made, else the number, from 1 on, of the first that returned something else.
EXPORT int64_t isobit_replay(const void* calls, int64_t count) {
    const Call* each = static_cast<const Call*>(calls);
    for (int64_t i = 0; i < count; i++)
        if (each[i].function(each[i].words)) return i + 1;
    return 0;
}
