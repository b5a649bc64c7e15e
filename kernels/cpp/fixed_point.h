// Products of quantized weights with activations in fixed point: of 16 bits, or 8 where a model rounds them so.
//
// For processors without a fast product of BFloat16: one instruction multiplies twice as many 16-bit integers as floats.
// Each row of x is rounded to 16 bits with a scale for each part of a group. Sums of codes with them are exact, and an
// error is at most 2^-16 of the largest number of its part.

#pragma once

#include <cmath>
#include <vector>

#include "matrix.h"

constexpr int64_t kMostPart = 128;                     // inputs of a part: sums of its codes fit into 32 bits
constexpr int kFixedRows = kLane == 16 ? 8 : 4;        // whose sums stay in registers, with two vectors of outputs
constexpr int64_t kRowsAtOnce = 64;                    // whose sums and inputs of a part stay in the first cache

constexpr int kFewVectors = kBlockVectors < 4 ? kBlockVectors : 4;  // of outputs, for one row or two
constexpr int64_t kUnpackedRows = 3 * kFixedRows;  // at most: for more, codes are unpacked once
constexpr int64_t kAheadWords = 32;                // words of codes that are fetched before they are used

typedef int16_t Fixed;

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

#ifdef __ARM_FEATURE_DOTPROD
// Bytes are multiplied: the four codes of a lane with the low bytes of their inputs, and with the high ones.
constexpr int kAtOnce = 4;

struct Sums {
    Integers low = {}, high = {};

    void add(Codes codes, const uint32_t* x) {
        low = (Integers)vdotq_s32((int32x4_t)low, (int8x16_t)codes, (int8x16_t)(Codes{} + x[0]));
        high = (Integers)vdotq_s32((int32x4_t)high, (int8x16_t)codes, (int8x16_t)(Codes{} + x[1]));
    }
    Integers all() const { return low + (high << 8); }
};
#else
constexpr int kAtOnce = 2;  // inputs of a lane, of 16 bits each

struct Sums {
    Integers sums = {};

    void add(Codes a, const uint32_t* x) {
        const Codes b = Codes{} + *x;
#if defined(__AVX512VNNI__)
        sums = keep((Integers)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b));
#elif defined(__AVX512BW__)
        sums = keep(sums + (Integers)_mm512_madd_epi16((__m512i)a, (__m512i)b));
#elif defined(__AVXVNNI__)
        sums = keep((Integers)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b));
#elif defined(__AVX2__)
        sums = keep(sums + (Integers)_mm256_madd_epi16((__m256i)a, (__m256i)b));
#elif defined(__ARM_NEON)
        const int16x8_t x0 = (int16x8_t)a, x1 = (int16x8_t)b;
        const int32x4_t low = vmull_s16(vget_low_s16(x0), vget_low_s16(x1));
        sums += (Integers)vpaddq_s32(low, vmull_high_s16(x0, x1));
#endif
    }
    Integers all() const { return sums; }
};
#endif
constexpr float kMostFixed = kAtOnce == 4 ? 127 * 256 + 127 : 32767;  // whose bytes are signed
constexpr int kUnitWords = kAtOnce / 2;  // of a row's inputs that a lane of codes is multiplied with

// The numbers of 16 codes, or of none.
struct Table {
    Codes numbers;

    explicit Table(const uint8_t* from) {
        uint8_t all[sizeof(Codes)] = {};
        if (from)
            for (size_t i = 0; i < sizeof(all); ++i) all[i] = from[i % 16];
        numbers = load<Codes>(all);
    }
    // Of codes in the lowest bits of both halves, or of each byte, of each lane.
    Codes operator[](Codes codes) const {
#if defined(__AVX512BW__)
        return (Codes)_mm512_shuffle_epi8((__m512i)numbers, (__m512i)(codes | 0x80008000u));
#elif defined(__AVX2__)
        return (Codes)_mm256_shuffle_epi8((__m256i)numbers, (__m256i)(codes | 0x80008000u));
#elif defined(__ARM_NEON)
        return (Codes)vqtbl1q_u8((uint8x16_t)numbers, (uint8x16_t)(codes | (kAtOnce == 2 ? 0x80008000u : 0u)));
#endif
    }
};

// What the numbers of codes are less than they are multiplied as: bytes are signed.
template <int BITS, bool TABLE>
constexpr int32_t kLess = kAtOnce == 4 && (BITS == 8 || TABLE) ? 128 : 0;

template <int BITS>
constexpr int kUnits = 32 / BITS / kAtOnce;  // of a word

// The j-th unit of each word: of the inputs j, j + kUnits, and so on.
template <int BITS, bool TABLE>
inline Codes unit_of(Codes word, int j, const Table& table) {
    constexpr uint32_t kMask = BITS == 8 ? (kAtOnce == 4 ? 0xffffffffu : 0x00ff00ffu) : kAtOnce == 4 ? 0x0f0f0f0fu : 0x000f000fu;
    Codes codes = word >> (BITS * j) & kMask;
    if (TABLE) codes = table[codes];
    return kLess<BITS, TABLE> ? codes ^ 0x80808080u : codes;
}

// What a part of a row is in fixed point.
struct Part {
    float scale, sum;   // the sum of the part
    int32_t from_zero;  // the code of zero, as codes are multiplied, times the sum of the integers
};

// Rows of x, in parts that lie within the groups of a matrix. Those of a tile lie side by side, pair after pair.
struct FixedRows {
    int64_t count, tile;                   // rows, and rows of a tile
    int64_t part_words, parts, per_group;  // words of codes of a part, parts of a row, and parts of a group
    int64_t part_size;  // words of the inputs of a part
    uint32_t* inputs;
    Part* of_parts;  // [rows, parts]

    int64_t rows_of(int64_t first) const { return std::min(tile, count - first); }
    uint32_t* at(int64_t first, int64_t part) const {
        return inputs + (first * parts + part * rows_of(first)) * part_size;
    }
};

template <int BITS>
FixedRows make_fixed(const Matrix& m, int64_t rows) {
    static thread_local std::vector<uint32_t> memory;
    static thread_local std::vector<Part> of_parts;
    int64_t part = std::min(m.group_words, kMostPart * BITS / 32);
    while (m.group_words % part) --part;
    const int64_t parts = m.groups * m.group_words / part;
    const int64_t part_size = part * (16 / BITS), tiles = (rows + kFixedRows - 1) / kFixedRows;
    memory.resize(std::max<int64_t>(memory.size(), rows * parts * part_size));
    of_parts.resize(std::max<int64_t>(of_parts.size(), rows * parts));
    const int64_t tile = (rows + tiles - 1) / tiles;
    return {rows, tile, part, parts, m.group_words / part, part_size, memory.data(), of_parts.data()};
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
template <int BITS, bool TABLE>
void fix_row(const Matrix& m, const Element* x, const FixedRows& rows, int64_t r) {
    constexpr int kCodes = 32 / BITS;
    const bool to_8_bits = m.rounds;
    const int64_t part = rows.part_words * kCodes, whole = rows.parts * part;
    static thread_local std::vector<float> numbers;
    numbers.resize(std::max<int64_t>(numbers.size(), whole));
    for (int64_t k = 0; k < whole; ++k) numbers[k] = k < m.inputs ? float(x[k]) : 0.0f;
    const float row_most = to_8_bits ? largest_of(numbers.data(), whole) : 0.0f;
    const int64_t first = r / rows.tile * rows.tile, side = rows.rows_of(first);
    for (int64_t p = 0; p < rows.parts; ++p) {
        uint32_t* to = rows.at(first, p) + (r - first) * kUnitWords;
        float* own = numbers.data() + p * part;
        const float most = to_8_bits ? row_most : largest_of(own, part);
        const float unit = to_8_bits ? 127.5f : kMostFixed, least = to_8_bits ? -128.0f : -kMostFixed;
        // The largest is never rounded to 127.49.
        const float inverse = most == 0 ? 0.0f : (to_8_bits ? 127.50003f : kMostFixed) / most;
        const float highest = to_8_bits ? 127.0f : kMostFixed;
        Fixed fixed[kMostPart];
        int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < part; ++k) {
            const int32_t one = int32_t(std::nearbyint(std::max(least, std::min(highest, own[k] * inverse))));
            fixed[k] = Fixed(one);
            sum += one;
        }
        for (int64_t word = 0; word < part; word += kCodes)
            for (int j = 0; j < kUnits<BITS>; ++j, to += side * kUnitWords) {
                const Fixed* from = fixed + word + j;
                uint32_t words[kUnitWords] = {};
                for (int of = 0; of < kAtOnce; ++of) {
                    const int32_t number = from[of * kUnits<BITS>];
                    if constexpr (kAtOnce == 2) {
                        words[0] |= uint32_t(uint16_t(number)) << (16 * of);
                    } else {  // the low byte is signed
                        words[0] |= uint32_t(uint8_t(number)) << (8 * of);
                        words[kUnitWords - 1] |= uint32_t(uint8_t((number - int8_t(number)) >> 8)) << (8 * of);
                    }
                }
                for (int of = 0; of < kUnitWords; ++of) to[of] = words[of];
            }
        const float scale = most / unit;
        rows.of_parts[r * rows.parts + p] = {scale, scale * float(sum), ((m.offsets ? 0 : int32_t(m.zero)) - kLess<BITS, TABLE>) * sum};
    }
}

// sums[count, 32] = the product of rows with a block.
template <int BITS, bool TABLE>
struct FixedBlock {
    const Matrix& m;
    const FixedRows& rows;
    std::vector<Codes> units;  // of all words, of two vectors of outputs
    const Table table{m.table};

    // Of R rows and VECTORS vectors of outputs, from the first of them on. `units(word, j, v)` is the j-th unit of a word.
    template <int R, int VECTORS, class Units>
    [[gnu::always_inline]] void multiply(int64_t block, int64_t row, int64_t first, float* sums, Units units) const {
        int64_t at = (block * m.groups * kBlockVectors + first) * kLane, left = rows.per_group, word = 0;
        Vector total[R][VECTORS] = {};
        for (int64_t part = 0; part < rows.parts; ++part) {
            const uint32_t* x = rows.at(row, part);
            Sums held[R][VECTORS];
            for (const int64_t end = word + rows.part_words; word < end; ++word)
#pragma GCC unroll 4
                for (int j = 0; j < kUnits<BITS>; ++j, x += R * kUnitWords) {
                    Codes w[VECTORS];
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; ++v) w[v] = units(word, j, v);
#pragma GCC unroll 12
                    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                        for (int v = 0; v < VECTORS; ++v) held[r][v].add(w[v], x + r * kUnitWords);
                }
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) {
                const Vector scale = read_scales(m.scales, at + v * kLane, m.halves);
                const Vector shift = m.offsets ? read_scales(m.offsets, at + v * kLane, m.halves) : Vector{};
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    const Part& own = rows.of_parts[(row + r) * rows.parts + part];
                    Integers dot = held[r][v].all();
                    if (kLess<BITS, TABLE> || !m.offsets) dot -= own.from_zero;
                    total[r][v] += to_float(dot) * own.scale * scale;
                    if (m.offsets) total[r][v] += own.sum * shift;
                }
            }
            if (--left == 0) left = rows.per_group, at += kBlock;
        }
        for (int r = 0; r < R; ++r) std::memcpy(sums + r * kBlock + first * kLane, total[r], sizeof(total[r]));
    }

    const uint32_t* codes_of(int64_t block, int64_t first) const {
        return m.codes + (block * m.words * kBlockVectors + first) * kLane;
    }

    // By units that are used as they are made.
    template <int R>
    void few(int64_t block, int64_t row, float* sums) const {
        constexpr int kVectors = R <= 2 ? kFewVectors : 2;
        for (int64_t first = 0; first < kBlockVectors; first += kVectors) {
            const uint32_t* codes = codes_of(block, first);
            multiply<R, kVectors>(block, row, first, sums, [&](int64_t word, int j, int64_t v) {
                const uint32_t* from = codes + word * kBlock + v * kLane;
                if (j == 0 && v % (kLineLanes / kLane) == 0) __builtin_prefetch(from + kAheadWords * kBlock);
                return unit_of<BITS, TABLE>(load<Codes>(from), j, table);
            });
        }
    }

    // Of a tile's rows, by `units`, for two vectors of outputs from `first` on; where there are none, for the whole block.
    template <int R = kFixedRows>
    void tile(int64_t block, int64_t row, int64_t count, int64_t first, float* sums) const {
        if (R > 1 && count < R) return tile<R == 1 ? 1 : R - 1>(block, row, count, first, sums);
        if (units.empty()) return few<R>(block, row, sums);
        multiply<R, 2>(block, row, first, sums, [&](int64_t word, int j, int64_t v) {
            return units[(word * kUnits<BITS> + j) * 2 + v];
        });
    }

    void of_rows(int64_t block, int64_t row, int64_t count, float* sums) {
        const bool unpacks = count > kUnpackedRows;  // codes once for all rows
        for (int64_t first = 0; first < (unpacks ? kBlockVectors : 1); first += 2) {
            const uint32_t* codes = codes_of(block, first);
            units.resize(unpacks ? m.words * kUnits<BITS> * 2 : 0);
            for (int64_t word = 0; unpacks && word < m.words; ++word)
                for (int j = 0; j < kUnits<BITS>; ++j)
                    for (int v = 0; v < 2; ++v)
                        units[(word * kUnits<BITS> + j) * 2 + v] =
                            unit_of<BITS, TABLE>(load<Codes>(codes + word * kBlock + v * kLane), j, table);
            for (int64_t r = 0; r < count; r += rows.tile) tile(block, row + r, rows.rows_of(row + r), first, sums + r * kBlock);
        }
    }
};

template <int BITS, bool TABLE>
void multiply_fixed(const Matrix& m, const Element* x, int64_t count, const Output& to) {
    const FixedRows rows = make_fixed<BITS>(m, count);
    const int64_t at_once = kRowsAtOnce / rows.tile * rows.tile;
#pragma omp parallel for if (count > 4)
    for (int64_t r = 0; r < count; ++r) fix_row<BITS, TABLE>(m, x + r * m.inputs, rows, r);
    const int64_t blocks = (m.outputs + kBlock - 1) / kBlock;
#pragma omp parallel
    {
        FixedBlock<BITS, TABLE> of{m, rows, {}};
        alignas(64) float sums[kRowsAtOnce * kBlock];
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; ++block)
            for (int64_t row = 0; row < count; row += at_once) {
                const int64_t some = std::min(at_once, count - row);
                of.of_rows(block, row, some, sums);
                for (int64_t r = 0; r < some; ++r) to.write(sums + r * kBlock, row + r, block * kBlock, kBlock);
            }
    }
}
