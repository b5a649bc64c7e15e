// What products with blocks of 32 outputs share: rows of x in the order in which they are read, and of sums to write.

#pragma once

#include <vector>

#include "few_rows.h"

constexpr int64_t kBlock = 32;              // outputs
constexpr int64_t kTile = 16, kStep = 64;  // rows of a tile of AMX, and bytes of each

struct alignas(kStep) Line {  // a step's bytes of a row, in a line of the cache
    char bytes[kStep];
};

// Where a step of a row lies, of rows of so many `steps`: those of a tile follow each other, step after step, where `tiled`.
inline int64_t place(int64_t r, int64_t step, int64_t steps, bool tiled) {
    return tiled ? (r / kTile * steps + step) * kTile + r % kTile : r * steps + step;
}

// Rows of x, each padded with zeros to `steps` times 64 bytes, and their sums by group.
template <class Number>
struct Rows {
    int64_t steps, groups;
    bool tiled;
    std::vector<Line>& memory;
    std::vector<float>& sums;    // [rows, groups]
    std::vector<float>& scales;  // [rows], of integers

    Number* at(int64_t r, int64_t step) {
        return reinterpret_cast<Number*>(memory.data() + place(r, step, steps, tiled));
    }
};

template <class Number>
Rows<Number> make_rows(int64_t rows, int64_t steps, int64_t groups, bool tiled) {
    static thread_local std::vector<Line> memory;
    static thread_local std::vector<float> sums, scales;
    const int64_t padded = (rows + kTile - 1) / kTile * kTile;
    memory.resize(std::max<int64_t>(memory.size(), padded * steps));
    sums.resize(std::max<int64_t>(sums.size(), rows * groups));
    scales.resize(std::max<int64_t>(scales.size(), rows));
    return {steps, groups, tiled, memory, sums, scales};
}

// The form of products: out[rows, outputs] = x[rows, inputs] @ weight^T + bias[outputs] + residual[rows, outputs]; bias and
// residual may be null, and the latter may be `out`. With `wide`, `out` is of floats. `product.py` calls them.
typedef void (*Multiply)(const void* weight, const Element* x, const Element* bias, const Element* residual, void* out,
                         int64_t rows, int64_t wide);

// Writes a row of a block's sums, [width], with bias and residual, which may be null: to `out`, or to `wide` where it is
// not null.
struct Output {
    const Element *bias, *residual;
    Element* out;
    int64_t outputs;
    float* wide = nullptr;

    Output(const Element* bias, const Element* residual, void* out, int64_t outputs, bool wide = false)
        : bias(bias), residual(residual), out((Element*)out), outputs(outputs), wide(wide ? (float*)out : nullptr) {}

    Output from(int64_t row) const {
        const int64_t at = row * outputs;
        void* first = wide ? (void*)(wide + at) : out + at;
        return {bias, residual ? residual + at : nullptr, first, outputs, wide != nullptr};
    }

    void fetch(int64_t r, int64_t first) const { __builtin_prefetch(out + r * outputs + first, 1); }

    void write(const float* sums, int64_t r, int64_t first, int64_t width) const {
        const int64_t at = r * outputs + first, count = std::min(width, outputs - first);
        int64_t o = 0;
        for (; o + kLane <= count; o += kLane) {
            Vector sum = read(sums + o);
            if (bias) sum += widen(bias + first + o);
            if (residual) sum += widen(residual + at + o);
            if (wide)
                narrow(sum, wide + at + o);
            else
                narrow(sum, out + at + o);
        }
        for (; o < count; ++o) {
            const float sum =
                sums[o] + (bias ? float(bias[first + o]) : 0.0f) + (residual ? float(residual[at + o]) : 0.0f);
            if (wide)
                wide[at + o] = sum;
            else
                out[at + o] = sum;
        }
    }
};
