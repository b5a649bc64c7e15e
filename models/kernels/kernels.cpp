// Operators of a decoder layer on a CPU, for tensors of `Element`. `cpp.py` loads this file and calls it.
//
// Sizes as in the Python sources: T tokens, B decodes, K KV heads with G query heads each, D elements of a head, F
// elements of the feed-forward network. Strides are in elements. The last dimension is always contiguous.
//
// Loops over D, F and H are left to the compiler's vectors. The flags let it reorder sums, but not assume finite
// numbers: NaN in weights must come out as NaN.

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "element.h"
#include "exponential.h"

namespace {

inline float sum_of_squares(const Element* x, int64_t size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += float(x[i]) * float(x[i]);
    return sum;
}

// A vector register of floats. GCC and Clang both know these vectors.
#ifdef __AVX512F__
constexpr int64_t kLanes = 16, kVectors = 4;
#else
constexpr int64_t kLanes = 8, kVectors = 2;
#endif
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

inline int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<Vector*>(to) = x; }

// Both vectors hold groups of 2 * WIDTH lanes. Returns the groups of `a`, then those of `b`, each with its upper half
// added to its lower one.
template <int64_t WIDTH, int... I>
inline Vector fold(Vector a, Vector b, std::integer_sequence<int, I...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, (I / WIDTH * 2 * WIDTH + I % WIDTH)...) +
           __builtin_shufflevector(a, b, (I / WIDTH * 2 * WIDTH + I % WIDTH + WIDTH)...);
#else
    typedef int Lanes __attribute__((vector_size(kLanes * sizeof(int))));
    return __builtin_shuffle(a, b, Lanes{(I / WIDTH * 2 * WIDTH + I % WIDTH)...}) +
           __builtin_shuffle(a, b, Lanes{(I / WIDTH * 2 * WIDTH + I % WIDTH + WIDTH)...});
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
            x[i] = fold<WIDTH>(x[2 * i], x[2 * i + 1], std::make_integer_sequence<int, kLanes>{});
        return sum_lanes<WIDTH / 2>(x);
    }
}

// The tokens at `offsets` in a cache of keys or values: asks for the ones of a block before they are read. Blocks are
// scattered over the cache, and the processor's own prefetch ends with a page of memory.
inline void prefetch(const Element* cache, const int64_t* offsets, int64_t D) {
    for (int64_t j = 0; j < kLanes; ++j)
        for (int64_t d = 0; d < D; d += 64 / sizeof(Element)) __builtin_prefetch(cache + offsets[j] + d);
}

// What a thread needs for one KV head of a decode.
struct DecodeBuffers {
    std::vector<float> queries, scores, out, copy;
    int64_t steps[kLanes];
};

// kLanes keys or values as float, and where each begins: the cache's, or a copy that all queries of a KV head read.
typedef std::pair<const float*, const int64_t*> Block;

inline Block as_floats(const float* cache, const int64_t* offsets, int64_t, DecodeBuffers&) { return {cache, offsets}; }

inline Block as_floats(const BFloat16* cache, const int64_t* offsets, int64_t D, DecodeBuffers& use) {
    use.copy.resize(kLanes * D);
    for (int64_t j = 0; j < kLanes; ++j) {
        use.steps[j] = j * D;
        std::copy(cache + offsets[j], cache + offsets[j] + D, use.copy.data() + j * D);
    }
    return {use.copy.data(), use.steps};
}

// scores[kLanes] of one query over the keys at `offsets`.
inline void score_block(const float* query, const float* keys, const int64_t* offsets, int64_t D, float scale,
                        float* scores) {
    const int64_t whole = D / kLanes * kLanes;
    Vector sums[kLanes] = {};
    for (int64_t d = 0; d < whole; d += kLanes) {
        const Vector part = load(query + d);
#pragma GCC unroll 16
        for (int64_t j = 0; j < kLanes; ++j) sums[j] += part * load(keys + offsets[j] + d);
    }
    store(scores, sum_lanes(sums));
    for (int64_t j = 0; j < kLanes; ++j) {
        for (int64_t d = whole; d < D; ++d) scores[j] += query[d] * keys[offsets[j] + d];
        scores[j] *= scale;
    }
}

// Adds to out[VECTORS * kLanes] the values at `offsets`, each times its score.
template <int64_t VECTORS>
inline void add_values(const float* values, const int64_t* offsets, const float* scores, float* out) {
    Vector sums[VECTORS];
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v) sums[v] = load(out + v * kLanes);
#pragma GCC unroll 16
    for (int64_t j = 0; j < kLanes; ++j)
#pragma GCC unroll 8
        for (int64_t v = 0; v < VECTORS; ++v) sums[v] += scores[j] * load(values + offsets[j] + v * kLanes);
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v) store(out + v * kLanes, sums[v]);
}

// The queries of one KV head of one decode over the keys at `offsets` of `keys` and `values`, kLanes keys at a time.
// 2 * kLanes further offsets follow the last key's, all readable.
void attend_head(const Element* q, const Element* keys, const Element* values, const int64_t* offsets, int64_t num_keys,
                 int64_t G, int64_t D, float scale, DecodeBuffers& use, Element* out) {
    const int64_t width = padded(num_keys, kLanes);
    use.queries.assign(q, q + G * D);
    use.scores.resize(G * width);
    use.out.assign(G * D, 0.0f);
    for (int64_t first = 0; first < num_keys; first += kLanes) {
        prefetch(keys, offsets + first + kLanes, D);
        const auto [from, at] = as_floats(keys, offsets + first, D, use);
        for (int64_t g = 0; g < G; ++g)
            score_block(use.queries.data() + g * D, from, at, D, scale, use.scores.data() + g * width + first);
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
        const auto [from, at] = as_floats(values, offsets + first, D, use);
        for (int64_t g = 0; g < G; ++g) {
            const float* row = use.scores.data() + g * width + first;
            float* to = use.out.data() + g * D;
            int64_t d = 0;
            for (; d + 4 * kLanes <= D; d += 4 * kLanes) add_values<4>(from + d, at, row, to + d);
            for (; d + kLanes <= D; d += kLanes) add_values<1>(from + d, at, row, to + d);
            for (; d < D; ++d)
                for (int64_t j = 0; j < kLanes; ++j) to[d] += row[j] * from[at[j] + d];
        }
    }
    std::copy(use.out.begin(), use.out.end(), out);
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
// and to at most `window` - 1 positions before it, which begin at position `begin`, the first of `runs`.
void attend_block(const Element* q, int64_t q_token, const Element* keys, const Element* values, const int64_t* runs,
                  int64_t begin, int64_t start, int64_t first, int64_t last, int64_t window, int64_t G, int64_t D,
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

    const int64_t lowest = std::max(begin, start + first - window + 1), end = start + last;
    int64_t run = 0, run_begin = begin;  // the run that holds `position`, and the position of its first slot
    for (int64_t position = lowest; position < end; position += kKeys) {
        const int64_t count = std::min(kKeys, end - position);
        for (int64_t j = 0; j < count; ++j) {
            while (position + j >= run_begin + runs[2 * run + 1]) run_begin += runs[2 * run++ + 1];
            const int64_t slot = runs[2 * run] + position + j - run_begin;
            for (int64_t d = 0; d < D; ++d) use.keys[d * kKeys + j] = keys[slot * D + d];
            std::copy(values + slot * D, values + slot * D + D, use.values.data() + j * width);
        }
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

// Finds the slots of positions begin .. end - 1 of a request with blocks `table`: of each run of consecutive blocks the
// first slot and the number of slots.
void find_runs(const int32_t* table, int64_t begin, int64_t end, int64_t block_size, std::vector<int64_t>& runs) {
    runs.clear();
    for (int64_t position = begin; position < end;) {
        const int64_t block = position / block_size, offset = position % block_size;
        const int64_t slot = table[block] * block_size + offset, count = std::min(block_size - offset, end - position);
        if (!runs.empty() && runs[runs.size() - 2] + runs.back() == slot)
            runs.back() += count;
        else
            runs.insert(runs.end(), {slot, count});
        position += count;
    }
}

}  // namespace

extern "C" {

// out[T, H] = x[T, H] / sqrt(mean(x^2) + eps) * weight[H]
void rms_norm(const Element* x, const Element* weight, Element* out, int64_t T, int64_t H, float eps) {
#pragma omp parallel for if (T * H > 32768)
    for (int64_t t = 0; t < T; ++t) {
        const Element* row = x + t * H;
        Element* to = out + t * H;
        const float scale = 1.0f / std::sqrt(sum_of_squares(row, H) / H + eps);
#pragma omp simd
        for (int64_t i = 0; i < H; ++i) to[i] = float(row[i]) * scale * float(weight[i]);
    }
}

// out[T, F] = silu(hidden[T, :F]) * hidden[T, F:]
void gated_silu(const Element* hidden, Element* out, int64_t T, int64_t F) {
#pragma omp parallel for if (T * F > 16384)
    for (int64_t t = 0; t < T; ++t) {
        const Element* gate = hidden + t * 2 * F;
        const Element* up = gate + F;
        Element* to = out + t * F;
#pragma omp simd
        for (int64_t i = 0; i < F; ++i) to[i] = float(gate[i]) / (1.0f + exponential(-float(gate[i]))) * float(up[i]);
    }
}

// Rotates the queries and the key of each KV group, and writes keys and values to the cache.
//
// qk[T, K, G + 1, D] holds G queries and their key, values[T, K, D]; both have strides of a token and of a KV head.
// cos and sin are [T, D / 2]; null: no rotation. The cache is [K, slots, D] with a stride of a head.
void rotate_and_write(const Element* qk, int64_t qk_token, int64_t qk_head, const Element* values, int64_t value_token,
                      int64_t value_head, const Element* cos, const Element* sin, const int64_t* slots,
                      Element* key_cache, Element* value_cache, int64_t cache_head, Element* queries, int64_t T,
                      int64_t K, int64_t G, int64_t D) {
#pragma omp parallel for if (T * K * (G + 2) * D > 32768)
    for (int64_t t = 0; t < T; ++t) {
        const int64_t half = D / 2;
        const Element *c = cos ? cos + t * half : nullptr, *s = sin ? sin + t * half : nullptr;
        for (int64_t k = 0; k < K; ++k) {
            const Element* group = qk + t * qk_token + k * qk_head;
            Element* key = key_cache + k * cache_head + slots[t] * D;
            for (int64_t e = 0; e <= G; ++e) {
                const Element* from = group + e * D;
                Element* to = e < G ? queries + ((t * K + k) * G + e) * D : key;
                if (!c) {
                    std::memcpy(to, from, D * sizeof(Element));
                    continue;
                }
#pragma omp simd
                for (int64_t i = 0; i < half; ++i) {
                    const float a = from[i], b = from[i + half], x = c[i], y = s[i];
                    to[i] = a * x - b * y;
                    to[i + half] = b * x + a * y;
                }
            }
            std::memcpy(value_cache + k * cache_head + slots[t] * D, values + t * value_token + k * value_head,
                        D * sizeof(Element));
        }
    }
}

// Attention of B decodes, queries[B, K, G, D], over the paged cache [K, slots, D], to out[B, K, G, D]. Decode b is at
// position starts[b], attends to at most `window` positions, and its blocks of `block_size` slots are in the first
// entries of tables[b, :M]. Each key and each value is read once.
void attend_decodes(const Element* queries, const Element* keys, const Element* values, int64_t cache_head,
                    const int64_t* starts, const int32_t* tables, int64_t M, int64_t block_size, int64_t window,
                    Element* out, int64_t B, int64_t K, int64_t G, int64_t D, float scale) {
#pragma omp parallel
    {
        DecodeBuffers use;
        std::vector<int64_t> runs, offsets;
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t b = 0; b < B; ++b) {
            for (int64_t k = 0; k < K; ++k) {
                const int64_t end = starts[b] + 1, begin = std::max<int64_t>(0, end - window), at = (b * K + k) * G * D;
                find_runs(tables + b * M, begin, end, block_size, runs);
                const int64_t num_keys = end - begin;
                offsets.resize(num_keys + 2 * kLanes);
                int64_t* to = offsets.data();
                for (size_t i = 0; i < runs.size(); i += 2)
                    for (int64_t j = 0; j < runs[i + 1]; ++j) *to++ = (runs[i] + j) * D;
                std::fill(to, offsets.data() + offsets.size(), to[-1]);
                attend_head(queries + at, keys + k * cache_head, values + k * cache_head, offsets.data(), num_keys, G,
                            D, scale, use, out + at);
            }
        }
    }
}

// Attention of a chunk of `length` tokens, queries[length, K, G, D], to out of the same shape. Its first token is at
// position `start`, and `runs` hold the slots from position `begin` to the last token's.
void attend_chunk(const Element* queries, const Element* keys, const Element* values, int64_t cache_head,
                  const int64_t* runs, int64_t begin, int64_t start, int64_t length, int64_t window, Element* out,
                  int64_t K, int64_t G, int64_t D, float scale) {
    const int64_t tokens = std::max<int64_t>(1, 96 / G), blocks = (length + tokens - 1) / tokens;
#pragma omp parallel
    {
        ChunkBuffers use;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < K * blocks; ++task) {
            const int64_t k = task % K, block = blocks - 1 - task / K;  // the longest first
            const int64_t first = block * tokens, last = std::min(length, first + tokens), at = k * G * D;
            attend_block(queries + at, K * G * D, keys + k * cache_head, values + k * cache_head, runs, begin, start,
                         first, last, window, G, D, scale, use, out + at);
        }
    }
}

}  // extern "C"
