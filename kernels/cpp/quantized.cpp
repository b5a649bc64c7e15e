// Products with weights of 8 or 4 bits, for `quantized.py`.

#ifdef __AVX512BF16__
#include "floating_point.h"
#else
#include "fixed_point.h"
#endif

namespace {

#ifdef __AVX512BF16__
void multiply(const Matrix& m, const Element* x, int64_t rows, const Output& to) {
    const bool may = kMayHaveTiles && (m.rounds ? m.groups == 1 : kPairs) && has_tiles();
    const auto of_panel = m.rounds ? multiply_integers : m.bits == 4 ? multiply_panel<4> : multiply_panel<8>;
    for (int64_t row = 0; row < rows; row += kPanel) {
        const int64_t count = std::min(kPanel, rows - row);
        of_panel(m, x + row * m.inputs, count, m.inputs, to.from(row), may && count >= m.least_tiled);
    }
}

#else
void multiply(const Matrix& m, const Element* x, int64_t rows, const Output& to) {
    const auto of_panel = m.bits == 8 ? multiply_fixed<8, false> : m.table ? multiply_fixed<4, true> : multiply_fixed<4, false>;
    for (int64_t row = 0; row < rows; row += kPanel)
        of_panel(m, x + row * m.inputs, std::min(kPanel, rows - row), to.from(row));
}
#endif

}  // namespace

extern "C" {

// Whether activations become fixed point, and codes of 4 bits may have a table.
int64_t is_fixed_point() { return !kMultipliesPairs; }

// See `Multiply`.
void linear(const Matrix* m, const Element* x, const Element* bias, const Element* residual, void* out, int64_t rows,
            int64_t wide) {
    multiply(*m, x, rows, {bias, residual, out, m->outputs, wide != 0});
}

}  // extern "C"
