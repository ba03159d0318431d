// Makes a list of operators' calls, as `recording.py` has taken them down: nothing of Python stands between them, and the
// helpers of `threads.h` find the next one before they sleep.
#include <cstdint>

#include "native/native.h"

namespace {

struct Call {
    int64_t (*function)(const int64_t* words);
    const int64_t* words;
};

}  // namespace

// 0 when all are made, else the number, from 1 on, of the first that returned something else.
EXPORT int64_t isobit_replay(const void* calls, int64_t count) {
    const Call* each = static_cast<const Call*>(calls);
    for (int64_t i = 0; i < count; i++)
        if (each[i].function(each[i].words)) return i + 1;
    return 0;
}
