// What `sanitizers.py` links into a library under test: faults, to show that a sanitizer sees such in this very library.
#include <atomic>
#include <cstdint>

#include "native/threads.h"

#define EXPORT extern "C" __attribute__((visibility("default"), noinline))

EXPORT int64_t isobit_fault_read(const uint8_t* data, int64_t count) {  // one element beyond the end
    int64_t sum = 0;
    for (int64_t i = 0; i <= count; i++) sum += data[i];
    return sum;
}
EXPORT int32_t isobit_fault_overflow(int32_t x) { return x + 1; }
EXPORT int64_t isobit_fault_race(int64_t count) {  // the sum is both threads', of which each waits until the other is there
    int64_t sum = 0;
    std::atomic<int> there{0};
    share(2, 2, 2, 1, [&](int64_t, int64_t) {
        there.fetch_add(1, std::memory_order_relaxed);
        while (there.load(std::memory_order_relaxed) < 2) {
        }
        for (int64_t i = 0; i < count; i++) sum += i;
    });
    return sum;
}
