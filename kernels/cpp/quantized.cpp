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

// out[count, in_size] = the rows `ids` of the weight.
void rows(const Matrix* m, const int64_t* ids, Element* out, int64_t count, int64_t in_size) {
    const int64_t in_word = 32 / m->bits, group = in_size / m->groups;
    const auto term = [&](const void* from, int64_t at) { return read_scales(from, at - at % kLane, m->halves)[at % kLane]; };
#pragma omp parallel for if (count > 4)
    for (int64_t r = 0; r < count; ++r) {
        const int64_t block = ids[r] / kBlock, lane = ids[r] % kBlock;
        Element* to = out + r * in_size;
        for (int64_t g = 0; g < m->groups; ++g) {
            const int64_t at = (block * m->groups + g) * kBlock + lane;
            const float scale = term(m->scales, at), offset = m->offsets ? term(m->offsets, at) : 0.0f;
            const int64_t zero = m->offsets ? 0 : m->zero;
            const uint32_t* words = m->codes + (block * m->words + g * m->group_words) * kBlock + lane;
            for (int64_t k = 0; k < group; ++k) {
                const uint32_t code = words[k / in_word * kBlock] >> k % in_word * m->bits & ((1u << m->bits) - 1);
                *to++ = scale * float((m->table ? m->table[code] : code) - zero) + offset;
            }
        }
    }
}

}  // extern "C"
