// Products of quantized weights where the processor multiplies BFloat16: codes become numbers in the first cache, or in
// registers. Integers of 8 bits are multiplied as they are.

#pragma once

#include "matrix.h"

constexpr int kFew = 12;        // rows whose sums fit into registers
constexpr int64_t kAhead = 16;  // words that are fetched before they are used
constexpr bool kPairs = sizeof(Element) == 2;

// Returns the numbers of codes in the lowest bits.
template <int BITS>
inline Vector to_number(Codes codes) {
    if constexpr (BITS == 4) {
        const Vector numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return (Vector)_mm512_permutexvar_ps((__m512i)codes, (__m512)numbers);
    }
    return to_float((Integers)(codes & ((1 << BITS) - 1)));
}

inline void fetch(const uint32_t* codes) {
    __builtin_prefetch(codes + kAhead * kBlock);
    __builtin_prefetch(codes + kAhead * kBlock + kLane);
}

// out[words of x, width] = the numbers of `count` words of codes from `first`, where the block has `width` columns.
template <int BITS>
void dequantize(const Matrix& m, int64_t block, int64_t first, int64_t count, bool scaled, float* out, int64_t width) {
    const Vector none = {}, unit = none + 1.0f;
    for (int64_t i = first; i < first + count;) {
        const int64_t group = i / m.group_words;
        const int64_t end = std::min(first + count, group < m.groups ? (group + 1) * m.group_words : m.words);
        Vector scale[2] = {unit, unit}, shift[2] = {none - float(m.zero), none - float(m.zero)};
        if (group >= m.groups) {
            scale[0] = scale[1] = shift[0] = shift[1] = none;
        } else if (scaled) {
            const Terms terms(m, block, group);
            for (int v = 0; v < 2; ++v) scale[v] = terms.scale[v], shift[v] = terms.shift[v];
        }
        for (; i < end; ++i) {
            const uint32_t* from = m.codes + (block * m.words + i) * kBlock;
            fetch(from);
            for (int v = 0; v < 2; ++v) {
                const Codes codes = load<Codes>(from + v * kLane);
                float* to = out + (i - first) * (32 / BITS / kInWord) * width + v * kLane;
                const auto number = [&](int at) { return to_number<BITS>(codes >> at) * scale[v] + shift[v]; };
                if constexpr (kPairs) {
                    for (int j = 0; j < 16 / BITS; ++j) {
                        const int low_at = BITS == 4 ? 4 * j : 16 * j, high_at = BITS == 4 ? 16 + 4 * j : 16 * j + 8;
                        const Codes low = (Codes)number(low_at) + 0x8000, high = (Codes)number(high_at) + 0x8000;
                        const Codes pair = low >> 16 | (high & 0xffff0000u);
                        std::memcpy(to + j * width, &pair, sizeof(pair));
                    }
                } else {
                    for (int j = 0; j < 32 / BITS; ++j) {
                        const Vector one = number(BITS * j);
                        std::memcpy(to + j * width, &one, sizeof(one));
                    }
                }
            }
        }
    }
}

// A row of x, COUNT inputs at a time, with zeros after the last.
template <int64_t COUNT>
struct Steps {
    const Element* x;
    int64_t whole;
    Element rest[2][COUNT] = {};

    Steps(const Element* x, int64_t inputs) : x(x), whole(inputs / COUNT) {
        for (int64_t k = whole * COUNT; k < inputs; ++k) rest[0][k % COUNT] = x[k];
    }
    const Element* operator[](int64_t step) const { return step < whole ? x + step * COUNT : rest[step > whole]; }
};

// Copies a row in the order in which `dequantize` and `few` pair the codes of a word.
template <int BITS>
void copy_row(const Element* x, int64_t inputs, Rows<Element>& rows, int64_t r) {
    constexpr int kCodes = 32 / BITS, kIn = kStep / sizeof(Element);
    const Steps<kIn> steps(x, inputs);
    for (int64_t step = 0; step < rows.steps; ++step) {
        const Element* from = steps[step];
        Element* to = rows.at(r, step);
        for (int word = 0; word < kIn; word += kCodes)
            for (int k = 0; k < kCodes; ++k) to[word + k] = from[word + (kPairs && BITS == 4 ? k % 2 * 4 + k / 2 : k)];
    }
}

void sum_row(const Element* x, int64_t inputs, int64_t group, float* sums) {
    for (int64_t first = 0; first < inputs; first += group) {
        float sum = 0;
        for (int64_t k = first; k < std::min(inputs, first + group); ++k) sum += float(x[k]);
        sums[first / group] = sum;
    }
}

inline Integers add_dot(Integers sum, Codes codes, Codes x) {
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
}

inline float largest_of(Integers bits) {
    int32_t largest = 0;
    for (int i = 0; i < kLane; ++i) largest = std::max(largest, int32_t(bits[i]));
    return load<float>(&largest);
}

inline void round_lane(Vector numbers, int8_t* to) {
    const __m128i found = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32((__m512)numbers));
    std::memcpy(to, &found, sizeof(found));
}

// Rounds a row to integers from -128 to 127, of which the largest stands for 127.5 (compressed-tensors' symmetric scale).
void round_row(const Matrix& m, const Element* x, int64_t inputs, Rows<int8_t>& rows, int64_t r) {
    const Steps<kStep> from(x, inputs);
    Integers largest = {};  // a float's bits without its sign, so that NaN is the largest of all
    for (int64_t step = 0; step < rows.steps; ++step)
        for (int64_t k = 0; k < kStep; k += kLane) {
            const Integers bits = (Integers)widen(from[step] + k) & 0x7fffffff;
            largest = bits > largest ? bits : largest;
        }
    const float most = largest_of(largest);
    rows.scales[r] = most / 127.5f;
    const float inverse = most != 0 ? 127.50003f / most : 0.0f;  // the largest is never rounded to 127.49
    for (int64_t step = 0; step < rows.steps; ++step)
        for (int64_t k = 0; k < kStep; k += kLane) round_lane(widen(from[step] + k) * inverse, rows.at(r, step) + k);
    int32_t* sums = reinterpret_cast<int32_t*>(&rows.sums[r * m.groups]);
    if (m.groups == 1) {
        Integers sum = {};
        const Codes ones = Codes{} + 0x01010101u;
        for (int64_t step = 0; step < rows.steps; ++step) sum = add_dot(sum, ones, load<Codes>(rows.at(r, step)));
        sums[0] = 0;
        for (int i = 0; i < kLane; ++i) sums[0] += sum[i];
        return;
    }
    std::fill(sums, sums + m.groups, 0);
    for (int64_t word = 0; word < m.groups * m.group_words; ++word) {
        const int8_t* four = rows.at(r, word * 4 / kStep) + word * 4 % kStep;
        sums[word / m.group_words] += four[0] + four[1] + four[2] + four[3];
    }
}

// Returns the j-th pair of inputs of words of codes, as BFloat16, without scale.
template <int BITS>
inline Vector pair(Codes codes, int j) {
    const int low_at = BITS == 4 ? 4 * j : 16 * j, high_at = BITS == 4 ? 16 + 4 * j : 16 * j + 8;
    if constexpr (BITS == 4) {  // looks 32 numbers up by 5 bits each, of which the last is the next code's
        alignas(32) static constexpr uint16_t kNumbers[16] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                                                              0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130,
                                                              0x4140, 0x4150, 0x4160, 0x4170};
        const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)kNumbers));
        return (Vector)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)codes, low_at), table);
    }
    return (Vector)((Codes)to_number<BITS>(codes >> low_at) >> 16 | (Codes)to_number<BITS>(codes >> high_at));
}

// sums[R, 32] = the product of R rows with a block.
template <int BITS, int R>
void few(const Matrix& m, int64_t block, Rows<Element>& rows, int64_t row, float* sums) {
    constexpr int kCount = 16 / BITS, kChains = R == 1 ? kCount : R <= 3 ? 2 : 1;  // sums that wait for each other
    const int64_t stride = rows.steps * kLane;
    const float* x = reinterpret_cast<const float*>(rows.at(row, 0));
    const uint32_t* from = m.codes + block * m.words * kBlock;
    std::fill(sums, sums + R * kBlock, 0.0f);
    for (int64_t group = 0; group < m.groups; ++group) {
        Vector held[kChains][R][2] = {};
        for (int64_t i = 0; i < m.group_words; ++i, from += kBlock, x += kCount) {
            fetch(from);
            const Codes codes[2] = {load<Codes>(from), load<Codes>(from + kLane)};
            for (int j = 0; j < kCount; ++j) {
                const Vector w[2] = {pair<BITS>(codes[0], j), pair<BITS>(codes[1], j)};
                for (int r = 0; r < R; ++r) {
                    const Vector one = x[r * stride + j] - Vector{};
                    for (int v = 0; v < 2; ++v)
                        held[j % kChains][r][v] = add_product(held[j % kChains][r][v], one, w[v]);
                }
            }
        }
        const Terms terms(m, block, group);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < 2; ++v) {
                Vector sum = held[0][r][v];
                for (int chain = 1; chain < kChains; ++chain) sum += held[chain][r][v];
                float* to = sums + r * kBlock + v * kLane;
                sum = read(to) + sum * terms.scale[v] + rows.sums[(row + r) * m.groups + group] * terms.shift[v];
                std::memcpy(to, &sum, sizeof(sum));
            }
    }
}
inline Vector number_of(const Matrix& m, Integers dot, int32_t x_sum, Vector scale, Vector shift) {
    if (m.offsets) return to_float(dot) * scale + float(x_sum) * shift;
    return to_float(dot - int32_t(m.zero) * x_sum) * scale;
}

// sums[R, 32] = the product of R rows of integers with a block.
template <int R>
void few_integers(const Matrix& m, int64_t block, Rows<int8_t>& rows, int64_t row, float* sums) {
    const int64_t stride = rows.steps * kStep;
    const int8_t* x = rows.at(row, 0);
    const uint32_t* from = m.codes + block * m.words * kBlock;
    std::fill(sums, sums + R * kBlock, 0.0f);
    for (int64_t group = 0; group < m.groups; ++group) {
        Integers held[R][2] = {};
        for (int64_t i = 0; i < m.group_words; ++i, from += kBlock, x += 4) {
            fetch(from);
            const Codes codes[2] = {load<Codes>(from), load<Codes>(from + kLane)};
            for (int r = 0; r < R; ++r) {
                const Codes four = Codes{} + load<uint32_t>(x + r * stride);
                for (int v = 0; v < 2; ++v) held[r][v] = add_dot(held[r][v], codes[v], four);
            }
        }
        const Terms terms(m, block, group);
        for (int r = 0; r < R; ++r) {
            const int32_t x_sum = load<int32_t>(&rows.sums[(row + r) * m.groups + group]);
            for (int v = 0; v < 2; ++v) {
                float* to = sums + r * kBlock + v * kLane;
                const Vector sum = number_of(m, held[r][v], x_sum, terms.scale[v], terms.shift[v]);
                const Vector all = read(to) + rows.scales[row + r] * sum;
                std::memcpy(to, &all, sizeof(all));
            }
        }
    }
}

template <class Number>
using Few = void (*)(const Matrix&, int64_t, Rows<Number>&, int64_t, float*);

template <int BITS, class Number, int... R>
Few<Number> few_of(int64_t count, std::integer_sequence<int, R...>) {
    if constexpr (sizeof(Number) == 1) {
        static constexpr Few<Number> of[] = {few_integers<R + 1>...};
        return of[count - 1];
    } else {
        static constexpr Few<Number> of[] = {few<BITS, R + 1>...};
        return of[count - 1];
    }
}

// All rows, a few at a time: each reads all weights, from the second cache after the first time.
template <int BITS, class Number>
void by_few(const Matrix& m, Rows<Number>& rows, int64_t count, const Output& to) {
    const int64_t blocks = (m.outputs + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t row = 0; row < count; row += kFew) {
            alignas(64) float sums[kFew * kBlock];
            const int64_t some = std::min<int64_t>(kFew, count - row);
            few_of<BITS, Number>(some, std::make_integer_sequence<int, kFew>())(m, block, rows, row, sums);
            for (int64_t r = 0; r < some; ++r) to.write(sums + r * kBlock, row + r, block * kBlock, kBlock);
        }
}

// Weights become numbers in the first cache, for all rows.
template <int BITS>
void by_numbers(const Matrix& m, Rows<Element>& rows, int64_t count, const Output& to) {
    constexpr int64_t kCodeWords = kWords * kInWord * BITS / 32;
    const int64_t blocks = (m.outputs + kBlock - 1) / kBlock, words = rows.steps * kLane;
    const float* x = reinterpret_cast<const float*>(rows.at(0, 0));
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; block += 2) {
        alignas(64) float sums[kPanel * kOutputs], numbers[kWords * kOutputs];
        std::fill(sums, sums + count * kOutputs, 0.0f);
        for (int64_t i = 0; i < m.words; i += kCodeWords) {
            const int64_t some = std::min(kCodeWords, m.words - i), done = i / kCodeWords * kWords;
            for (int64_t half = 0; half < std::min<int64_t>(2, blocks - block); ++half)
                dequantize<BITS>(m, block + half, i, some, true, numbers + half * kBlock, kOutputs);
            multiply_rows<64>(x + done, words, numbers, some * 32 / BITS / kInWord, sums, count, false);
        }
        for (int64_t r = 0; r < count; ++r) to.write(sums + r * kOutputs, r, block * kBlock, kOutputs);
    }
}

constexpr int64_t kMostSteps = 9;
alignas(64) thread_local float made[kMostSteps * kTile * kBlock];  // numbers, 18 KB

// All rows in tiles: integers as they lie, numbers made in the first cache.
template <int BITS, class Number>
void quantized_by_tiles(const Matrix& m, Rows<Number>& rows, int64_t count, const Output& to) {
    constexpr bool kIntegers = sizeof(Number) == 1;
    constexpr int64_t kStepWords = kIntegers ? kTile : BITS;  // words of codes in a step: 64 / 4, or 32 * BITS / 32
    const bool scaled = m.groups > 1 || m.offsets;
    const auto weights = [&](int64_t block, int64_t, int64_t first, int64_t some) -> const void* {
        if constexpr (kIntegers) return m.codes + (block * m.words + first * kStepWords) * kBlock;
        dequantize<BITS>(m, block, first * kStepWords, some * kStepWords, scaled, made, kBlock);
        return made;
    };
    const auto finish = [&](int64_t block, int64_t r, float* row) {
        const Terms terms(m, block, 0);
        for (int v = 0; v < 2; ++v) {
            Vector sum = read(row + v * kLane);
            if constexpr (kIntegers) {
                const int32_t x_sum = load<int32_t>(&rows.sums[r]);
                sum = rows.scales[r] * number_of(m, (Integers)sum, x_sum, terms.scale[v], terms.shift[v]);
            } else if (!scaled) {
                sum *= terms.scale[v];
            }
            std::memcpy(row + v * kLane, &sum, sizeof(sum));
        }
        to.write(row, r, block * kBlock, kBlock);
    };
    const int64_t at_once = kIntegers ? rows.steps : count <= 2 * kTile ? 4 : kMostSteps;
    by_tiles(rows, count, (m.outputs + kBlock - 1) / kBlock, at_once, kIntegers, to, weights, finish);
}

template <int BITS>
void multiply_panel(const Matrix& m, const Element* x, int64_t count, int64_t inputs, const Output& to, bool tiled) {
    auto rows = make_rows<Element>(count, m.words * 32 / BITS * sizeof(Element) / kStep, m.groups, tiled);
#pragma omp parallel for if (count > kFew)
    for (int64_t r = 0; r < count; ++r) copy_row<BITS>(x + r * inputs, inputs, rows, r);
    if (tiled) return quantized_by_tiles<BITS>(m, rows, count, to);
    if constexpr (kPairs)
        if (count <= kFew) {
            const int64_t group = m.group_words * 32 / BITS;
            for (int64_t r = 0; r < count; ++r) sum_row(x + r * inputs, inputs, group, &rows.sums[r * m.groups]);
            return by_few<BITS>(m, rows, count, to);
        }
    by_numbers<BITS>(m, rows, count, to);
}

void multiply_integers(const Matrix& m, const Element* x, int64_t count, int64_t inputs, const Output& to, bool tiled) {
    auto rows = make_rows<int8_t>(count, m.words * 4 / kStep, m.groups, tiled);
#pragma omp parallel for if (count > kFew)
    for (int64_t r = 0; r < count; ++r) round_row(m, x + r * inputs, inputs, rows, r);
    if (tiled) return quantized_by_tiles<8>(m, rows, count, to);
    by_few<8>(m, rows, count, to);
}
