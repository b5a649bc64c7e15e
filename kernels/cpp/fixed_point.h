// Products of quantized weights with activations in fixed point: of 16 bits, or 8 where a model rounds them so.
//
// Where the processor has no fast product of BFloat16, the product of 16-bit integers is twice as fast as that of floats.
// Each row of x is rounded to 16 bits with a scale for each part of a group. Sums of codes with them are exact, and an
// error is at most 2^-16 of the largest number of its part.

#pragma once

#include <cmath>
#include <vector>

#include "matrix.h"

constexpr int64_t kMostPart = 128;                     // inputs of a part: sums of its codes fit into 32 bits
constexpr int kFixedRows = kRegisters == 32 ? 8 : 4;  // whose sums stay in registers, with two vectors of outputs
constexpr int64_t kRowsAtOnce = 64;                   // whose sums and inputs of a part stay in the first cache

constexpr int64_t kAheadWords = 32;  // words of codes that are fetched before they are used

typedef int16_t Fixed;
typedef Fixed FixedPairs __attribute__((vector_size(kLane * 4)));

// Keeps a sum in its register: compilers add up other terms first, for which there is no room.
inline Integers keep(Integers sum) {
#ifdef __ARM_NEON
    asm("" : "+w"(sum));
#elif defined(__AVX512F__)
    asm("" : "+v"(sum));
#else
    asm("" : "+x"(sum));
#endif
    return sum;
}

// sums + a * b of the two halves of each lane.
inline Integers add_pairs(Integers sums, Codes a, Codes b) {
#if defined(__AVX512VNNI__)
    return (Integers)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sums + (Integers)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
    return (Integers)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
    return sums + (Integers)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    const Integers x = (Integers)a, y = (Integers)b;
    return sums + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

// The numbers of 16 codes, or of none.
struct Table {
    Codes numbers;

    explicit Table(const uint8_t* from) {
        uint8_t all[sizeof(Codes)] = {};
        if (from)
            for (size_t i = 0; i < sizeof(all); ++i) all[i] = from[i % 16];
        numbers = load<Codes>(all);
    }
    // Of codes in the lowest bits of both halves of each lane.
    Codes operator[](Codes codes) const {
#if defined(__AVX512BW__)
        return (Codes)_mm512_shuffle_epi8((__m512i)numbers, (__m512i)(codes | 0x80008000u));
#elif defined(__AVX2__)
        return (Codes)_mm256_shuffle_epi8((__m256i)numbers, (__m256i)(codes | 0x80008000u));
#elif defined(__ARM_NEON)
        return (Codes)vqtbl1q_u8((uint8x16_t)numbers, (uint8x16_t)(codes | 0x80008000u));
#endif
    }
};

// The j-th pair of codes of each word: inputs j and j + 4 of 8, or j and j + 2 of 4.
template <int BITS, bool TABLE>
inline Codes pair_of(Codes word, int j, const Table& table) {
    if constexpr (BITS == 8) return word >> (8 * j) & 0x00ff00ffu;
    const Codes codes = word >> (4 * j) & 0x000f000fu;
    return TABLE ? table[codes] : codes;
}

// What a part of a row is in fixed point.
struct Part {
    float scale, sum;   // the sum of the part
    int32_t from_zero;  // the code of zero times the sum of the integers
};

// Rows of x, in parts that lie within the groups of a matrix. Those of a tile lie side by side, pair after pair.
struct FixedRows {
    int64_t count, tile;                   // rows, and rows of a tile
    int64_t part_words, parts, per_group;  // words of codes of a part, parts of a row, and parts of a group
    int64_t part_pairs;
    uint32_t* pairs;
    Part* of_parts;  // [rows, parts]

    int64_t rows_of(int64_t first) const { return std::min(tile, count - first); }
    uint32_t* at(int64_t first, int64_t part) const {
        return pairs + (first * parts + part * rows_of(first)) * part_pairs;
    }
};

template <int BITS>
FixedRows make_fixed(const Matrix& m, int64_t rows) {
    static thread_local std::vector<uint32_t> memory;
    static thread_local std::vector<Part> of_parts;
    int64_t part = std::min(m.group_words, kMostPart * BITS / 32);
    while (m.group_words % part) --part;
    const int64_t parts = m.groups * m.group_words / part;
    const int64_t part_pairs = part * (16 / BITS), tiles = (rows + kFixedRows - 1) / kFixedRows;
    memory.resize(std::max<int64_t>(memory.size(), rows * parts * part_pairs));
    of_parts.resize(std::max<int64_t>(of_parts.size(), rows * parts));
    const int64_t tile = (rows + tiles - 1) / tiles;
    return {rows, tile, part, parts, m.group_words / part, part_pairs, memory.data(), of_parts.data()};
}

// The largest magnitude of numbers; NaN is larger than all.
inline float largest_of(const float* from, int64_t count) {
    int32_t largest = 0;  // a float's bits without its sign
#pragma omp simd reduction(max : largest)
    for (int64_t k = 0; k < count; ++k) largest = std::max(largest, load<int32_t>(from + k) & 0x7fffffff);
    return load<float>(&largest);
}

// Rounds a row: with a scale for all of it, to integers from -128 to 127 of which the largest stands for 127.5
// (compressed-tensors' symmetric scale), or with one for each part, to 16 bits.
template <int BITS>
void fix_row(const Matrix& m, const Element* x, int64_t inputs, bool to_8_bits, const FixedRows& rows, int64_t r) {
    constexpr int kCodes = 32 / BITS;
    const int64_t part = rows.part_words * kCodes, whole = rows.parts * part;
    static thread_local std::vector<float> numbers;
    numbers.resize(std::max<int64_t>(numbers.size(), whole));
    for (int64_t k = 0; k < whole; ++k) numbers[k] = k < inputs ? float(x[k]) : 0.0f;
    const float row_most = to_8_bits ? largest_of(numbers.data(), whole) : 0.0f;
    const int64_t first = r / rows.tile * rows.tile, side = rows.rows_of(first);
    for (int64_t p = 0; p < rows.parts; ++p) {
        uint32_t* to = rows.at(first, p) + (r - first);
        float* own = numbers.data() + p * part;
        const float most = to_8_bits ? row_most : largest_of(own, part);
        const float unit = to_8_bits ? 127.5f : 32767.0f, least = to_8_bits ? -128.0f : -32767.0f;
        // The largest is never rounded to 127.49.
        const float inverse = most == 0 ? 0.0f : (to_8_bits ? 127.50003f : 32767.0f) / most, highest = to_8_bits ? 127.0f : 32767.0f;
        Fixed fixed[kMostPart];
        int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < part; ++k) {
            const int32_t one = int32_t(std::nearbyint(std::max(least, std::min(highest, own[k] * inverse))));
            fixed[k] = Fixed(one);
            sum += one;
        }
        for (int64_t word = 0; word < part; word += kCodes)
            for (int j = 0; j < kCodes / 2; ++j)
                to[(word / 2 + j) * side] = uint16_t(fixed[word + j]) | uint32_t(uint16_t(fixed[word + j + kCodes / 2])) << 16;
        const float scale = most / unit;
        rows.of_parts[r * rows.parts + p] = {scale, scale * float(sum), int32_t(m.zero) * sum};
    }
}

// sums[R, 32] += the product of a part of R rows with VECTORS vectors of outputs of a block, from the first of them on.
// `pairs(i, j, v)` is the j-th pair of the i-th word of codes.
template <int BITS, int R, int VECTORS, class Pairs>
inline void add_part(const FixedRows& rows, int64_t row, int64_t part, const Vector* scale, const Vector* shift,
                     float* sums, Pairs pairs) {
    constexpr int kPairs = 16 / BITS;
    const uint32_t* x = rows.at(row, part);
    const int64_t words = rows.part_words;
    Integers held[R][VECTORS] = {};
    for (int64_t i = 0; i < words; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < kPairs; ++j, x += R) {
            Codes w[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) w[v] = pairs(i, j, v);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const Codes one = Codes{} + x[r];
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) {
                    held[r][v] = keep(add_pairs(held[r][v], w[v], one));
                }
            }
        }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const Part& own = rows.of_parts[(row + r) * rows.parts + part];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            float* to = sums + r * kBlock + v * kLane;
            Vector sum = read(to);
            if (shift) {
                sum += own.sum * shift[v] + to_float(held[r][v]) * (own.scale * scale[v]);
            } else {
                sum += to_float(held[r][v] - own.from_zero) * (own.scale * scale[v]);
            }
            std::memcpy(to, &sum, sizeof(sum));
        }
    }
}

// sums[count, 32] = the product of rows with a block. Codes become pairs once for all rows.
template <int BITS, bool TABLE>
struct FixedBlock {
    static constexpr int kPairs = 16 / BITS;
    const Matrix& m;
    const FixedRows& rows;
    const Table table{m.table};
    alignas(64) uint32_t pairs[kMostPart / 2 * 2 * kLane];  // of a part, of two vectors of outputs

    template <int R, int VECTORS>
    void few(int64_t row, int64_t part, const uint32_t* codes, const Vector* scale, const Vector* shift, float* sums) {
        for (int64_t v = 0; v < kBlockVectors; v += VECTORS)
            add_part<BITS, R, VECTORS>(rows, row, part, scale + v, shift ? shift + v : nullptr, sums + v * kLane,
                                       [&](int64_t i, int j, int64_t of) {
                                           const auto word = load<Codes>(codes + i * kBlock + (v + of) * kLane);
                                           return pair_of<BITS, TABLE>(word, j, table);
                                       });
    }

    template <int R = kFixedRows>
    void tile(int64_t count, int64_t row, int64_t part, const Vector* scale, const Vector* shift, float* sums) {
        if (R > 1 && count < R) return tile<R == 1 ? 1 : R - 1>(count, row, part, scale, shift, sums);
        add_part<BITS, R, 2>(rows, row, part, scale, shift, sums, [&](int64_t i, int j, int64_t v) {
            return load<Codes>(pairs + ((i * kPairs + j) * 2 + v) * kLane);
        });
    }

    void many(int64_t count, int64_t row, int64_t part, const uint32_t* codes, const Vector* scale, const Vector* shift,
              float* sums) {
        for (int64_t v = 0; v < kBlockVectors; v += 2) {
            for (int64_t i = 0; i < rows.part_words; ++i)
                for (int of = 0; of < 2; ++of) {
                    const auto word = load<Codes>(codes + i * kBlock + (v + of) * kLane);
#pragma GCC unroll 4
                    for (int j = 0; j < kPairs; ++j) {
                        const Codes pair = pair_of<BITS, TABLE>(word, j, table);
                        std::memcpy(pairs + ((i * kPairs + j) * 2 + of) * kLane, &pair, sizeof(pair));
                    }
                }
            for (int64_t r = 0; r < count; r += rows.tile)
                tile(rows.rows_of(row + r), row + r, part, scale + v, shift ? shift + v : nullptr,
                     sums + r * kBlock + v * kLane);
        }
    }

    void multiply(int64_t block, int64_t row, int64_t count, float* sums) {
        std::fill(sums, sums + count * kBlock, 0.0f);
        const uint32_t* codes = m.codes + block * m.words * kBlock;
        for (int64_t part = 0; part < rows.parts; ++part, codes += rows.part_words * kBlock) {
            const Terms terms(m, block, part / rows.per_group);
            const Vector* shift = m.offsets ? terms.shift : nullptr;
            if (count <= kFixedRows)  // which wait for memory
                for (int64_t i = 0; i < rows.part_words * kBlock; i += kLineLanes)
                    __builtin_prefetch(codes + kAheadWords * kBlock + i);
            switch (count) {
                case 1: few<1, kBlockVectors>(row, part, codes, terms.scale, shift, sums); break;
                case 2: few<2, kBlockVectors>(row, part, codes, terms.scale, shift, sums); break;
                case 3: few<3, 2>(row, part, codes, terms.scale, shift, sums); break;
                case 4: few<4, 2>(row, part, codes, terms.scale, shift, sums); break;
                default: many(count, row, part, codes, terms.scale, shift, sums);
            }
        }
    }
};

template <int BITS, bool TABLE>
void multiply_fixed(const Matrix& m, const Element* x, int64_t count, int64_t inputs, bool to_8_bits, const Output& to) {
    const FixedRows rows = make_fixed<BITS>(m, count);
    const int64_t at_once = kRowsAtOnce / rows.tile * rows.tile;
#pragma omp parallel for if (count > 4)
    for (int64_t r = 0; r < count; ++r) fix_row<BITS>(m, x + r * inputs, inputs, to_8_bits, rows, r);
    const int64_t blocks = (m.outputs + kBlock - 1) / kBlock;
#pragma omp parallel
    {
        FixedBlock<BITS, TABLE> of{m, rows};
        alignas(64) float sums[kRowsAtOnce * kBlock];
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; ++block)
            for (int64_t row = 0; row < count; row += at_once) {
                const int64_t some = std::min(at_once, count - row);
                of.multiply(block, row, some, sums);
                for (int64_t r = 0; r < some; ++r) to.write(sums + r * kBlock, row + r, block * kBlock, kBlock);
            }
    }
}
