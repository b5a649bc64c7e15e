// What the operators of a decoder layer share: the numbers of the KV cache.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "element.h"
#include "exponential.h"

inline int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// Numbers of a KV cache in 8 bits, to be multiplied by the scale of their row. As `BFloat16`, they take the nearest.
struct Int8 {
    static constexpr float kMost = 127.0f;
    int8_t bits;
    void operator=(float x) { bits = static_cast<int32_t>(std::nearbyint(x)); }
    operator float() const { return bits; }
};

struct Float8 {  // e4m3 of OCP's 8-bit floating point specification: 4 bits of exponent with a bias of 7, no infinity
    static constexpr float kMost = 448.0f;
    uint8_t bits;
    void operator=(float x) {
        uint32_t word;
        std::memcpy(&word, &x, sizeof(word));
        const uint32_t sign = word >> 24 & 0x80, whole = word & 0x7fffffff;
        const uint32_t normal = ((whole + 0x7ffff + (whole >> 20 & 1)) >> 20) - (120 << 3);
        const uint32_t subnormal = static_cast<int32_t>(std::nearbyint(std::fabs(x) * 512.0f));
        bits = sign | (whole < 121u << 23 ? subnormal : normal);
    }
    operator float() const {
        const uint32_t whole = bits & 0x7f, word = (whole << 20) + (120u << 23);
        float normal;
        std::memcpy(&normal, &word, sizeof(normal));
        const float size = whole < 8 ? static_cast<int32_t>(whole) / 512.0f : normal;
        return bits & 0x80 ? -size : size;
    }
};

// A row of the cache has a head's D numbers. One of 8 bits has their scale behind them, a float, at a multiple of 4.
template <class C>
constexpr bool kHasScale = sizeof(C) == 1;

template <class C>
inline int64_t row_width(int64_t D) {
    return kHasScale<C> ? padded(D, 4) + 4 : D;
}

template <class C>
inline float row_scale(const C* row, int64_t D) {
    float scale = 1.0f;
    if (kHasScale<C>) std::memcpy(&scale, row + padded(D, 4), sizeof(scale));
    return scale;
}

// Writes D floats to a row. Of any that is not finite, all become NaN.
template <class C>
inline void write_row(const float* from, C* row, int64_t D) {
    float scale = 1.0f;
    if constexpr (kHasScale<C>) {
        int32_t bits = 0;  // of the largest; of what is not finite they are larger than of any number
#pragma omp simd reduction(max : bits)
        for (int64_t d = 0; d < D; ++d) {
            int32_t word;
            std::memcpy(&word, from + d, sizeof(word));
            bits = std::max(bits, word & 0x7fffffff);
        }
        float most;
        std::memcpy(&most, &bits, sizeof(most));
        const bool is_finite = bits < 0x7f800000;
        scale = is_finite ? most / C::kMost : std::numeric_limits<float>::quiet_NaN();
        std::memcpy(row + padded(D, 4), &scale, sizeof(scale));
        scale = is_finite && most > 0.0f ? C::kMost / most : 0.0f;
    }
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) row[d] = scale * from[d];
}

// Calls `run` with a number of the kind that `cpp.py` names.
template <class Run>
inline void with_kind(int64_t kind, Run run) {
    if (kind == 0) run(Element{});
    if (kind == 1) run(Int8{});
    if (kind == 2) run(Float8{});
}
