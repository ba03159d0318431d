// How the operators share their work among threads.
//
// Each thread that calls has a team of helpers. Pieces of a range are taken by whoever comes: first of a thread's own
// part, so that it sees the same rows and panels in each call, then of the others'. A helper that the system has not
// woken yet, or has put aside for another process, holds nobody up before it begins: the others take its pieces.
// OpenMP waits for every thread at the end of each region, and how long its threads spin is settled when PyTorch is
// loaded. No result depends on which thread computes what.
#pragma once

#include <cstdint>

// Calls run(body, first, last) for pieces of `step` items that cover [0, count) once; `parts` parts are begun at once.
void share(int64_t threads, int64_t count, int64_t parts, int64_t step, void (*run)(const void*, int64_t, int64_t),
           const void* body);

template <class Body>
inline void share(int64_t threads, int64_t count, int64_t parts, int64_t step, const Body& body) {
    share(threads, count, parts, step,
          [](const void* given, int64_t first, int64_t last) { (*static_cast<const Body*>(given))(first, last); }, &body);
}

// body(first, last) for ranges that cover [0, count) once and start at multiples of `grain`, by up to `threads` threads,
// this one among them: one of so many `pieces` of a thread's part each. Returns when all are done.
template <class Body>
inline void for_ranges(int64_t threads, int64_t count, int64_t grain, const Body& body, int64_t pieces = 4) {
    if (threads > 1 && count > grain) {
        const int64_t grains = (count + grain - 1) / grain, step = (grains + threads * pieces - 1) / (threads * pieces);
        share(threads, count, threads, step * grain, body);
    } else if (count > 0) {
        body(int64_t(0), count);
    }
}

// body(i) for each of [0, count): items that take about as long as each other.
template <class Body>
inline void for_each(int64_t threads, int64_t count, const Body& body) {
    for_ranges(threads, count, 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) body(i);
    });
}

// body(i) for each of [0, count), one at a time and in their order: items that take differently long, the longest first.
template <class Body>
inline void for_each_in_turn(int64_t threads, int64_t count, const Body& body) {
    const auto one = [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) body(i);
    };
    if (threads > 1 && count > 1) share(threads, count, 1, 1, one);
    else one(0, count);
}
