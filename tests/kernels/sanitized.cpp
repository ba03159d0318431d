// What `sanitizers.py` links into a library under test: faults, to show that a sanitizer sees such in this very library;
// and for ThreadSanitizer the part of OpenMP's run time that the operators use.
//
// The usual one, libgomp, is not instrumented: it wakes its threads by futexes, which ThreadSanitizer does not see, so
// every parallel region would seem to race with what came before it. Here a region starts its threads and joins them.
// So threads of one region are compared with one another, and what orders regions is known.
#include <cstdint>

#if defined(__SANITIZE_THREAD__)
#include <atomic>
#include <pthread.h>
#include <vector>

namespace {

struct Team {
    void (*body)(void*);
    void* data;
    int size;
    pthread_barrier_t barrier;
    std::atomic<uint64_t> next;
    uint64_t end, step, chunk;
};
struct Member {
    Team* team;
    int number;
};
thread_local Member me = {nullptr, 0};

void* run(void* given) {
    me = *static_cast<Member*>(given);
    me.team->body(me.team->data);
    return nullptr;
}

void start(void (*body)(void*), void* data, unsigned size, uint64_t first, uint64_t end, uint64_t step, uint64_t chunk) {
    Team team{body, data, int(size ? size : 1), {}, {first}, end, step, chunk};
    pthread_barrier_init(&team.barrier, nullptr, unsigned(team.size));
    std::vector<Member> members;
    for (int i = 0; i < team.size; i++) members.push_back({&team, i});
    std::vector<pthread_t> threads(size_t(team.size));
    for (int i = 1; i < team.size; i++) pthread_create(&threads[i], nullptr, run, &members[i]);
    const Member before = me;
    run(&members[0]);
    me = before;
    for (int i = 1; i < team.size; i++) pthread_join(threads[i], nullptr);
    pthread_barrier_destroy(&team.barrier);
}

template <class T>
bool take(T* first, T* end) {
    Team& team = *me.team;
    const uint64_t from = team.next.fetch_add(team.step * team.chunk, std::memory_order_relaxed);
    if (from >= team.end) return false;
    const uint64_t to = from + team.step * team.chunk;
    *first = T(from), *end = T(to < team.end ? to : team.end);
    return true;
}

// A loop with `schedule(dynamic)` in a region: of each team the first to come sets it up. One such loop a region.
void set_up(uint64_t first, uint64_t end, uint64_t step, uint64_t chunk) {
    Team& team = *me.team;
    if (me.number == 0) team.next = first, team.end = end, team.step = step, team.chunk = chunk;
    pthread_barrier_wait(&team.barrier);
}

}  // namespace

extern "C" {
int omp_get_thread_num() { return me.number; }
int omp_get_num_threads() { return me.team ? me.team->size : 1; }
void GOMP_barrier() { pthread_barrier_wait(&me.team->barrier); }
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) { start(body, data, threads, 0, 0, 1, 1); }
bool GOMP_loop_nonmonotonic_dynamic_start(long first, long end, long step, long chunk, long* from, long* to) {
    set_up(first, end, step, chunk);
    return take(from, to);
}
bool GOMP_loop_nonmonotonic_dynamic_next(long* from, long* to) { return take(from, to); }
bool GOMP_loop_ull_nonmonotonic_dynamic_start(bool, unsigned long long first, unsigned long long end,
                                              unsigned long long step, unsigned long long chunk,
                                              unsigned long long* from, unsigned long long* to) {
    set_up(first, end, step, chunk);
    return take(from, to);
}
bool GOMP_loop_ull_nonmonotonic_dynamic_next(unsigned long long* from, unsigned long long* to) { return take(from, to); }
void GOMP_parallel_loop_nonmonotonic_dynamic(void (*body)(void*), void* data, unsigned threads, long first, long end,
                                             long step, long chunk, unsigned) {
    start(body, data, threads, first, end, step, chunk);
}
void GOMP_loop_end_nowait() {}
}
#endif

// ---- faults ----

#define EXPORT extern "C" __attribute__((visibility("default"), noinline))

EXPORT int64_t isobit_fault_read(const uint8_t* data, int64_t count) {  // one element beyond the end
    int64_t sum = 0;
    for (int64_t i = 0; i <= count; i++) sum += data[i];
    return sum;
}
EXPORT int32_t isobit_fault_overflow(int32_t x) { return x + 1; }
EXPORT int64_t isobit_fault_race(int64_t count) {  // the sum is every thread's
    int64_t sum = 0;
#pragma omp parallel for num_threads(2) schedule(static)
    for (int64_t i = 0; i < count; i++) sum += i;
    return sum;
}
