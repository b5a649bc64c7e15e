// The product of few rows with a weight that oneDNN has laid out, for `packed.py`.
//
// The layout is oneDNN's: for each block of 64 or 32 outputs, word after word of the inputs (`element.h`), the words of all
// its outputs side by side. It is AB16b64a for float, and AB16b64a2b or AB16b32a2b for BFloat16.

#include "tiles.h"

namespace {

constexpr int64_t kLeastTiled = 5;        // rows
constexpr int64_t kAtOnce = 8;            // steps of weights, 16 KB, which stay in the first cache for all rows
constexpr int64_t kPanelBytes = 3 << 19;  // of x, which stay in the second cache for all weights

// Few rows, whose sums stay in registers for some words. `inputs` is a multiple of a word.
void by_words(const Element* x, const float* weight, int64_t rows, int64_t inputs, int64_t block, const Output& to) {
    const int64_t words = inputs / kInWord;
    const float* x_words = reinterpret_cast<const float*>(x);
    const auto multiply = block == 64 ? multiply_rows<64> : multiply_rows<32>;
#pragma omp parallel
    {
        alignas(64) float sums[kMostRows * kOutputs];
#pragma omp for schedule(static)
        for (int64_t first = 0; first < to.outputs; first += kOutputs) {
            std::fill(sums, sums + rows * kOutputs, 0.0f);
            for (int64_t i = 0; i < words; i += kWords)
                multiply(x_words + i, words, weight + first * words + i * block, std::min(kWords, words - i), sums,
                         rows);
            for (int64_t r = 0; r < rows; ++r) to.write(sums + r * kOutputs, r, first, kOutputs);
        }
    }
}

// Any number of rows up to a panel. `inputs` is a multiple of 32, and so is a block's outputs.
void by_tiles(const Element* x, const float* weight, int64_t count, int64_t inputs, const Output& to) {
    auto rows = make_rows<Element>(count, inputs * sizeof(Element) / kStep, 0, true);
#pragma omp parallel for
    for (int64_t r = 0; r < count; ++r)
        for (int64_t step = 0; step < rows.steps; ++step)
            std::memcpy(rows.at(r, step), x + r * inputs + step * kStep / sizeof(Element), kStep);
    const auto weights = [&](int64_t block, int64_t first, int64_t) {
        return weight + (block * rows.steps + first) * kTile * kBlock;
    };
    const auto finish = [&](int64_t block, int64_t r, const float* sums) { to.write(sums, r, block * kBlock, kBlock); };
    by_tiles(rows, count, to.outputs / kBlock, count <= 2 * kTile ? rows.steps : kAtOnce, true, to, weights, finish);
}

}  // namespace

extern "C" {

// out[rows, outputs] = x[rows, inputs] @ weight^T + bias[outputs] + residual[rows, outputs]; bias and residual may be
// null. Each weight is read from memory once. `block` is 64 or 32, `outputs` a multiple of 64, `inputs` of a word, and
// `rows` at most 96.
void linear(const Element* x, const float* weight, const Element* bias, const Element* residual, Element* out,
            int64_t rows, int64_t inputs, int64_t outputs, int64_t block) {
    by_words(x, weight, rows, inputs, block, {bias, residual, out, outputs});
}

// Whether `linear_tiled` is there.
int64_t multiplies_tiles() { return kMayHaveTiles && kInWord == 2 && has_tiles(); }

// As `linear`, with blocks of 32 outputs, for any number of rows. `inputs` and `outputs` are multiples of 32. With `wide`,
// `out` is of floats.
void linear_tiled(const Element* x, const float* weight, const Element* bias, const Element* residual, void* out,
                  int64_t rows, int64_t inputs, int64_t outputs, int64_t wide) {
    const Output to = {bias, residual, (Element*)out, outputs, wide ? (float*)out : nullptr};
    if (rows < kLeastTiled && outputs % kOutputs == 0) return by_words(x, weight, rows, inputs, kBlock, to);
    const int64_t fitting = kPanelBytes / (inputs * int64_t(sizeof(Element))) / (2 * kTile) * 2 * kTile;
    const int64_t panel = std::max(2 * kTile, std::min(kPanel, fitting));
    for (int64_t row = 0; row < rows; row += panel)
        if constexpr (kInWord == 2)
            by_tiles(x + row * inputs, weight, std::min(panel, rows - row), inputs, to.from(row));
}

}  // extern "C"
