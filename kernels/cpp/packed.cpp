// Products with a weight in blocks of outputs: of few rows with one that oneDNN has laid out, for `packed.py`, and of any
// number by AMX, for `tiled.py`.
//
// The layout is oneDNN's in both cases: for each block of 64 or 32 outputs, word after word of the inputs (`element.h`), the words of all
// its outputs side by side. It is AB16b64a for float, and AB16b64a2b or AB16b32a2b for BFloat16.

#include "exponential.h"
#include "tiles.h"

namespace {

struct Packed {
    const void* weight;
    int64_t inputs, outputs;
    int64_t form;  // `linear`: outputs of a block; `linear_short`: whether numbers are of half precision
};

constexpr int64_t kLeastTiled = 5;        // rows
constexpr int64_t kAtOnce = 8;            // steps of weights, 16 KB, which stay in the first cache for all rows
constexpr int64_t kPanelBytes = 3 << 19;  // of x, which stay in the second cache for all weights

// How a product ends: with bias and residual, or as silu(gate) * up of the products of two halves of the outputs.
template <int PARTS>
inline void finish(float* sums, int64_t stride, int64_t r, int64_t first, int64_t width, const Output& to) {
    if constexpr (PARTS == 2)
        for (int64_t o = 0; o < width; ++o) {
            const float gate = sums[o];
            sums[o] = gate / (1.0f + exponential(-gate)) * sums[stride + o];
        }
    to.write(sums, r, first, width);
}

// Few rows, whose sums stay in registers for some words. `inputs` is a multiple of a word.
template <int PARTS>
void by_words(const Element* x, const float* weight, int64_t rows, int64_t inputs, int64_t block, const Output& to) {
    const int64_t words = inputs / kInWord;
    const float* x_words = reinterpret_cast<const float*>(x);
    const auto multiply = block == 64 ? multiply_rows<64, float> : multiply_rows<32, float>;
#pragma omp parallel
    {
        alignas(64) float sums[PARTS * kMostRows * kOutputs];
        constexpr int64_t stride = kMostRows * kOutputs;
#pragma omp for schedule(static)
        for (int64_t first = 0; first < to.outputs; first += kOutputs) {
            for (int64_t part = 0; part < PARTS; ++part) {
                const float* own = weight + (first + part * to.outputs) * words;
                std::fill(sums + part * stride, sums + part * stride + rows * kOutputs, 0.0f);
                for (int64_t i = 0; i < words; i += kWords)
                    multiply(x_words + i, words, own + i * block, std::min(kWords, words - i), sums + part * stride, rows,
                             words - i <= kWords);
            }
            for (int64_t r = 0; r < rows; ++r) finish<PARTS>(sums + r * kOutputs, stride, r, first, kOutputs, to);
        }
    }
}

// Any number of rows, with weights of 16 bits, which are widened in registers, or once for all rows of a panel.
template <class Weight>
void by_shorts(const Element* rows_of_x, const Weight* weight, int64_t rows, int64_t inputs, const Output& to) {
    static thread_local std::vector<float> memory;
    const float* x;
    if constexpr (kInWord == 1) {
        x = rows_of_x;
    } else {
        memory.resize(std::max<int64_t>(memory.size(), rows * inputs));
        float* wide = memory.data();
#pragma omp parallel for if (rows > kRows)
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < inputs; ++i) wide[r * inputs + i] = rows_of_x[r * inputs + i];
        x = wide;
    }
#pragma omp parallel
    {
        alignas(64) float sums[kMostRows * kOutputs];
        alignas(64) Wide numbers[kWords * kOutputs];
#pragma omp for schedule(static)
        for (int64_t first = 0; first < to.outputs; first += kOutputs)
            for (int64_t row = 0; row < rows; row += kMostRows) {
                const int64_t some = std::min(kMostRows, rows - row);
                std::fill(sums, sums + some * kOutputs, 0.0f);
                for (int64_t i = 0; i < inputs; i += kWords) {
                    const int64_t count = std::min(kWords, inputs - i);
                    const Weight* own = weight + first * inputs + i * kOutputs;
                    if (some <= kRows) {
                        multiply_rows<kOutputs>(x + row * inputs + i, inputs, own, count, sums, some, false);
                        continue;
                    }
                    for (int64_t o = 0; o < count * kOutputs; o += kLane) {
                        __builtin_prefetch(own + count * kOutputs + o, 0, 2);  // they are used after this panel's rows
                        narrow(widen(own + o), &numbers[o].number);
                    }
                    multiply_rows<kOutputs>(x + row * inputs + i, inputs, numbers, count, sums, some, false);
                }
                for (int64_t r = 0; r < some; ++r) to.write(sums + r * kOutputs, row + r, first, kOutputs);
            }
    }
}

// Any number of rows up to a panel. `inputs` is a multiple of 32, and so is a block's outputs.
template <int PARTS>
void by_tiles(const Element* x, const float* weight, int64_t count, int64_t inputs, const Output& to) {
    auto rows = make_rows<Element>(count, inputs * sizeof(Element) / kStep, 0, true);
#pragma omp parallel for
    for (int64_t r = 0; r < count; ++r)
        for (int64_t step = 0; step < rows.steps; ++step)
            std::memcpy(rows.at(r, step), x + r * inputs + step * kStep / sizeof(Element), kStep);
    const int64_t blocks = to.outputs / kBlock;
    const auto weights = [&](int64_t block, int64_t part, int64_t first, int64_t) {
        return weight + ((block + part * blocks) * rows.steps + first) * kTile * kBlock;
    };
    const auto write = [&](int64_t block, int64_t r, float* sums) {
        finish<PARTS>(sums, kPartSums, r, block * kBlock, kBlock, to);
    };
    by_tiles<PARTS>(rows, count, blocks, count <= 2 * kTile ? rows.steps : kAtOnce, true, to, weights, write);
}

template <int PARTS>
void multiply_any(const Element* x, const float* weight, int64_t rows, int64_t inputs, const Output& to) {
    if (rows < kLeastTiled && to.outputs % kOutputs == 0) return by_words<PARTS>(x, weight, rows, inputs, kBlock, to);
    const int64_t fitting = kPanelBytes / (inputs * int64_t(sizeof(Element))) / (2 * kTile) * 2 * kTile;
    const int64_t panel = std::max(2 * kTile, std::min(kPanel, fitting));
    for (int64_t row = 0; row < rows; row += panel)
        if constexpr (kInWord == 2)
            by_tiles<PARTS>(x + row * inputs, weight, std::min(panel, rows - row), inputs, to.from(row));
}

}  // namespace

extern "C" {

// See `Multiply`. Each weight is read from memory once. A block has 64 or 32 outputs; `outputs` is a multiple of 64,
// `inputs` of a word, and `rows` at most 96.
void linear(const Packed* w, const Element* x, const Element* bias, const Element* residual, void* out, int64_t rows,
            int64_t wide) {
    by_words<1>(x, (const float*)w->weight, rows, w->inputs, w->form, {bias, residual, out, w->outputs, wide != 0});
}

// As `linear`, for any number of rows, with weights of half precision or of BFloat16 in blocks of 64 outputs, of which the
// last may be padded.
void linear_short(const Packed* w, const Element* x, const Element* bias, const Element* residual, void* out,
                  int64_t rows, int64_t wide) {
    const Output to(bias, residual, out, w->outputs, wide);
    if (w->form)
        by_shorts(x, (const Half*)w->weight, rows, w->inputs, to);
    else
        by_shorts(x, (const BFloat16*)w->weight, rows, w->inputs, to);
}

// Whether `linear_tiled` is there.
int64_t multiplies_tiles() { return kMayHaveTiles && kInWord == 2 && has_tiles(); }

// As `linear`, with blocks of 32 outputs, for any number of rows. `inputs` and `outputs` are multiples of 32.
void linear_tiled(const Packed* w, const Element* x, const Element* bias, const Element* residual, void* out,
                  int64_t rows, int64_t wide) {
    multiply_any<1>(x, (const float*)w->weight, rows, w->inputs, {bias, residual, out, w->outputs, wide != 0});
}

// out[rows, outputs] = silu(x @ gate^T) * (x @ up^T), of a weight [gate; up] with 2 * `outputs` outputs.
void gated_silu_tiled(const Element* x, const float* weight, Element* out, int64_t rows, int64_t inputs, int64_t outputs) {
    multiply_any<2>(x, weight, rows, inputs, {nullptr, nullptr, out, outputs});
}

}  // extern "C"
