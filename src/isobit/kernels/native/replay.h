// Operators that can be called from a list (`replay.cpp`): each argument is a word of eight bytes.
#pragma once

#include <type_traits>
#include <utility>

#include "native/native.h"

template <class T>
inline T of_word(int64_t word) {
    static_assert(sizeof(T) == sizeof word);
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

template <class R, class... A, size_t... I>
inline int64_t call(R (*function)(A...), const int64_t* words, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<R>) return function(of_word<A>(words[I])...), 0;
    else return function(of_word<A>(words[I])...);
}
template <class R, class... A>
inline int64_t call(R (*function)(A...), const int64_t* words) {
    return call(function, words, std::index_sequence_for<A...>());
}

// Exports the operator once more, as `name`_replayed. All that it reads must be in its words, in structs and tensors that
// they are the addresses of, or in tensors that these have the addresses of.
#define REPLAYED(name) EXPORT int64_t name##_replayed(const int64_t* words) { return call(name, words); }
