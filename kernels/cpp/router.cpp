// The choice of each token's experts on a CPU, for tensors of `Element`. `router.py` loads this file and calls it.

#include "exponential.h"
#include "rows.h"

namespace {

constexpr int64_t kTokens = 2 * kRows;  // whose logits a thread computes at once

}  // namespace

extern "C" {

// Picks the k of E experts with the highest logits x[T, H] @ weight^T + bias of each token, of equals the first, [T, k]. The
// softmax of these logits gives the weights. The router's weight is in words, blocks of 32 outputs, with outputs padded
// to 64; H is a multiple of 32. The bias may be null.
void route(const Element* x, int64_t T, int64_t H, const float* weight, const Element* bias, int64_t E, int64_t k,
           int64_t* picked, float* weights) {
    const int64_t words = H / kInWord;
#pragma omp parallel if (T > kTokens)
    {
        alignas(64) float sums[kTokens * kOutputs];
        std::vector<Element> logits(kTokens * E);
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < T; begin += kTokens) {
            const int64_t count = std::min(kTokens, T - begin);
            const Output to = {bias, nullptr, logits.data(), E};
            for (int64_t first = 0; first < E; first += kOutputs) {
                std::fill(sums, sums + count * kOutputs, 0.0f);
                for (int64_t i = 0; i < words; i += kWords)
                    multiply_rows<kBlock>(reinterpret_cast<const float*>(x + begin * H) + i, words,
                                          weight + first * words + i * kBlock, std::min(kWords, words - i), sums, count,
                                          words - i <= kWords);
                for (int64_t r = 0; r < count; ++r) to.write(sums + r * kOutputs, r, first, kOutputs);
            }
            for (int64_t r = 0; r < count; ++r) {
                int64_t* own = picked + (begin + r) * k;
                float* best = weights + (begin + r) * k;  // logits, from the highest on
                for (int64_t e = 0; e < E; ++e) {
                    const float logit = logits[r * E + e];
                    int64_t rank = std::min(e, k);
                    for (; rank > 0 && (logit > best[rank - 1] || logit != logit); --rank)
                        if (rank < k) {
                            best[rank] = best[rank - 1];
                            own[rank] = own[rank - 1];
                        }
                    if (rank < k) {
                        best[rank] = logit;
                        own[rank] = e;
                    }
                }
                const float highest = best[0];
                float sum = 0.0f;
                for (int64_t i = 0; i < k; ++i) sum += best[i] = exponential(best[i] - highest);
                for (int64_t i = 0; i < k; ++i) best[i] /= sum;
            }
        }
    }
}

}  // extern "C"
