// Compares the functions of one source with plain loops, at the level of instruction sets that it is compiled for.
//
// `test_levels.py` compiles it with SOURCE, the file, and CHECK_ and its name; it prints what differs.

#include SOURCE

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>

static std::mt19937 generator(7);

static float draw(float least = -1.0f, float most = 1.0f) {
    return std::uniform_real_distribution<float>(least, most)(generator);
}

static std::vector<Element> draw_row(int64_t count) {
    std::vector<Element> found(count);
    for (auto& each : found) each = draw();
    return found;
}

static int failures = 0;

static void expect(const char* what, double found, double expected, double allowed) {
    const double rounding = sizeof(Element) == 2 ? std::fabs(expected) / 128 : 0.0;
    if (std::fabs(found - expected) <= allowed + rounding) return;
    if (++failures < 5) std::printf("%s: %g, not %g (allowed %g)\n", what, found, expected, allowed + rounding);
}

#if defined(CHECK_QUANTIZED)  // quantized.cpp
// Pairs are of bfloat16: for many rows of a panel weights become such numbers.
static bool shortens_weights(int64_t count, bool rounds) {
#ifdef __AVX512BF16__
    return sizeof(Element) == 2 && !rounds && count > kFew;
#else
    return false;
#endif
}

static float shorten(float number) {  // to bfloat16, half up
    uint32_t bits;
    std::memcpy(&bits, &number, 4);
    bits = (bits + 0x8000) & 0xffff0000u;
    std::memcpy(&number, &bits, 4);
    return number;
}

static void check(int64_t bits, bool offsets, bool table, bool rounds, int64_t rows, int64_t outputs, int64_t group, int64_t groups) {
    const int64_t inputs = group * groups, in_word = 32 / bits, blocks = (outputs + kBlock - 1) / kBlock;
    const int64_t words = (inputs / in_word + 15) / 16 * 16;
    std::vector<uint32_t> codes(blocks * words * kBlock, 0);
    std::vector<float> scales(blocks * groups * kBlock), shifts(scales.size());
    for (auto& each : scales) each = draw(0.5f, 1.0f);
    for (auto& each : shifts) each = draw();
    std::vector<uint8_t> numbers(16);
    for (auto& each : numbers) each = generator() % 256;
    std::vector<double> weight(outputs * inputs), shortened(weight.size());
    const int64_t zero = table ? 128 : 1 << (bits - 1);
    for (int64_t o = 0; o < outputs; ++o)
        for (int64_t i = 0; i < inputs; ++i) {
            const uint32_t code = generator() % (1u << bits);
            codes[(o / kBlock * words + i / in_word) * kBlock + o % kBlock] |= code << (i % in_word * bits);
            const int64_t at = (o / kBlock * groups + i / group) * kBlock + o % kBlock;
            const double number = table ? numbers[code] : code;
            weight[o * inputs + i] = scales[at] * (offsets ? number : number - zero) + (offsets ? shifts[at] : 0.0f);
            shortened[o * inputs + i] = shorten(std::fma(float(number), scales[at], offsets ? shifts[at] : -zero * scales[at]));
        }
    const Matrix m = {codes.data(), scales.data(), offsets ? shifts.data() : nullptr, table ? numbers.data() : nullptr,
                      outputs, words, groups, group / in_word, bits, 0, zero, inputs, rounds, 1 << 30};
    const auto x = draw_row(rows * inputs), bias = draw_row(outputs), residual = draw_row(rows * outputs);
    std::vector<Element> out(rows * outputs);
    linear(&m, x.data(), bias.data(), residual.data(), out.data(), rows, 0);
    for (int64_t r = 0; r < rows; ++r) {
        const auto& of_row = shortens_weights(std::min(kPanel, rows - r / kPanel * kPanel), rounds) ? shortened : weight;
        for (int64_t o = 0; o < outputs; ++o) {
            double sum = float(bias[o]) + double(float(residual[r * outputs + o])), size = 0, most = 0;
            for (int64_t i = 0; i < inputs; ++i) most = std::max(most, std::fabs(double(float(x[r * inputs + i]))));
            for (int64_t i = 0; i < inputs; ++i) {
                double number = float(x[r * inputs + i]);
                if (rounds) number = std::max(-128.0, std::min(127.0, std::nearbyint(number * 127.50003 / most))) * most / 127.5;
                sum += number * of_row[o * inputs + i];
                size += std::fabs(of_row[o * inputs + i]);
            }
            expect("quantized", float(out[r * outputs + o]), sum, most * size * (rounds ? 4e-2 / inputs : 1.6e-5) + 1e-5);
        }
    }
}

static void check_all() {
    for (int64_t bits : {4, 8})
        for (bool offsets : {false, true})
            for (bool rounds : {false, true}) {
                // Where pairs are multiplied, rounded activations meet codes of 8 bits alone (`QuantizedWeight`).
                if (kMultipliesPairs && rounds && bits == 4) continue;
                for (int64_t rows : {1, 2, 3, 4, 5, 9, 70})
                    for (int64_t group : {16, 32, 128, 256}) check(bits, offsets, false, rounds, rows, 70, group, 3);
            }
#ifndef __AVX512BF16__
    for (int64_t rows : {1, 4, 9}) check(4, false, true, false, rows, 70, 32, 3);
#endif
}
#elif defined(CHECK_PACKED)  // packed.cpp
static void check_all() {
    for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 13, 96, 130}) {
        const int64_t inputs = 150, outputs = 128;
        const auto x = draw_row(rows * inputs), weight = draw_row(outputs * inputs), bias = draw_row(outputs);
        const auto residual = draw_row(rows * outputs);
        std::vector<Element> words(weight.size()), out(rows * outputs);
        std::vector<BFloat16> shorts(weight.size());
        for (int64_t o = 0; o < outputs; ++o)
            for (int64_t i = 0; i < inputs; ++i) {
                words[((o / 64 * (inputs / kInWord) + i / kInWord) * 64 + o % 64) * kInWord + i % kInWord] = weight[o * inputs + i];
                shorts[(o / 64 * inputs + i) * 64 + o % 64] = weight[o * inputs + i];
            }
        const auto compare = [&](const char* what, bool is_short) {
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t o = 0; o < outputs; ++o) {
                    double sum = float(bias[o]) + double(float(residual[r * outputs + o]));
                    for (int64_t i = 0; i < inputs; ++i) {
                        BFloat16 shortened;
                        shortened = float(weight[o * inputs + i]);
                        sum += double(float(x[r * inputs + i])) * (is_short ? float(shortened) : float(weight[o * inputs + i]));
                    }
                    expect(what, float(out[r * outputs + o]), sum, 1e-5);
                }
        };
        if (rows <= kMostRows) {
            const Packed packed = {words.data(), inputs, outputs, 64};
            linear(&packed, x.data(), bias.data(), residual.data(), out.data(), rows, 0);
            compare("packed", false);
        }
        const Packed packed = {shorts.data(), inputs, outputs, 0};
        linear_short(&packed, x.data(), bias.data(), residual.data(), out.data(), rows, 0);
        compare("short", true);
    }
}
#elif defined(CHECK_ROW_WEIGHT)  // row_weight.cpp
static void check_all() {
    for (int64_t rows : {1, 2, 3, 6, 7, 20}) {
        const int64_t H = 77, V = 33;
        const auto x = draw_row(rows * H), weight = draw_row(V * H);
        std::vector<Element> out(rows * V);
        linear(x.data(), weight.data(), out.data(), rows, H, V);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t v = 0; v < V; ++v) {
                double sum = 0;
                for (int64_t h = 0; h < H; ++h) sum += double(float(x[r * H + h])) * float(weight[v * H + h]);
                expect("rows", float(out[r * V + v]), sum, 1e-5);
            }
    }
}
#elif defined(CHECK_ATTENTION)  // attention.cpp
static void check_all() {
    const int64_t K = 2, G = 3, D = 64, slots = 64, block = 16, length = 40;
    const auto keys = draw_row(K * slots * D), values = draw_row(K * slots * D), queries = draw_row(length * K * G * D);
    const int32_t table[] = {2, 0, 3};
    const int64_t starts[] = {length - 1};
    std::vector<Element> chunk(length * K * G * D), decode(K * G * D);
    attend_chunk(0, keys.data(), values.data(), slots * D, queries.data(), table, block, 0, length, 1 << 20, chunk.data(), K, G, D, 0.125f);
    attend_decodes(0, keys.data(), values.data(), slots * D, queries.data() + (length - 1) * K * G * D, starts, table, 3, block, 1 << 20, decode.data(), 1, K, G, D, 0.125f);
    for (int64_t t = 0; t < length; ++t)
        for (int64_t head = 0; head < K * G; ++head) {
            std::vector<double> scores(t + 1), sum(D);
            double total = 0;
            const auto at = [&](int64_t j, int64_t d) { return (head / G * slots + table[j / block] * block + j % block) * D + d; };
            for (int64_t j = 0; j <= t; ++j) {
                for (int64_t d = 0; d < D; ++d) scores[j] += 0.125 * float(queries[(t * K * G + head) * D + d]) * float(keys[at(j, d)]);
                total += scores[j] = std::exp(scores[j]);
            }
            for (int64_t d = 0; d < D; ++d) {
                for (int64_t j = 0; j <= t; ++j) sum[d] += scores[j] / total * float(values[at(j, d)]);
                expect("chunk", float(chunk[(t * K * G + head) * D + d]), sum[d], 1e-5);
                if (t == length - 1) expect("decode", float(decode[head * D + d]), sum[d], 1e-5);
            }
        }
}
#endif

int main() {
    check_all();
    if (failures) std::printf("%d numbers differ\n", failures);
    return failures != 0;
}
