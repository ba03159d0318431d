// AMX's tiles in plain C++, for a processor that has AVX-512 and no AMX, and for sanitizers, which do not see what tile
// instructions read: forced into every file of a library under test (`sanitizers.py`). Its processor then has AMX.
#pragma once

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
namespace emulated {

struct Tiles {
    uint8_t row_bytes[8], rows[8];
    alignas(64) uint8_t data[8][16][64];
};
inline thread_local Tiles tiles;

inline void loadconfig(const void* config) {
    const uint8_t* bytes = (const uint8_t*)config;
    for (int i = 0; i < 8; i++) tiles.row_bytes[i] = bytes[16 + 2 * i], tiles.rows[i] = bytes[48 + i];
    std::memset(tiles.data, 0, sizeof tiles.data);
}
inline void release() { std::memset(&tiles, 0xff, sizeof tiles); }
inline void zero(int tile) { std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]); }
inline void loadd(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int r = 0; r < tiles.rows[tile]; r++)
        std::memcpy(tiles.data[tile][r], (const uint8_t*)from + r * stride, tiles.row_bytes[tile]);
}
inline void stored(int tile, void* to, int64_t stride) {
    for (int r = 0; r < tiles.rows[tile]; r++)
        std::memcpy((uint8_t*)to + r * stride, tiles.data[tile][r], tiles.row_bytes[tile]);
}
// `tdp32-v1` of a row of A and 16 columns of B; with FTZ and DAZ, which the caller has set.
inline void dpbf16ps(int sums, int left, int right) {
    for (int r = 0; r < tiles.rows[sums]; r++) {
        __m512 chain[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int i = 0; i < tiles.row_bytes[left] / 4; i++) {
            uint32_t pair;
            std::memcpy(&pair, tiles.data[left][r] + 4 * i, 4);
            const __m512i b = _mm512_loadu_si512(tiles.data[right][i]), a = _mm512_set1_epi32((int)pair);
            const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
            chain[0] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                                       _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), chain[0]);
            chain[1] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, upper)),
                                       _mm512_castsi512_ps(_mm512_and_si512(b, upper)), chain[1]);
        }
        float* c = (float*)tiles.data[sums][r];
        _mm512_storeu_ps(c, _mm512_add_ps(_mm512_loadu_ps(c), _mm512_add_ps(chain[0], chain[1])));
    }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::loadconfig
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::loadd
#define _tile_stored emulated::stored
#define _tile_dpbf16ps emulated::dpbf16ps
#endif

// What `ordered.cpp` asks the processor and the kernel: bits 22 and 24 of leaf 7 are AMX's.
namespace emulated {
inline int cpuid_count(unsigned leaf, unsigned part, unsigned* a, unsigned* b, unsigned* c, unsigned* d) {
    const int found = __get_cpuid_count(leaf, part, a, b, c, d);
    if (leaf == 7 && part == 0) *d |= 1u << 22 | 1u << 24;
    return found;
}
inline long granted(long, long, long) { return 0; }
}  // namespace emulated
#define __get_cpuid_count emulated::cpuid_count
#define syscall emulated::granted
