// Products with weights of 8 or 4 bits, for `quantized.py`.

#ifdef __AVX512BF16__
#include "floating_point.h"
#else
#include "fixed_point.h"
#endif

namespace {

#ifdef __AVX512BF16__
void multiply(const Matrix& m, const Element* x, int64_t rows, int64_t inputs, bool rounds, int64_t least_tiled,
              const Output& to) {
    const bool may = kMayHaveTiles && (rounds ? m.groups == 1 : kPairs) && has_tiles();
    const auto of_panel = rounds ? multiply_integers : m.bits == 4 ? multiply_panel<4> : multiply_panel<8>;
    for (int64_t row = 0; row < rows; row += kPanel) {
        const int64_t count = std::min(kPanel, rows - row);
        of_panel(m, x + row * inputs, count, inputs, to.from(row), may && count >= least_tiled);
    }
}

#else
void multiply(const Matrix& m, const Element* x, int64_t rows, int64_t inputs, bool rounds, int64_t, const Output& to) {
    const auto of_panel = m.bits == 8 ? multiply_fixed<8, false> : m.table ? multiply_fixed<4, true> : multiply_fixed<4, false>;
    for (int64_t row = 0; row < rows; row += kPanel)
        of_panel(m, x + row * inputs, std::min(kPanel, rows - row), inputs, rounds, to.from(row));
}
#endif

}  // namespace

extern "C" {

// Whether activations become fixed point, and codes of 4 bits may have a table.
int64_t is_fixed_point() { return !kMultipliesPairs; }

// out[rows, outputs] = x[rows, inputs] @ weight^T + bias[outputs] + residual[rows, outputs]; bias and residual may be
// null. With `rounds`, x is rounded to integers of 8 bits first. Fewer rows than `least_tiled` do without tiles.
void linear(const Matrix* m, const Element* x, const Element* bias, const Element* residual, Element* out, int64_t rows,
            int64_t inputs, int64_t rounds, int64_t least_tiled) {
    multiply(*m, x, rows, inputs, rounds, least_tiled, {bias, residual, out, m->outputs});
}

// As `linear`, without bias and residual, to floats.
void logits(const Matrix* m, const Element* x, float* out, int64_t rows, int64_t inputs, int64_t rounds,
            int64_t least_tiled) {
    multiply(*m, x, rows, inputs, rounds, least_tiled, {nullptr, nullptr, (Element*)out, m->outputs, out});
}

}  // extern "C"
