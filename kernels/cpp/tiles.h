// Products of many rows by AMX, whose tiles have 16 rows of 64 bytes.

#pragma once

#include "rows.h"

constexpr int64_t kPanel = 256;         // rows of a product
constexpr int64_t kPartSums = kPanel * kBlock;
constexpr int64_t kAheadBytes = 2048;  // of weights that are fetched before they are used, for few rows

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

// What is fetched while tiles are multiplied, so that reading weights overlaps with computing: at each step so many `lines`
// of 64 bytes, from `next` on, and from step `turn` on from `then` on. Weights that are used `once` need not stay in the
// first cache.
struct Ahead {
    const char* next;
    int64_t lines, turn;
    const char* then;
    bool once;
};

// c[16 * TILES, 32] (+)= a[16 * TILES, steps] @ b[steps, 32]. Tiles of a row of tiles follow each other.
template <class Number, int TILES>
void multiply_tiles(const Number* a, int64_t a_stride, const void* b, int64_t steps, float* c, bool is_first,
                    Ahead ahead) {
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
        if (step == ahead.turn) ahead.next = ahead.then;
        for (int64_t line = 0; line < ahead.lines; ++line, ahead.next += 64) __builtin_prefetch(ahead.next, 0, 2);
        if (ahead.once) {
            _tile_stream_loadd(6, weights, kBytes);
            _tile_stream_loadd(7, weights + kStep, kBytes);
        } else {
            _tile_loadd(6, weights, kBytes);
            _tile_loadd(7, weights + kStep, kBytes);
        }
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

// Computes the product of `count` rows of x, in tiles of so many `steps`, with PARTS blocks of 32 outputs that belong
// together. `weights(part, first, some)` returns what `some` steps from `first` on are multiplied with, `at_once` or fewer;
// those that follow in memory are fetched meanwhile where `fetches`, and `then` (null: they) after the last. For each row
// `fetch(r)` is called before the last steps and `finish(r, sums)` after them; the sums of a row's parts are `kPartSums`
// apart.
template <int PARTS, class Number, class Weights, class Fetch, class Finish>
void block_by_tiles(const Number* x, int64_t steps, int64_t count, int64_t at_once, bool fetches, const void* then,
                    float* sums, Weights weights, Fetch fetch, Finish finish) {
    constexpr int64_t kStepBytes = kTile * kBlock * 4, kInTile = kTile * kStep / sizeof(Number);
    const int64_t tiles = (count + kTile - 1) / kTile, pairs = (tiles + 1) / 2;
    const int64_t lines = fetches ? (kStepBytes / 64 + pairs - 1) / pairs : 0;
    for (int64_t part = 0; part < PARTS; ++part)
        for (int64_t first = 0; first < steps; first += at_once) {
            const int64_t some = std::min(at_once, steps - first);
            const bool is_last = part == PARTS - 1 && first + some == steps;
            const char* from = (const char*)weights(part, first, some);
            const char* after = is_last && then ? (const char*)then : from + some * kStepBytes;
            const int64_t turn = pairs == 1 ? std::max<int64_t>(0, some - kAheadBytes / kStepBytes) : 0;
            Ahead ahead = {from + kAheadBytes, lines, turn, after, fetches && pairs == 1};
            float* own = sums + part * kPartSums;
            for (int64_t tile = 0; tile < tiles; tile += 2, ahead.then += some * lines * 64) {
                const int64_t row = tile * kTile, end = std::min(count, row + 2 * kTile);
                if (is_last)
                    for (int64_t r = row; r < end; ++r) fetch(r);
                const auto multiply = tile + 1 < tiles ? multiply_tiles<Number, 2> : multiply_tiles<Number, 1>;
                multiply(x + (tile * steps + first) * kInTile, steps * kTile * kStep, from, some, own + row * kBlock,
                         !first, ahead);
                if (is_last)
                    for (int64_t r = row; r < end; ++r) finish(r, sums + r * kBlock);
            }
        }
}
#else
constexpr bool kMayHaveTiles = false;
inline bool has_tiles() { return false; }
struct Tiles {
    Tiles() {}
};

template <int PARTS, class Number, class Weights, class Fetch, class Finish>
void block_by_tiles(const Number*, int64_t, int64_t, int64_t, bool, const void*, float*, Weights, Fetch, Finish) {}
#endif

// The same for each of `blocks` blocks, on all threads: `weights(block, part, first, some)`, `finish(block, r, sums)`.
template <int PARTS = 1, class Number, class Weights, class Finish>
void by_tiles(Rows<Number>& rows, int64_t count, int64_t blocks, int64_t at_once, bool fetches, const Output& to,
              Weights weights, Finish finish) {
#pragma omp parallel
    {
        const Tiles config;
        alignas(64) float sums[PARTS * kPartSums];
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; ++block)
            block_by_tiles<PARTS>(
                rows.at(0, 0), rows.steps, count, at_once, fetches, nullptr, sums,
                [&](int64_t part, int64_t first, int64_t some) { return weights(block, part, first, some); },
                [&](int64_t r) { to.fetch(r, block * kBlock); },
                [&](int64_t r, float* own) { finish(block, r, own); });
    }
}
