// The teams of `threads.h`.
#include "native/threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <system_error>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

// A thread that waits spins first: one region follows another within microseconds, and to wake a thread takes as long.
// A helper without work gives its core away at every look at the clock, so that other processes, and PyTorch's threads,
// have it at once. The thread that called keeps its own, or it would stand behind them in each region; it sleeps soon.
constexpr std::chrono::microseconds WITHOUT_WORK{1000}, FOR_HELPERS{50};

// How often this process was forked: a child has no helpers of its parent's teams.
std::atomic<int64_t> forks{0};
[[maybe_unused]] const int counting = pthread_atfork(nullptr, nullptr, [] { forks++; });

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

thread_local bool sharing = false;  // what is shared does not share again

class Team {
public:
    const int64_t forked = forks;

    ~Team() {
        stops = true;
        begin();
        for (std::thread& helper : helpers) helper.join();
    }

    void share(int64_t threads, int64_t count, int64_t among, int64_t size, void (*call)(const void*, int64_t, int64_t),
               const void* given) {
        hire(threads - 1);
        members = threads, step = size, run = call, body = given;
        if (int64_t(parts.size()) < among) parts = std::vector<Part>(among);
        used = among;
        const int64_t pieces = (count + size - 1) / size;
        for (int64_t i = 0; i < among; i++) {
            parts[i].next = pieces * i / among * size;
            parts[i].end = std::min(pieces * (i + 1) / among * size, count);
        }
        begin();
        work(0);
        region++;  // closed: who comes now finds it so
        await_helpers();
    }

private:
    struct alignas(64) Part {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };

    // Of a region: written while none is open and no helper is `active`.
    std::vector<Part> parts;
    int64_t used = 0, members = 0, step = 0;
    void (*run)(const void*, int64_t, int64_t) = nullptr;
    const void* body = nullptr;

    std::vector<std::thread> helpers;
    alignas(64) std::atomic<int64_t> region{0};  // odd while one is open
    std::atomic<bool> stops{false};
    alignas(64) std::atomic<int64_t> active{0}, asleep{0};
    std::atomic<bool> awaited{false};
    std::mutex mutex;
    std::condition_variable begins, ends;

    void hire(int64_t wanted) {
        while (int64_t(helpers.size()) < wanted) {
            try {
                helpers.emplace_back([this, index = int64_t(helpers.size()) + 1, seen = region.load()] { help(index, seen); });
            } catch (const std::system_error&) {  // no more threads: those that there are take all pieces
                return;
            }
        }
    }

    void work(int64_t index) {
        for (int64_t i = 0; i < used; i++) {
            Part& part = parts[(index + i) % used];
            for (int64_t first; (first = part.next.fetch_add(step)) < part.end;)
                run(body, first, std::min(first + step, part.end));
        }
    }

    void begin() {
        region++;
        if (asleep) {
            std::lock_guard<std::mutex> lock(mutex);
            begins.notify_all();
        }
    }

    void help(int64_t index, int64_t seen) {
        sharing = true;
        const auto begun = [&] {
            const int64_t now = region;
            return now % 2 == 1 && now != seen;
        };
        for (;;) {
            if (!spin(begun, WITHOUT_WORK, true)) {
                std::unique_lock<std::mutex> lock(mutex);
                asleep++;
                begins.wait(lock, begun);
                asleep--;
            }
            if (stops) return;
            seen = region;
            active++;
            if (seen % 2 == 1 && region == seen && index < members) work(index);  // else it is closed already
            if (--active == 0 && awaited) {
                std::lock_guard<std::mutex> lock(mutex);
                ends.notify_one();
            }
        }
    }

    void await_helpers() {
        const auto all_out = [&] { return active == 0; };
        if (spin(all_out, FOR_HELPERS, false)) return;
        std::unique_lock<std::mutex> lock(mutex);
        awaited = true;
        ends.wait(lock, all_out);
        awaited = false;
    }

    // Whether `over()` came within the time that it is worth to spin.
    template <class Over>
    static bool spin(const Over& over, std::chrono::microseconds most, bool yields) {
        if (over()) return true;
        const auto stop = Clock::now() + most;
        do {
            for (int i = 0; i < 16; i++) {
                if (over()) return true;
                pause();
            }
            if (yields) std::this_thread::yield();
        } while (Clock::now() < stop);
        return over();
    }
};

Team& own_team() {
    static thread_local std::unique_ptr<Team> team;
    if (team && team->forked != forks) (void)team.release();  // its helpers are the parent's
    if (!team) team = std::make_unique<Team>();
    return *team;
}

}  // namespace

void share(int64_t threads, int64_t count, int64_t parts, int64_t step, void (*run)(const void*, int64_t, int64_t),
           const void* body) {
    if (sharing) return run(body, 0, count);
    sharing = true;
    own_team().share(threads, count, parts, step, run, body);
    sharing = false;
}
