// Operators of a decoder layer on a CPU, for tensors of `Element`. `operators/cpp.py` loads this file and calls it.
//
// Sizes as in the Python sources: T tokens, B decodes, K KV heads with G query heads each, D elements of a head, F
// elements of the feed-forward network. Strides are in elements. The last dimension is always contiguous.
//
// Loops over D, F and H are left to the compiler's vectors. The flags let it reorder sums, but not assume finite
// numbers: NaN in weights must come out as NaN.

#include <algorithm>
#include <vector>

#include "numbers.h"
#include "operators.h"

namespace {

// The sum of (x - mean)^2.
inline float sum_of_squares(const Element* x, int64_t size, float mean = 0.0f) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += (float(x[i]) - mean) * (float(x[i]) - mean);
    return sum;
}

inline float mean_of(const Element* x, int64_t size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += float(x[i]);
    return sum / size;
}

template <class C>
void rotate_and_write_to(C* keys, C* values, int64_t cache_head, const Element* qk, int64_t qk_token, int64_t qk_head,
                         const Element* v, int64_t v_token, int64_t v_head, const Element* query_weight,
                         const Element* key_weight, float eps, const Element* cos, const Element* sin,
                         const int64_t* slots, Element* queries, int64_t T, int64_t K, int64_t G, int64_t D) {
#pragma omp parallel if (T * K * (G + 2) * D > 32768)
    {
        std::vector<float> head(D);
        const int64_t half = D / 2;
#pragma omp for
        for (int64_t t = 0; t < T; ++t) {
            for (int64_t k = 0; k < K; ++k) {
                const int64_t row = k * cache_head + slots[t] * row_width<C>(D);
                for (int64_t e = 0; e <= G; ++e) {
                    const Element* from = qk + t * qk_token + k * qk_head + e * D;
                    std::copy(from, from + D, head.begin());
                    if (const Element* weight = e < G ? query_weight : key_weight) {
                        const float scale = 1.0f / std::sqrt(sum_of_squares(from, D) / D + eps);
#pragma omp simd
                        for (int64_t i = 0; i < D; ++i) head[i] *= scale * float(weight[i]);
                    }
                    if (cos)
#pragma omp simd
                        for (int64_t i = 0; i < half; ++i) {
                            const float a = head[i], b = head[i + half], x = cos[t * half + i], y = sin[t * half + i];
                            head[i] = a * x - b * y;
                            head[i + half] = b * x + a * y;
                        }
                    if (e < G)
                        std::copy(head.begin(), head.end(), queries + ((t * K + k) * G + e) * D);
                    else
                        write_row(head.data(), keys + row, D);
                }
                std::copy_n(v + t * v_token + k * v_head, D, head.begin());
                write_row(head.data(), values + row, D);
            }
        }
    }
}

}  // namespace

extern "C" {

// Adds `term` (null: nothing) to x[T, H], in place, and writes the sum's norm to out[T, H]: x / sqrt(mean(x^2) + eps) *
// weight[H], or with a bias[H] (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias.
void add_and_norm(Element* x, const Element* term, const Element* weight, const Element* bias, Element* out, int64_t T,
                  int64_t H, float eps) {
#pragma omp parallel for if (T * H > 32768)
    for (int64_t t = 0; t < T; ++t) {
        Element *row = x + t * H, *to = out + t * H;
        if (term)
#pragma omp simd
            for (int64_t i = 0; i < H; ++i) row[i] = float(row[i]) + float(term[t * H + i]);
        const float mean = bias ? mean_of(row, H) : 0.0f;
        const float scale = 1.0f / std::sqrt(sum_of_squares(row, H, mean) / H + eps);
#pragma omp simd
        for (int64_t i = 0; i < H; ++i)
            to[i] = (float(row[i]) - mean) * scale * float(weight[i]) + (bias ? float(bias[i]) : 0.0f);
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

// Normalizes queries and keys of each KV group, if there are weights, rotates them, and writes keys and values to the
// cache.
//
// qk[T, K, G + 1, D] holds G queries and their key, v[T, K, D] values; both have strides of a token and of a KV head.
// Weights are [D]; null: no norm. cos and sin are [T, D / 2]; null: no rotation. The cache is [K, slots, row] of numbers
// of `kind`, with a stride of a head.
void rotate_and_write(int64_t kind, void* keys, void* values, int64_t cache_head, const Element* qk, int64_t qk_token,
                      int64_t qk_head, const Element* v, int64_t v_token, int64_t v_head, const Element* query_weight,
                      const Element* key_weight, float eps, const Element* cos, const Element* sin,
                      const int64_t* slots, Element* queries, int64_t T, int64_t K, int64_t G, int64_t D) {
    with_kind(kind, [&](auto number) {
        typedef decltype(number) C;
        rotate_and_write_to((C*)keys, (C*)values, cache_head, qk, qk_token, qk_head, v, v_token, v_head, query_weight,
                            key_weight, eps, cos, sin, slots, queries, T, K, G, D);
    });
}

}  // extern "C"
