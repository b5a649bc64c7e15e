// The product of few rows with a block of words of weights (`element.h`), the words of all its outputs side by side.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "vectors.h"

constexpr int64_t kOutputs = 64, kVectors = kOutputs / kLane;
// Rows whose sums stay in registers. Pairs that are widened need registers for both halves.
constexpr int kRows = kInWord == 2 && !kMultipliesPairs && kRegisters == 16 ? 4 : 6;
constexpr int64_t kWords = 64;     // of a block of weights, 16 KB, which stays in the first cache for all rows
constexpr int64_t kMostRows = 96;  // of a call

// Vectors of outputs that R rows are multiplied with at once: as many as leave registers for weights and inputs.
template <int R>
constexpr int64_t vectors_at_once() {
    constexpr int64_t fitting = (kRegisters - (kRows == 4 ? 8 : 4)) / R;
    int64_t found = kVectors;
    while (found > fitting && found > 1) found /= 2;
    return found;
}

// sums[R, 64] += x[R, count] @ weight[count, 64], of `count` words, where x has `words` a row and the weight has blocks of
// BLOCK outputs. Other weights than words are each widened to a float, and x has floats then. Every `phases`-th word, weights from `next` on are fetched: all passes over some weights together fetch the
// next ones, so that reading overlaps with computing.
template <int BLOCK, int R, class Weight>
void multiply(const float* x, int64_t words, const Weight* weight, int64_t count, const Weight* next, float* sums,
              int64_t phase, int64_t phases) {
    constexpr int64_t kSome = vectors_at_once<R>();
    const auto at = [&](int64_t i, int64_t v) {
        return weight + v * kLane / BLOCK * (words * BLOCK) + i * BLOCK + v * kLane % BLOCK;
    };
    for (int64_t first = 0; first < kVectors; first += kSome) {
        Vector held[R][kSome];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < kSome; ++v) held[r][v] = read(sums + r * kOutputs + (first + v) * kLane);
        int64_t turn = phase;
        for (int64_t i = 0; i < count; ++i) {
            if (i == turn) {
                for (int v = 0; v < kSome; v += kLineLanes / kLane)
                    __builtin_prefetch(next + (at(i, first + v) - weight));
                turn += phases;
            }
            Vector w[kSome];
            for (int v = 0; v < kSome; ++v) w[v] = widen(at(i, first + v));
            for (int r = 0; r < R; ++r) {
                const Vector one = x[r * words + i] - Vector{};
                for (int v = 0; v < kSome; ++v) {
                    if constexpr (std::is_same_v<Weight, float>)
                        held[r][v] = add_product(held[r][v], one, w[v]);
                    else
                        held[r][v] += one * w[v];
                }
            }
        }
        for (int r = 0; r < R; ++r) std::memcpy(sums + r * kOutputs + first * kLane, held[r], sizeof(held[r]));
    }
}

// The same for any number of rows. `is_last`: of the words of these outputs; those of the next ones are fetched then.
template <int BLOCK, class Weight>
void multiply_rows(const float* x, int64_t words, const Weight* weight, int64_t count, float* sums, int64_t rows,
                   bool is_last) {
    const Weight* next = weight + count * BLOCK + (is_last ? (kOutputs - BLOCK) * words : 0);
    const int64_t phases = (rows + kRows - 1) / kRows;
    for (int64_t phase = 0; phase < phases; ++phase) {
        const float* from = x + phase * kRows * words;
        float* to = sums + phase * kRows * kOutputs;
        switch (std::min<int64_t>(kRows, rows - phase * kRows)) {
            case 6: multiply<BLOCK, 6>(from, words, weight, count, next, to, phase, phases); break;
            case 5: multiply<BLOCK, 5>(from, words, weight, count, next, to, phase, phases); break;
            case 4: multiply<BLOCK, 4>(from, words, weight, count, next, to, phase, phases); break;
            case 3: multiply<BLOCK, 3>(from, words, weight, count, next, to, phase, phases); break;
            case 2: multiply<BLOCK, 2>(from, words, weight, count, next, to, phase, phases); break;
            case 1: multiply<BLOCK, 1>(from, words, weight, count, next, to, phase, phases); break;
        }
    }
}
