// Attention on a CPU over the paged KV cache, for queries of `Element`. `cpp.py` loads this file and calls it.
//
// Sizes and flags as in operators.cpp.

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "numbers.h"
#include "operators.h"

namespace {

// A vector register of floats. GCC and Clang both know these vectors.
#ifdef __AVX512F__
constexpr int64_t kLanes = 16, kVectors = 4;
#else
constexpr int64_t kLanes = 8, kVectors = 2;
#endif
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

template <class C>
inline Vector load(const C* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<Vector*>(to) = x; }

constexpr int64_t kStep = kLanes * kInWord;  // elements in a register

typedef uint32_t Bits __attribute__((vector_size(sizeof(Vector))));

// Where the element at `d` of a row is that lies in the order of `numbers_of` for BFloat16.
inline int64_t place_of(int64_t d) { return d / kStep * kStep + d % kInWord * kLanes + d % kStep / kInWord; }

// Returns register `i` of a row's numbers as floats. Of BFloat16 every other register has the even numbers, and the next
// the odd ones between them.
inline Vector numbers_of(const float* row, int64_t i) { return load(row + i * kLanes); }

inline Vector numbers_of(const BFloat16* row, int64_t i) {
    const Bits words = (Bits)load(row + i / 2 * 2 * kLanes);
    return (Vector)(i % 2 ? words & 0xffff0000u : words << 16);
}

#ifdef __AVX512BW__
inline Vector numbers_of(const Int8* row, int64_t i) {
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)row + i)));
}

// As a half, whose exponent has a bias of 15, the same bits are a number 256 times smaller.
inline Vector numbers_of(const Float8* row, int64_t i) {
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)row + i)), 7);
    return (Vector)_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(~0x4000))) * 256.0f;
}
#else
template <class C>
inline Vector numbers_of(const C* row, int64_t i) {
    float x[kLanes];
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane) x[lane] = row[i * kLanes + lane];
    return load(x);
}
#endif

// Adds to each lane the one that is WIDTH lanes away: of `a` where the lane's bit WIDTH is 0, else of `b`.
template <int64_t WIDTH, int... I>
inline Vector fold(Vector a, Vector b, std::integer_sequence<int, I...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, (I & WIDTH ? kLanes + I : I)...) +
           __builtin_shufflevector(a, b, (I & WIDTH ? kLanes + I - WIDTH : I + WIDTH)...);
#else
    typedef int Lanes __attribute__((vector_size(kLanes * sizeof(int))));
    return __builtin_shuffle(a, b, Lanes{(I & WIDTH ? kLanes + I : I)...}) +
           __builtin_shuffle(a, b, Lanes{(I & WIDTH ? kLanes + I - WIDTH : I + WIDTH)...});
#endif
}

// Lane i of the result is the sum of x[i]'s lanes. Overwrites x[kLanes].
template <int64_t WIDTH = kLanes / 2>
inline Vector sum_lanes(Vector* x) {
    if constexpr (WIDTH == 0) {
        return x[0];
    } else {
#pragma GCC unroll 16
        for (int64_t i = 0; i < WIDTH; ++i)
            x[i] = fold<WIDTH>(x[i], x[i + WIDTH], std::make_integer_sequence<int, kLanes>{});
        return sum_lanes<WIDTH / 2>(x);
    }
}

// The rows at `offsets` of a cache: asks for those of a block before they are read. The processor's own prefetch ends
// with a page of memory.
template <class C>
inline void prefetch(const C* cache, const int64_t* offsets, int64_t D) {
    const int64_t width = row_width<C>(D);
    for (int64_t j = 0; j < kLanes; ++j)
        for (int64_t d = 0; d < width; d += 64 / sizeof(C)) __builtin_prefetch(cache + offsets[j] + d);
}

// Calls `use` with the slot of each of the positions begin .. end - 1 of a request with blocks `table`.
template <class Use>
inline void for_slots(const int32_t* table, int64_t block_size, int64_t begin, int64_t end, Use use) {
    for (int64_t position = begin; position < end;) {
        const int64_t offset = position % block_size, count = std::min(block_size - offset, end - position);
        const int64_t first = table[position / block_size] * block_size + offset;
        for (int64_t slot = first; slot < first + count; ++slot) use(slot);
        position += count;
    }
}

// What a thread needs for one KV head of a decode.
struct DecodeBuffers {
    std::vector<float> scores, out;
    std::vector<Element> copy;
    int64_t steps[kLanes];
};

// kLanes keys as elements, and where each begins: the cache's, or a copy that all queries of a KV head read.
typedef std::pair<const Element*, const int64_t*> Block;

// The copy of a key of 8 bits has two registers of its numbers, side by side, as each register of BFloat16.
template <class C>
inline Block read_keys(const C* cache, const int64_t* offsets, int64_t D, DecodeBuffers& use) {
    if constexpr (kHasScale<C>) {
        for (int64_t j = 0; j < kLanes; ++j) {
            const C* row = cache + offsets[j];
            Element* to = use.copy.data() + j * D;
            int64_t d = 0;
            for (; d + kStep <= D; d += kStep) {
                Vector x = numbers_of(row + d, 0);
                if (kInWord == 2) x = (Vector)((Bits)x >> 16 | ((Bits)numbers_of(row + d, 1) & 0xffff0000u));
                *reinterpret_cast<Vector*>(to + d) = x;
            }
            for (; d < D; ++d) to[d] = float(row[d]);
            use.steps[j] = j * D;
        }
        return {use.copy.data(), use.steps};
    } else {
        return {cache, offsets};
    }
}

// scores[kLanes] of one query over the keys at `offsets`.
inline void score_block(const Element* query, const Element* keys, const int64_t* offsets, int64_t D, Vector scale,
                        float* scores) {
    const int64_t whole = D / kStep * kStep;
    Vector sums[kLanes] = {};
    for (int64_t d = 0; d < whole; d += kStep) {
        const Vector part = load(query + d);
#pragma GCC unroll 16
        for (int64_t j = 0; j < kLanes; ++j) sums[j] = add_product(sums[j], part, load(keys + offsets[j] + d));
    }
    Vector sum = sum_lanes(sums);
    if (whole < D)
        for (int64_t j = 0; j < kLanes; ++j)
            for (int64_t d = whole; d < D; ++d) sum[j] += float(query[d]) * float(keys[offsets[j] + d]);
    store(scores, sum * scale);
}

// Adds to QUERIES rows of `out`, which are D apart, REGISTERS of the values at `offsets`, each times its score. Scores of
// two queries are `width` apart.
template <int64_t QUERIES, int64_t REGISTERS, class C>
inline void add_values(const C* values, const int64_t* offsets, const float* scores, int64_t width, float* out,
                       int64_t D) {
    Vector sums[QUERIES][REGISTERS];
#pragma GCC unroll 4
    for (int64_t g = 0; g < QUERIES; ++g)
#pragma GCC unroll 4
        for (int64_t i = 0; i < REGISTERS; ++i) sums[g][i] = load(out + g * D + i * kLanes);
    for (int64_t j = 0; j < kLanes; ++j)
#pragma GCC unroll 4
        for (int64_t i = 0; i < REGISTERS; ++i) {
            const Vector x = numbers_of(values + offsets[j], i);
#pragma GCC unroll 4
            for (int64_t g = 0; g < QUERIES; ++g) sums[g][i] += scores[g * width + j] * x;
        }
#pragma GCC unroll 4
    for (int64_t g = 0; g < QUERIES; ++g)
#pragma GCC unroll 4
        for (int64_t i = 0; i < REGISTERS; ++i) store(out + g * D + i * kLanes, sums[g][i]);
}

constexpr int64_t kQueries = kLanes / 4;  // whose sums fit into the registers

// As `add_values`, over all of D, for G queries.
template <int64_t QUERIES = kQueries, class C>
inline void add_block(const C* values, const int64_t* offsets, const float* scores, int64_t width, int64_t G, int64_t D,
                      float* out) {
    for (; G >= QUERIES; G -= QUERIES, scores += QUERIES * width, out += QUERIES * D) {
        int64_t d = 0;
        for (; d + 4 * kLanes <= D; d += 4 * kLanes)
            add_values<QUERIES, 4>(values + d, offsets, scores, width, out + d, D);
        for (; d + kStep <= D; d += kStep)
            add_values<QUERIES, kInWord>(values + d, offsets, scores, width, out + d, D);
        for (; d < D; ++d)
            for (int64_t g = 0; g < QUERIES; ++g)
                for (int64_t j = 0; j < kLanes; ++j)
                    out[g * D + d] += scores[g * width + j] * float(values[offsets[j] + d]);
    }
    if constexpr (QUERIES > 1) add_block<QUERIES - 1>(values, offsets, scores, width, G, D, out);
}

// The queries of one KV head of one decode over the keys at `offsets` of `keys` and `values`, kLanes keys at a time.
// 2 * kLanes further offsets follow the last key's, all readable.
template <class C>
void attend_head(const Element* q, const C* keys, const C* values, const int64_t* offsets, int64_t num_keys, int64_t G,
                 int64_t D, float scale, DecodeBuffers& use, Element* out) {
    const int64_t width = padded(num_keys, kLanes);
    const int64_t whole = D / kStep * kStep;
    use.scores.resize(G * width);
    use.out.assign(G * D, 0.0f);
    if (kHasScale<C>) {
        use.copy.resize((kLanes + G) * D);
        Element* queries = use.copy.data() + kLanes * D;
        std::copy(q, q + G * D, queries);
        for (int64_t g = 0; g < G; ++g)
            for (int64_t d = 0; d < whole; ++d)
                queries[g * D + d] = float(q[g * D + place_of(d)]);
        q = queries;
    }
    for (int64_t first = 0; first < num_keys; first += kLanes) {
        prefetch(keys, offsets + first + kLanes, D);
        const auto [from, at] = read_keys(keys, offsets + first, D, use);
        Vector scales;
        for (int64_t j = 0; j < kLanes; ++j) scales[j] = scale * row_scale(keys + offsets[first + j], D);
        for (int64_t g = 0; g < G; ++g)
            score_block(q + g * D, from, at, D, scales, use.scores.data() + g * width + first);
    }
    for (int64_t g = 0; g < G; ++g) {
        float* row = use.scores.data() + g * width;
        float most = -std::numeric_limits<float>::infinity(), sum = 0.0f;
#pragma omp simd reduction(max : most)
        for (int64_t j = 0; j < num_keys; ++j) most = std::max(most, row[j]);
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < num_keys; ++j) sum += row[j] = exponential(row[j] - most);
        const float inverse = 1.0f / sum;
        for (int64_t j = 0; j < num_keys; ++j) row[j] *= inverse;
        std::fill(row + num_keys, row + width, 0.0f);
    }
    for (int64_t first = 0; first < num_keys; first += kLanes) {
        prefetch(values, offsets + first + kLanes, D);
        float* scores = use.scores.data() + first;
        if constexpr (kHasScale<C>) {
            float scales[kLanes];
            for (int64_t j = 0; j < kLanes; ++j) scales[j] = row_scale(values + offsets[first + j], D);
            for (int64_t g = 0; g < G; ++g)
                for (int64_t j = 0; j < kLanes; ++j) scores[g * width + j] *= scales[j];
        }
        add_block(values, offsets + first, scores, width, G, D, use.out.data());
    }
    std::copy(use.out.begin(), use.out.end(), out);
    if (sizeof(C) == 2)
        for (int64_t g = 0; g < G; ++g)
            for (int64_t d = 0; d < whole; ++d) out[g * D + d] = use.out[g * D + place_of(d)];
}

// Sizes of the products in a chunk's attention: a tile of kRows x kColumns sums fills the registers.
constexpr int64_t kRows = 6, kColumns = kLanes * kVectors, kKeys = 128;

// c[rows, columns] = a[rows, depth] b[depth, columns] (+ c). Rows and columns are multiples of kRows and kColumns.
void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
              int64_t columns, int64_t depth, bool add) {
    for (int64_t column = 0; column < columns; column += kColumns) {
        for (int64_t row = 0; row < rows; row += kRows) {
            Vector sums[kRows][kVectors] = {};
            const float* from = a + row * lda;
            const float* right = b + column;
            for (int64_t d = 0; d < depth; ++d, right += ldb) {
                Vector parts[kVectors];
#pragma GCC unroll 8
                for (int64_t v = 0; v < kVectors; ++v)
                    parts[v] = *reinterpret_cast<const Vector*>(right + v * kLanes);
#pragma GCC unroll 8
                for (int64_t r = 0; r < kRows; ++r) {
                    const float left = from[r * lda + d];
#pragma GCC unroll 8
                    for (int64_t v = 0; v < kVectors; ++v) sums[r][v] += left * parts[v];
                }
            }
#pragma GCC unroll 8
            for (int64_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
                for (int64_t v = 0; v < kVectors; ++v) {
                    Vector* to = reinterpret_cast<Vector*>(c + (row + r) * ldc + column + v * kLanes);
                    *to = add ? *to + sums[r][v] : sums[r][v];
                }
            }
        }
    }
}

// What a thread needs for one block of a chunk's queries.
struct ChunkBuffers {
    std::vector<float> queries, keys, values, scores, out, most, sum;
};

// Attention of the query tokens [first, last) of a chunk over one KV head, block of keys by block of keys, with the
// running maximum and sum of FlashAttention (arXiv 2205.14135). Token i is at position start + i and attends to itself
// and to at most `window` - 1 positions before it.
template <class C>
void attend_block(const Element* q, int64_t q_token, const C* keys, const C* values, const int32_t* table,
                  int64_t block_size, int64_t start, int64_t first, int64_t last, int64_t window, int64_t G, int64_t D,
                  float scale, ChunkBuffers& use, Element* out) {
    const int64_t width = padded(D, kColumns), num = (last - first) * G, rows = padded(num, kRows);
    use.queries.assign(rows * D, 0.0f);
    use.keys.resize(D * kKeys);
    use.values.assign(kKeys * width, 0.0f);
    use.scores.resize(rows * kKeys);
    use.out.assign(rows * width, 0.0f);
    use.most.assign(rows, -std::numeric_limits<float>::infinity());
    use.sum.assign(rows, 0.0f);
    for (int64_t i = first; i < last; ++i)
        for (int64_t j = 0; j < G * D; ++j) use.queries[(i - first) * G * D + j] = scale * float(q[i * q_token + j]);

    const int64_t lowest = std::max<int64_t>(0, start + first - window + 1), end = start + last;
    for (int64_t position = lowest; position < end; position += kKeys) {
        const int64_t count = std::min(kKeys, end - position);
        int64_t j = 0;
        for_slots(table, block_size, position, position + count, [&](int64_t slot) {
            const C *key = keys + slot * row_width<C>(D), *value = values + slot * row_width<C>(D);
            const float key_scale = row_scale(key, D), value_scale = row_scale(value, D);
            for (int64_t d = 0; d < D; ++d) use.keys[d * kKeys + j] = key_scale * float(key[d]);
            for (int64_t d = 0; d < D; ++d) use.values[j * width + d] = value_scale * float(value[d]);
            ++j;
        });
        const int64_t columns = padded(count, kColumns);
        for (int64_t d = 0; d < D; ++d)
            std::fill(use.keys.data() + d * kKeys + count, use.keys.data() + d * kKeys + columns, 0.0f);
        multiply(use.queries.data(), D, use.keys.data(), kKeys, use.scores.data(), kKeys, rows, columns, D, false);
        for (int64_t r = 0; r < num; ++r) {
            float* row = use.scores.data() + r * kKeys;
            const int64_t own = start + first + r / G;  // position of the query
            const int64_t from = std::min(count, std::max<int64_t>(0, own - window + 1 - position));
            const int64_t to = std::max(from, std::min(count, own + 1 - position));
            float most = use.most[r], sum = 0.0f;
#pragma omp simd reduction(max : most)
            for (int64_t j = from; j < to; ++j) most = std::max(most, row[j]);
#pragma omp simd reduction(+ : sum)
            for (int64_t j = from; j < to; ++j) sum += row[j] = exponential(row[j] - most);
            std::fill(row, row + from, 0.0f);
            std::fill(row + to, row + count, 0.0f);
            if (to == from) continue;
            const float kept = exponential(use.most[r] - most);
            use.sum[r] = use.sum[r] * kept + sum;
            use.most[r] = most;
            if (kept != 1.0f)
                for (int64_t d = 0; d < width; ++d) use.out[r * width + d] *= kept;
        }
        multiply(use.scores.data(), kKeys, use.values.data(), width, use.out.data(), width, rows, width, count, true);
    }
    for (int64_t r = 0; r < num; ++r) {
        const float inverse = 1.0f / use.sum[r];
        Element* to = out + (first + r / G) * q_token + r % G * D;
        for (int64_t d = 0; d < D; ++d) to[d] = use.out[r * width + d] * inverse;
    }
}

template <class C>
void attend_decodes_over(const C* keys, const C* values, int64_t cache_head, const Element* queries,
                         const int64_t* starts, const int32_t* tables, int64_t M, int64_t block_size, int64_t window,
                         Element* out, int64_t B, int64_t K, int64_t G, int64_t D, float scale) {
#pragma omp parallel
    {
        DecodeBuffers use;
        std::vector<int64_t> offsets;
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t b = 0; b < B; ++b) {
            for (int64_t k = 0; k < K; ++k) {
                const int64_t end = starts[b] + 1, begin = std::max<int64_t>(0, end - window), at = (b * K + k) * G * D;
                const int64_t num_keys = end - begin, width = row_width<C>(D);
                offsets.resize(num_keys + 2 * kLanes);
                int64_t* to = offsets.data();
                for_slots(tables + b * M, block_size, begin, end, [&](int64_t slot) { *to++ = slot * width; });
                std::fill(to, offsets.data() + offsets.size(), to[-1]);
                attend_head(queries + at, keys + k * cache_head, values + k * cache_head, offsets.data(), num_keys, G,
                            D, scale, use, out + at);
            }
        }
    }
}

template <class C>
void attend_chunk_over(const C* keys, const C* values, int64_t cache_head, const Element* queries, const int32_t* table,
                       int64_t block_size, int64_t start, int64_t length, int64_t window, Element* out, int64_t K,
                       int64_t G, int64_t D, float scale) {
    const int64_t tokens = std::max<int64_t>(1, 96 / G), blocks = (length + tokens - 1) / tokens;
#pragma omp parallel
    {
        ChunkBuffers use;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < K * blocks; ++task) {
            const int64_t k = task % K, block = blocks - 1 - task / K;  // the longest first
            const int64_t first = block * tokens, last = std::min(length, first + tokens), at = k * G * D;
            attend_block(queries + at, K * G * D, keys + k * cache_head, values + k * cache_head, table, block_size,
                         start, first, last, window, G, D, scale, use, out + at);
        }
    }
}

}  // namespace

extern "C" {

// Attention of B decodes, queries[B, K, G, D], over the paged cache [K, slots, row] of numbers of `kind`, to out[B, K,
// G, D]. Decode b is at position starts[b], attends to at most `window` positions, and its blocks of `block_size` slots
// are in the first entries of tables[b, :M]. Each key and each value is read once.
void attend_decodes(int64_t kind, const void* keys, const void* values, int64_t cache_head, const Element* queries,
                    const int64_t* starts, const int32_t* tables, int64_t M, int64_t block_size, int64_t window,
                    Element* out, int64_t B, int64_t K, int64_t G, int64_t D, float scale) {
    with_kind(kind, [&](auto number) {
        typedef decltype(number) C;
        attend_decodes_over((const C*)keys, (const C*)values, cache_head, queries, starts, tables, M, block_size,
                            window, out, B, K, G, D, scale);
    });
}

// Attention of a chunk of `length` tokens, queries[length, K, G, D], to out of the same shape. Its first token is at
// position `start`, and `table` has its request's blocks. The cache is as for decodes.
void attend_chunk(int64_t kind, const void* keys, const void* values, int64_t cache_head, const Element* queries,
                  const int32_t* table, int64_t block_size, int64_t start, int64_t length, int64_t window, Element* out,
                  int64_t K, int64_t G, int64_t D, float scale) {
    with_kind(kind, [&](auto number) {
        typedef decltype(number) C;
        attend_chunk_over((const C*)keys, (const C*)values, cache_head, queries, table, block_size, start, length,
                          window, out, K, G, D, scale);
    });
}

}  // extern "C"
