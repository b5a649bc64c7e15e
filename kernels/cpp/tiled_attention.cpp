// Attention of BFloat16 over the paged KV cache by AMX tiles, of chunks and decodes alike. `tiled.py` loads this file.
//
// A task has up to 64 rows, each a query of one KV head, four tiles of 16. Keys and values are read where they lie, block
// of keys by block of keys, with the running maximum and sum of FlashAttention (arXiv 2205.14135).

#include <limits>

#include "exponential.h"
#include "tiles.h"

struct Cache {  // of one layer: keys and values [K, slots, D], whose heads are `head` numbers apart
    const Element *keys, *values;
    int64_t head, block_size, K, G, D;
};

struct Segments {  // of S requests: `length` rows of the batch from `row` on, the first of them at position `start`
    const int64_t *rows, *lengths, *starts;
    const int32_t* tables;  // [S, width]
    int64_t count, width;
};

struct Scores {
    float scale, cap;    // no cap where it is 0
    const float* sinks;  // [K * G], or null
    int64_t window;
};

#if defined(__AMX_BF16__)
namespace {

constexpr int64_t kKeys = 64, kPairs = 16;  // of a block, and pairs of keys that a tile of shares has
constexpr int64_t kTaskRows = 4 * kTile, kTileBytes = kTile * kStep, kInTile = kStep / sizeof(Element);
constexpr int64_t kFewRows = 8;
constexpr int64_t kAheadKeys = 64;  // keys that are fetched before they are used
constexpr float kNone = -std::numeric_limits<float>::infinity();

// What a thread needs for a task. Tiles have 16 lines each.
struct Buffers {
    std::vector<Line> queries, values, shares, out;
    alignas(64) float scores[4][kKeys][kTile];  // of a tile, by key
    alignas(64) float most[kTaskRows], sums[kTaskRows];
    alignas(64) int32_t own[kTaskRows];  // positions of the rows
    const Element* keys_of[kKeys / kTile];
    const Element* values_of[kKeys / kTile];

    void fit(int64_t D) {
        queries.resize(4 * D / kInTile * kTile);
        values.resize(kKeys * D / kInTile);
        shares.resize(4 * kKeys / kInTile * kTile);
        out.resize(4 * D);
    }
};

inline void transpose(__m512i* x) {  // 16 x 16 words
    __m512i t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            u[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            u[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; ++i) {
        const __m512i a = _mm512_shuffle_i32x4(u[i], u[4 + i], 0x88), b = _mm512_shuffle_i32x4(u[i], u[4 + i], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0xdd);
        x[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        x[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
        x[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
        x[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

inline void fetch_rows(const Element* rows, int64_t D) {
    const char* from = (const char*)rows;
    for (int64_t byte = 0; byte < kTile * D * int64_t(sizeof(Element)); byte += kStep)
        __builtin_prefetch(from + byte, 0, 2);
}

// scores[tile][16 keys][16 rows] of the keys at `keys`.
template <int TILES>
inline void score_keys(const Element* keys, int64_t D, int64_t key, Buffers& use) {
    const int64_t steps = D / kInTile, stride = D * sizeof(Element);
    const Line* queries = use.queries.data();
    _tile_zero(0);
    if (TILES > 1) _tile_zero(1);
    if (TILES > 2) _tile_zero(2);
    if (TILES > 3) _tile_zero(3);
    for (int64_t step = 0; step < steps; ++step) {
        _tile_loadd(4, keys + step * kInTile, stride);
        _tile_loadd(5, queries + step * kTile, kStep);
        _tile_dpbf16ps(0, 4, 5);
        if (TILES > 1) {
            _tile_loadd(6, queries + (steps + step) * kTile, kStep);
            _tile_dpbf16ps(1, 4, 6);
        }
        if (TILES > 2) {
            _tile_loadd(7, queries + (2 * steps + step) * kTile, kStep);
            _tile_dpbf16ps(2, 4, 7);
        }
        if (TILES > 3) {
            _tile_loadd(5, queries + (3 * steps + step) * kTile, kStep);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    _tile_stored(0, use.scores[0][key], kStep);
    if (TILES > 1) _tile_stored(1, use.scores[1][key], kStep);
    if (TILES > 2) _tile_stored(2, use.scores[2][key], kStep);
    if (TILES > 3) _tile_stored(3, use.scores[3][key], kStep);
}

// e^x of numbers up to 0, to some units in the last place, as in `exponential.h`. Below -87 it is 0.
inline Vector powers(Vector x) {
    const __m512 least = _mm512_set1_ps(-87.0f), clamped = _mm512_max_ps((__m512)x, least);
    const __m512 n = _mm512_roundscale_ps(clamped * _mm512_set1_ps(1.44269504f), 8);
    const Vector p = small_exponential((Vector)clamped - (Vector)n * 0.693359375f + (Vector)n * 2.12194440e-4f);
    return (Vector)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, least, _CMP_GT_OQ), (__m512)p, n);
}

inline Vector larger(Vector a, Vector b) { return (Vector)_mm512_max_ps((__m512)a, (__m512)b); }

// Scores s as cap * tanh(s / cap), with tanh(s) = 1 - 2 / (e^2s + 1) of |s|.
inline Vector capped(Vector score, float cap) {
    const Vector size = (Vector)((Codes)score & 0x7fffffff), power = powers(size * (-2.0f / cap));
    const Vector found = cap * (1.0f - power) / (1.0f + power);
    return (Vector)((Codes)found | ((Codes)score & 0x80000000u));
}

// Scales, caps and hides a tile's scores of `count` keys from `position` on. Returns the largest of each row.
template <bool CAPPED, bool MASKED>
Vector finish_scores(float (*scores)[kTile], int64_t position, int64_t count, const int32_t* own, const Scores& how) {
    const __m512i positions = _mm512_load_si512(own);
    const int64_t window = std::min<int64_t>(how.window, std::numeric_limits<int32_t>::max() / 2);
    const __m512i before = _mm512_sub_epi32(positions, _mm512_set1_epi32(window));
    Vector highest = Vector{} + kNone;
    for (int64_t j = 0; j < count; ++j) {
        Vector score = read(scores[j]) * how.scale;
        if constexpr (CAPPED) score = capped(score, how.cap);
        if constexpr (MASKED) {
            const __m512i key = _mm512_set1_epi32(position + j);
            const auto hidden = _mm512_cmpgt_epi32_mask(key, positions) | _mm512_cmple_epi32_mask(key, before);
            score = (Vector)_mm512_mask_mov_ps((__m512)score, hidden, _mm512_set1_ps(kNone));
        }
        std::memcpy(scores[j], &score, kStep);
        highest = larger(highest, score);
    }
    return highest;
}

// Makes shares of a tile's scores, in pairs of keys, rounded, [rows, keys]. Returns whether what was summed before has to
// be multiplied by `kept`.
bool weigh(int64_t tile, int64_t position, int64_t count, const Scores& how, Buffers& use, float* kept) {
    float(*scores)[kTile] = use.scores[tile];
    float *most = use.most + tile * kTile, *sums = use.sums + tile * kTile;
    const int32_t* own = use.own + tile * kTile;
    const bool masked = position + count - 1 > own[0] || position + how.window <= own[kTile - 1];
    const auto finish = how.cap == 0.0f ? (masked ? finish_scores<false, true> : finish_scores<false, false>)
                                        : (masked ? finish_scores<true, true> : finish_scores<true, false>);
    const Vector before = read(most), highest = larger(before, finish(scores, position, count, own, how));
    const Vector at = larger(highest, Vector{} + -std::numeric_limits<float>::max());  // of a row that sees none yet
    const Vector factor = powers(before - at);
    const int64_t whole = (count + kInTile - 1) / kInTile * kInTile;
    std::fill(scores[count], scores[0] + whole * kTile, kNone);
    Vector sum = {};
    for (int64_t first = 0; first < whole; first += kInTile) {
        __m512i pairs[kPairs];
        for (int64_t i = 0; i < kPairs; ++i) {
            const float(*pair)[kTile] = scores + first + 2 * i;
            const Vector low = powers(read(pair[0]) - at), high = powers(read(pair[1]) - at);
            sum += low + high;
            pairs[i] = (__m512i)(((Codes)low + 0x8000) >> 16 | (((Codes)high + 0x8000) & 0xffff0000u));
        }
        transpose(pairs);
        Line* to = use.shares.data() + (tile * kKeys + first) / kInTile * kTile;
        for (int64_t i = 0; i < kPairs; ++i) std::memcpy(to + i, &pairs[i], kStep);
    }
    sum += read(sums) * factor;
    std::memcpy(sums, &sum, kStep);
    std::memcpy(most, &highest, kStep);
    std::memcpy(kept, &factor, kStep);
    return _mm512_cmpneq_ps_mask((__m512)factor, _mm512_set1_ps(1.0f)) != 0;
}

// As `weigh`, of the only tile of a task with few rows: row by row, so that the rows that are not there cost nothing.
bool weigh_few(int64_t rows, int64_t position, int64_t count, const Scores& how, Buffers& use, float* kept) {
    const int64_t whole = (count + kInTile - 1) / kInTile * kInTile;
    const int64_t window = std::min<int64_t>(how.window, std::numeric_limits<int32_t>::max() / 2);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    Vector by_row[kFewRows][kKeys / kTile], most[kFewRows];
    for (int64_t r = 0; r < rows; ++r) most[r] = Vector{} + kNone;
    for (int64_t key = 0; key < whole; key += kTile) {
        __m512i turned[kTile];
        for (int64_t j = 0; j < kTile; ++j) turned[j] = load<__m512i>(use.scores[0][key + j]);
        transpose(turned);
        const __m512i keys = _mm512_add_epi32(_mm512_set1_epi32(position + key), lanes);
        for (int64_t r = 0; r < rows; ++r) {
            Vector score = (Vector)turned[r] * how.scale;
            if (how.cap != 0.0f) score = capped(score, how.cap);
            const auto hidden = _mm512_cmpgt_epi32_mask(keys, _mm512_set1_epi32(use.own[r])) |
                                _mm512_cmple_epi32_mask(keys, _mm512_set1_epi32(use.own[r] - window));
            score = (Vector)_mm512_mask_mov_ps((__m512)score, hidden, _mm512_set1_ps(kNone));
            by_row[r][key / kTile] = score;
            most[r] = larger(most[r], score);
        }
    }
    bool changed = false;
    for (int64_t r = 0; r < rows; ++r) {
        const float before = use.most[r], highest = std::max(before, _mm512_reduce_max_ps((__m512)most[r]));
        const Vector at = Vector{} + std::max(highest, -std::numeric_limits<float>::max());
        Vector sum = {};
        for (int64_t key = 0; key < whole; key += kInTile) {
            const Vector low = powers(by_row[r][key / kTile] - at), high = powers(by_row[r][key / kTile + 1] - at);
            sum += low + high;
            const auto both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
            std::memcpy(use.shares.data() + key / kInTile * kTile + r, &both, kStep);
        }
        kept[r] = powers(Vector{} + before - at)[0];
        changed |= kept[r] != 1.0f;
        use.sums[r] = use.sums[r] * kept[r] + _mm512_reduce_add_ps((__m512)sum);
        use.most[r] = highest;
    }
    return changed;
}

// Pairs the values of neighbouring keys, number by number. Of 32 numbers, the first tile has 0-3, 8-11, 16-19 and 24-27.
void pair_values(int64_t count, int64_t D, Buffers& use) {
    const int64_t whole = (count + kInTile - 1) / kInTile * kInTile, tiles = D / kTile;
    for (int64_t key = 0; key < whole; key += 2) {
        const Element* from = use.values_of[std::min(key, count - 1) / kTile] + key % kTile * D;
        Line* to = use.values.data() + (key / kInTile * tiles) * kTile + key % kInTile / 2;
        for (int64_t d = 0; d < D; d += kInTile, to += 2 * kTile) {
            __m512i a = {}, b = {};
            if (key < count) a = _mm512_loadu_si512(from + d);
            if (key + 1 < count) b = _mm512_loadu_si512(from + D + d);
            const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
            std::memcpy(to, &low, kStep);
            std::memcpy(to + kTile, &high, kStep);
        }
    }
}

// out[16 rows, D] (+)= shares[16 rows, keys] @ values[keys, D], two or four tiles of numbers at a time.
void add_values(int64_t tile, int64_t count, int64_t D, bool is_first, Buffers& use) {
    const int64_t tiles = D / kTile, steps = (count + kInTile - 1) / kInTile;
    const Line* shares = use.shares.data() + tile * kKeys / kInTile * kTile;
    for (int64_t t = 0; t < tiles; t += 4) {
        Line* out = use.out.data() + (tile * tiles + t) * kTile;
        const bool four = t + 2 < tiles;
        if (is_first) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, out, kStep);
            _tile_loadd(1, out + kTile, kStep);
            if (four) {
                _tile_loadd(2, out + 2 * kTile, kStep);
                _tile_loadd(3, out + 3 * kTile, kStep);
            }
        }
        for (int64_t step = 0; step < steps; ++step) {
            const Line* values = use.values.data() + (step * tiles + t) * kTile;
            _tile_loadd(4, shares + step * kTile, kStep);
            _tile_loadd(5, values, kStep);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, values + kTile, kStep);
            _tile_dpbf16ps(1, 4, 6);
            if (!four) continue;
            _tile_loadd(7, values + 2 * kTile, kStep);
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(5, values + 3 * kTile, kStep);
            _tile_dpbf16ps(3, 4, 5);
        }
        _tile_stored(0, out, kStep);
        _tile_stored(1, out + kTile, kStep);
        if (four) {
            _tile_stored(2, out + 2 * kTile, kStep);
            _tile_stored(3, out + 3 * kTile, kStep);
        }
    }
}

// Rows [first, first + rows) of a segment's length * G of a KV head, with queries and outputs [length, K, G, D].
void attend_rows(const Cache& cache, int64_t head, const int32_t* table, int64_t start, int64_t first, int64_t rows,
                 const Scores& how, const Element* queries, Element* out, Buffers& use) {
    const int64_t G = cache.G, D = cache.D, steps = D / kInTile, tiles = (rows + kTile - 1) / kTile;
    const auto at = [&](int64_t r) { return ((first + r) / G * cache.K + head) * G * D + (first + r) % G * D; };
    for (int64_t tile = 0; tile < tiles; ++tile)
        for (int64_t step = 0; step < steps; ++step) {
            __m512i words[kTile] = {};
            for (int64_t r = tile * kTile; r < std::min(rows, (tile + 1) * kTile); ++r)
                words[r % kTile] = _mm512_loadu_si512(queries + at(r) + step * kInTile);
            transpose(words);
            std::memcpy(use.queries.data() + (tile * steps + step) * kTile, words, kTileBytes);
        }
    for (int64_t r = 0; r < tiles * kTile; ++r) {
        const int64_t row = first + std::min(r, rows - 1);
        use.own[r] = start + row / G;
        use.most[r] = how.sinks ? how.sinks[head * G + row % G] : kNone;
        use.sums[r] = how.sinks ? 1.0f : 0.0f;
    }
    const int64_t end = start + (first + rows - 1) / G + 1;
    const int64_t begin = std::max<int64_t>(0, use.own[0] - how.window + 1) / kTile * kTile;
    const auto slot_of = [&](int64_t position) {
        return (table[position / cache.block_size] * cache.block_size + position % cache.block_size) * D;
    };
    const Element *keys = cache.keys + head * cache.head, *values = cache.values + head * cache.head;
    const auto score = tiles == 1 ? score_keys<1> : tiles == 2 ? score_keys<2> : tiles == 3 ? score_keys<3> : score_keys<4>;
    for (int64_t position = begin; position < end; position += kKeys) {
        const int64_t count = std::min(kKeys, end - position);
        for (int64_t key = 0; key < count; key += kTile) {
            const int64_t slot = slot_of(position + key), ahead = position + key + kAheadKeys;
            if (ahead < end) fetch_rows(keys + slot_of(ahead), D);
            fetch_rows(use.values_of[key / kTile] = values + slot, D);
            score(keys + slot, D, key, use);
        }
        asm volatile("" ::: "memory");  // the compiler does not know what tiles read and write
        pair_values(count, D, use);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            alignas(64) float kept[kTile];
            const bool changed = rows <= kFewRows ? weigh_few(rows, position, count, how, use, kept)
                                                  : weigh(tile, position, count, how, use, kept);
            if (changed && position > begin)
                for (int64_t t = 0; t < D / kTile; ++t)
                    for (int64_t r = 0; r < std::min(kTile, rows - tile * kTile); ++r) {
                        Line* line = use.out.data() + (tile * D / kTile + t) * kTile + r;
                        const Vector scaled = load<Vector>(line) * kept[r];
                        std::memcpy(line, &scaled, kStep);
                    }
            asm volatile("" ::: "memory");
            add_values(tile, count, D, position == begin, use);
        }
        asm volatile("" ::: "memory");
    }
    const __m512i low_half = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high_half = _mm512_add_epi32(low_half, _mm512_set1_epi32(8));
    for (int64_t r = 0; r < rows; ++r) {
        const Line* line = use.out.data() + r / kTile * D + r % kTile;
        const float inverse = 1.0f / use.sums[r];
        for (int64_t d = 0; d < D; d += kInTile, line += 2 * kTile) {
            const __m512 low = (__m512)(load<Vector>(line) * inverse), high = (__m512)(load<Vector>(line + kTile) * inverse);
            narrow((Vector)_mm512_permutex2var_ps(low, low_half, high), out + at(r) + d);
            narrow((Vector)_mm512_permutex2var_ps(low, high_half, high), out + at(r) + d + kLane);
        }
    }
}

struct Task {
    int64_t segment, head, first;
};

}  // namespace
#endif

extern "C" {

int64_t multiplies_tiles() { return kMayHaveTiles && kInWord == 2 && has_tiles(); }

// Attention of all rows of a batch, queries and outputs [T, K, G, D]. A row attends to its own position and to at most
// `window` - 1 before it. D is a multiple of 32, and the blocks' size of 16.
void attend(const Cache* cache, const Segments* segments, const Scores* how, const Element* queries, Element* out) {
#if defined(__AMX_BF16__)
    if constexpr (kInWord == 2) {
        static thread_local std::vector<Task> tasks;
        tasks.clear();
        for (int64_t s = 0; s < segments->count; ++s) {
            const int64_t blocks = (segments->lengths[s] * cache->G + kTaskRows - 1) / kTaskRows;
            for (int64_t block = blocks; block-- > 0;)  // those with most keys first
                for (int64_t k = 0; k < cache->K; ++k) tasks.push_back({s, k, block * kTaskRows});
        }
        const Task* all = tasks.data();
        const int64_t count = tasks.size();
#pragma omp parallel
        {
            const Tiles config;
            static thread_local Buffers use;
            use.fit(cache->D);
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < count; ++i) {
                const int64_t s = all[i].segment, first = all[i].first;
                const int64_t rows = std::min(kTaskRows, segments->lengths[s] * cache->G - first);
                const int64_t offset = segments->rows[s] * cache->K * cache->G * cache->D;
                attend_rows(*cache, all[i].head, segments->tables + s * segments->width, segments->starts[s], first, rows,
                            *how, queries + offset, out + offset, use);
            }
        }
    }
#endif
}

}  // extern "C"
