// The product of few rows with a weight that oneDNN has laid out, for `packed.py`.
//
// The layout is oneDNN's AB16b64a: for each 64 outputs, input after input, the 64 weights of the input side by side.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

typedef float Vector __attribute__((vector_size(64)));

constexpr int64_t kLane = 16, kOutputs = 64, kVectors = kOutputs / kLane;
constexpr int kRows = 6;           // 24 of AVX-512's 32 registers hold sums
constexpr int64_t kInputs = 64;    // of a block of weights, 16 KB, which stays in the first cache for all rows
constexpr int64_t kMostRows = 96;  // of a call

inline Vector read(const float* from) {
    Vector found;
    std::memcpy(&found, from, sizeof(found));
    return found;
}

// sums[R, 64] += x[R, count] @ weight[count, 64]. Every `phases`-th input, the weights of the input as far on in the next
// block are fetched: all passes over a block together fetch the next one, so that reading overlaps with computing.
template <int R>
void multiply(const float* x, int64_t stride, const float* weight, int64_t count, float* sums, int64_t phase,
              int64_t phases) {
    Vector held[R][kVectors];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectors; ++v) held[r][v] = read(sums + r * kOutputs + v * kLane);
    const float* ahead = weight + count * kOutputs;
    for (int64_t i = 0; i < count; ++i) {
        if (i == phase) {
            for (int v = 0; v < kVectors; ++v) __builtin_prefetch(ahead + i * kOutputs + v * kLane);
            phase += phases;
        }
        Vector w[kVectors];
        for (int v = 0; v < kVectors; ++v) w[v] = read(weight + i * kOutputs + v * kLane);
        for (int r = 0; r < R; ++r) {
            const float one = x[r * stride + i];
            for (int v = 0; v < kVectors; ++v) held[r][v] += one * w[v];
        }
    }
    for (int r = 0; r < R; ++r) std::memcpy(sums + r * kOutputs, held[r], sizeof(held[r]));
}

void multiply_rows(const float* x, int64_t stride, const float* weight, int64_t count, float* sums, int64_t rows) {
    const int64_t phases = (rows + kRows - 1) / kRows;
    for (int64_t phase = 0; phase < phases; ++phase) {
        const float* from = x + phase * kRows * stride;
        float* to = sums + phase * kRows * kOutputs;
        switch (std::min<int64_t>(kRows, rows - phase * kRows)) {
            case 6: multiply<6>(from, stride, weight, count, to, phase, phases); break;
            case 5: multiply<5>(from, stride, weight, count, to, phase, phases); break;
            case 4: multiply<4>(from, stride, weight, count, to, phase, phases); break;
            case 3: multiply<3>(from, stride, weight, count, to, phase, phases); break;
            case 2: multiply<2>(from, stride, weight, count, to, phase, phases); break;
            case 1: multiply<1>(from, stride, weight, count, to, phase, phases); break;
        }
    }
}

}  // namespace

extern "C" {

// out[rows, outputs] = x[rows, inputs] @ weight^T + bias[outputs] + residual[rows, outputs]; bias and residual may be
// null. Each weight is read from memory once. `outputs` is a multiple of 64, and `rows` at most 96.
void linear(const float* x, const float* weight, const float* bias, const float* residual, float* out, int64_t rows,
            int64_t inputs, int64_t outputs) {
#pragma omp parallel
    {
        alignas(64) float sums[kMostRows * kOutputs];
#pragma omp for schedule(static)
        for (int64_t block = 0; block < outputs / kOutputs; ++block) {
            const int64_t first = block * kOutputs;
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t o = 0; o < kOutputs; ++o)
                    sums[r * kOutputs + o] = (bias ? bias[first + o] : 0.0f) +
                                             (residual ? residual[r * outputs + first + o] : 0.0f);
            for (int64_t i = 0; i < inputs; i += kInputs)
                multiply_rows(x + i, inputs, weight + first * inputs + i * kOutputs, std::min(kInputs, inputs - i),
                              sums, rows);
            for (int64_t r = 0; r < rows; ++r)
                std::memcpy(out + r * outputs + first, sums + r * kOutputs, kOutputs * sizeof(float));
        }
    }
}

}  // extern "C"
