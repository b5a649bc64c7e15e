// The product of few rows with a weight that oneDNN has laid out, for `packed.py`.
//
// The layout is oneDNN's: for each block of 64 or 32 outputs, word after word of the inputs (`element.h`), the words of all
// its outputs side by side. It is AB16b64a for float, and AB16b64a2b or AB16b32a2b for BFloat16.

#include "few_rows.h"

extern "C" {

// out[rows, outputs] = x[rows, inputs] @ weight^T + bias[outputs] + residual[rows, outputs]; bias and residual may be
// null. Each weight is read from memory once. `block` is 64 or 32, `outputs` a multiple of 64, `inputs` of a word, and
// `rows` at most 96.
void linear(const Element* x, const float* weight, const Element* bias, const Element* residual, Element* out,
            int64_t rows, int64_t inputs, int64_t outputs, int64_t block) {
    const int64_t words = inputs / kInWord;
    const float* x_words = reinterpret_cast<const float*>(x);
    const auto multiply = block == 64 ? multiply_rows<64> : multiply_rows<32>;
#pragma omp parallel
    {
        alignas(64) float sums[kMostRows * kOutputs];
#pragma omp for schedule(static)
        for (int64_t first = 0; first < outputs; first += kOutputs) {
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t o = 0; o < kOutputs; ++o)
                    sums[r * kOutputs + o] = (bias ? float(bias[first + o]) : 0.0f) +
                                             (residual ? float(residual[r * outputs + first + o]) : 0.0f);
            for (int64_t i = 0; i < words; i += kWords)
                multiply(x_words + i, words, weight + first * words + i * block, std::min(kWords, words - i), sums,
                         rows);
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t o = 0; o < kOutputs; ++o) out[r * outputs + first + o] = sums[r * kOutputs + o];
        }
    }
}

}  // extern "C"
