// A weight in codes of 8 or 4 bits, for the products of `quantized.cpp`.
//
// A word of codes is 32 bits, four or eight neighbouring inputs of an output, the first in the lowest bits. For each block
// of 32 outputs, the weight holds word after word, the words of all its outputs side by side.

#pragma once

#include "tiles.h"

struct Matrix {
    const uint32_t* codes;  // [blocks, words, 32]; the inputs of a block's words are a multiple of 64
    const void* scales;     // [blocks, groups, 32], float or, where `halves`, its half precision
    const void* offsets;    // as scales, or null
    const uint8_t* table;   // the numbers of 16 codes; null: a code is its number
    int64_t outputs, words, groups, group_words, bits, halves, zero;
    int64_t inputs;       // of a row of x
    int64_t rounds;       // whether x is rounded to integers of 8 bits first
    int64_t least_tiled;  // rows; fewer do without tiles
};

constexpr int kBlockVectors = kBlock / kLane;

inline Vector read_scales(const void* from, int64_t at, bool halves) {
    return halves ? widen_halves((const uint16_t*)from + at) : read((const float*)from + at);
}

// Of a block's group: what multiplies the sum of x * code, and what multiplies the sum of x.
struct Terms {
    Vector scale[kBlockVectors], shift[kBlockVectors];

    Terms(const Matrix& m, int64_t block, int64_t group) {
        for (int v = 0; v < kBlockVectors; ++v) {
            const int64_t at = (block * m.groups + group) * kBlock + v * kLane;
            scale[v] = read_scales(m.scales, at, m.halves);
            shift[v] = m.offsets ? read_scales(m.offsets, at, m.halves) : scale[v] * -float(m.zero);
        }
    }
};

inline Vector to_float(Integers numbers) { return __builtin_convertvector(numbers, Vector); }
