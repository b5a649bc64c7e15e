// Products of many rows by AMX, whose tiles have 16 rows of 64 bytes.

#pragma once

#include "rows.h"

constexpr int64_t kPanel = 256;         // rows of a product
constexpr int64_t kPartSums = kPanel * kBlock;
constexpr int64_t kAheadBytes = 8192;  // of weights that are fetched before they are used, for few rows

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

constexpr bool kMayHaveTiles = true;

inline bool has_tiles() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
    return allowed;
}

struct Tiles {  // of 16 rows of 64 bytes, for as long as this lives
    Tiles() {
        alignas(64) uint8_t config[64] = {1};
        for (int tile = 0; tile < 8; ++tile) config[16 + 2 * tile] = kStep, config[48 + tile] = kTile;
        asm volatile("" ::"r"(config) : "memory");  // the compiler does not know how much of it is read
        _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
};

// c[16 * TILES, 32] (+)= a[16 * TILES, steps] @ b[steps, 32]. Tiles of a row of tiles follow each other. At each step so
// many `lines` of 64 bytes are fetched from `next` on, so that reading weights overlaps with computing.
template <class Number, int TILES>
void multiply_tiles(const Number* a, int64_t a_stride, const void* b, int64_t steps, float* c, bool is_first,
                    const char* next, int64_t lines) {
    constexpr int64_t kBytes = kBlock * 4, kTileBytes = kTile * kStep;
    const char *a0 = (const char*)a, *a1 = a0 + a_stride, *weights = (const char*)b;
    asm volatile("" ::: "memory");  // the compiler does not know what loads of tiles read
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, c, kBytes);
        _tile_loadd(1, c + kLane, kBytes);
        if (TILES == 2) {
            _tile_loadd(2, c + kTile * kBlock, kBytes);
            _tile_loadd(3, c + kTile * kBlock + kLane, kBytes);
        }
    }
    for (int64_t step = 0; step < steps; ++step, a0 += kTileBytes, a1 += kTileBytes, weights += kTile * kBytes) {
        for (int64_t line = 0; line < lines; ++line, next += 64) __builtin_prefetch(next, 0, 2);
        _tile_loadd(6, weights, kBytes);
        _tile_loadd(7, weights + kStep, kBytes);
        _tile_loadd(4, a0, kStep);
        if constexpr (sizeof(Number) == 1) {
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (TILES == 1) continue;
        _tile_loadd(5, a1, kStep);
        if constexpr (sizeof(Number) == 1) {
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        } else {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, kBytes);
    _tile_stored(1, c + kLane, kBytes);
    if (TILES == 2) {
        _tile_stored(2, c + kTile * kBlock, kBytes);
        _tile_stored(3, c + kTile * kBlock + kLane, kBytes);
    }
}

// Computes the product of `count` rows with each block of 32 outputs, or with PARTS of them that belong together, on all
// threads. `weights(block, part, first, some)` returns what `some` steps from `first` on are multiplied with, `at_once` or
// fewer; those that follow in memory are fetched meanwhile where `fetches`. `finish(block, r, sums)` is called once for each
// block and row; the sums of a row's parts are `kPartSums` apart.
template <int PARTS = 1, class Number, class Weights, class Finish>
void by_tiles(Rows<Number>& rows, int64_t count, int64_t blocks, int64_t at_once, bool fetches, const Output& to,
              Weights weights, Finish finish) {
    const int64_t tiles = (count + kTile - 1) / kTile, pairs = (tiles + 1) / 2;
    const int64_t step_bytes = kTile * kBlock * 4, lines = fetches ? (step_bytes / 64 + pairs - 1) / pairs : 0;
#pragma omp parallel
    {
        const Tiles config;
        alignas(64) float sums[PARTS * kPartSums];
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; ++block)
            for (int64_t i = 0; i < PARTS * rows.steps; i += at_once) {
                const int64_t part = i / rows.steps, first = i % rows.steps;
                const int64_t some = std::min(at_once, rows.steps - first);
                const bool is_last = i + some == PARTS * rows.steps;
                const char* from = (const char*)weights(block, part, first, some);
                const char* next = from + (pairs == 1 ? kAheadBytes : some * step_bytes);
                float* own = sums + part * kPartSums;
                for (int64_t tile = 0; tile < tiles; tile += 2, next += some * lines * 64) {
                    const int64_t row = tile * kTile, end = std::min(count, row + 2 * kTile);
                    if (is_last)
                        for (int64_t r = row; r < end; ++r) to.fetch(r, block * kBlock);
                    const auto multiply = tile + 1 < tiles ? multiply_tiles<Number, 2> : multiply_tiles<Number, 1>;
                    multiply(rows.at(row, first), rows.steps * kTile * kStep, from, some, own + row * kBlock, !first,
                             next, lines);
                    if (is_last)
                        for (int64_t r = row; r < end; ++r) finish(block, r, sums + r * kBlock);
                }
                i -= at_once - some;  // the next part begins anew
            }
    }
}
#else
constexpr bool kMayHaveTiles = false;
inline bool has_tiles() { return false; }

template <int PARTS = 1, class Number, class Weights, class Finish>
void by_tiles(Rows<Number>&, int64_t, int64_t, int64_t, bool, const Output&, Weights, Finish) {}
#endif
