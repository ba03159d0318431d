// A program for `test_threads.py`: what `native/threads.h` promises, each as a line of its name and "held" or what was wrong.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <csignal>
#include <cstdlib>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "native/threads.h"

namespace {

void say(const char* name, bool held) { std::printf("%s %s\n", name, held ? "held" : "broken"), std::fflush(stdout); }

uint32_t random_below(uint32_t bound) {
    static uint64_t state = 1;
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return uint32_t(state >> 33) % bound;
}

// Every item of a range once, ranges that start at multiples of the grain, and for one item at a time their order.
bool covers(int64_t threads) {
    for (int round = 0; round < 500; round++) {
        const int64_t count = random_below(300), grain = 1 + random_below(20), pieces = 1 + random_below(5);
        std::vector<std::atomic<int>> hits(size_t(count) + 1);
        std::atomic<bool> aligned{true};
        for_ranges(threads, count, grain, [&](int64_t first, int64_t last) {
            if (first % grain != 0 || first >= last) aligned = false;
            for (int64_t i = first; i < last; i++) hits[size_t(i)]++;
        }, pieces);
        std::atomic<int64_t> begun{0};
        for_each_in_turn(threads, count, [&](int64_t i) { hits[size_t(i)]++, begun++; });
        for (int64_t i = 0; i < count; i++)
            if (hits[size_t(i)] != 2) return false;
        if (!aligned || hits[size_t(count)] != 0 || begun != count) return false;
    }
    return true;
}

// While the helper is busy with its first piece, this thread takes all others.
bool takes_what_a_late_helper_leaves() {
    std::atomic<int64_t> others{0};
    std::atomic<bool> late{false};
    const auto here = std::this_thread::get_id();
    share(2, 100, 2, 1, [&](int64_t, int64_t) {
        if (std::this_thread::get_id() == here) {
            others++;
            if (others < 50) std::this_thread::sleep_for(std::chrono::microseconds(200));  // so that the helper comes
        } else if (!late.exchange(true)) {
            while (others < 99) std::this_thread::yield();
        } else {
            std::abort();  // a helper has but one piece
        }
    });
    return others + late == 100;
}

// Returns only when two threads have come.
void meet() {
    std::atomic<int> there{0};
    share(2, 2, 2, 1, [&](int64_t, int64_t) {
        there++;
        while (there < 2) std::this_thread::yield();
    });
}

bool in_a_child() {
    meet();
    const pid_t child = fork();
    if (child == 0) {
        meet();
        _exit(7);
    }
    int status = 0;
    for (int tries = 0; tries < 400 && waitpid(child, &status, WNOHANG) == 0; tries++) usleep(10000);
    kill(child, 9);
    return WIFEXITED(status) && WEXITSTATUS(status) == 7;
}

bool of_many_callers() {
    std::atomic<bool> good{true};
    std::vector<std::thread> callers;
    for (int c = 0; c < 8; c++)
        callers.emplace_back([&] {
            for (int round = 0; round < 200; round++) {
                std::atomic<int64_t> sum{0};
                for_each(3, 64, [&](int64_t i) { sum += i; });
                if (sum != 2016) good = false;
            }
        });
    for (std::thread& caller : callers) caller.join();
    return good;
}

bool within_itself() {
    std::atomic<int64_t> sum{0};
    for_each(3, 10, [&](int64_t) { for_each(3, 10, [&](int64_t i) { sum += i; }); });
    return sum == 450;
}

}  // namespace

int main() {
    for (int64_t threads : {1, 2, 3, 9}) say("covers", covers(threads));
    say("late", takes_what_a_late_helper_leaves());
    say("fork", in_a_child());
    say("callers", of_many_callers());
    say("within", within_itself());
}
