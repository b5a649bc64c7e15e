// The product of few rows with a weight that lies as it was loaded, for `row_weight.py`.

#include "element.h"

namespace {

#ifdef __AVX512F__
constexpr int kLanes = 16, kRows = 6, kOutputs = 4;  // 24 of 32 vector registers hold sums
#else
constexpr int kLanes = 8, kRows = 3, kOutputs = 3;  // 9 of 16
#endif
template <int LANES>
struct Lanes {
    typedef float Type __attribute__((vector_size(LANES * sizeof(float))));
};

typedef Lanes<kLanes>::Type Vector;

inline Vector read(const Element* from) {
    Vector found;
    std::memcpy(&found, from, sizeof(found));
    return found;
}

template <int LANES>
inline float sum_of(typename Lanes<LANES>::Type lanes) {
    if constexpr (LANES == 2) {
        return lanes[0] + lanes[1];
    } else {
        typename Lanes<LANES / 2>::Type low, high;
        std::memcpy(&low, &lanes, sizeof(low));
        std::memcpy(&high, reinterpret_cast<const char*>(&lanes) + sizeof(low), sizeof(high));
        return sum_of<LANES / 2>(low + high);
    }
}

// out[r, o] = x[r] . weight[o] for R rows and O outputs of size H.
template <int R, int O>
void products(const Element* x, const Element* weight, Element* out, int64_t H, int64_t V) {
    Vector sums[R][O] = {};
    constexpr int64_t kStep = kLanes * kInWord;
    int64_t h = 0;
    for (; h + kStep <= H; h += kStep) {
        Vector w[O];
        for (int o = 0; o < O; ++o) {
            w[o] = read(weight + o * H + h);
            __builtin_prefetch(weight + (o + O) * H + h);
        }
        for (int r = 0; r < R; ++r) {
            const Vector a = read(x + r * H + h);
            for (int o = 0; o < O; ++o) sums[r][o] = add_product(sums[r][o], a, w[o]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int o = 0; o < O; ++o) {
            float sum = sum_of<kLanes>(sums[r][o]);
            for (int64_t rest = h; rest < H; ++rest) sum += float(x[r * H + rest]) * float(weight[o * H + rest]);
            out[r * V + o] = sum;
        }
}

template <int O, int R = kRows>
void all_rows(const Element* x, const Element* weight, Element* out, int64_t rows, int64_t H, int64_t V) {
    for (; rows >= R; rows -= R, x += R * H, out += R * V) products<R, O>(x, weight, out, H, V);
    if constexpr (R > 1) all_rows<O, R - 1>(x, weight, out, rows, H, V);
}

}  // namespace

extern "C" {

// out[rows, V] = x[rows, H] @ weight[V, H]^T. Each weight is read from memory once.
void linear(const Element* x, const Element* weight, Element* out, int64_t rows, int64_t H, int64_t V) {
    const int64_t whole = V / kOutputs;
#pragma omp parallel
    {
#pragma omp for schedule(static) nowait
        for (int64_t block = 0; block < whole; ++block) {
            const int64_t v = block * kOutputs;
            all_rows<kOutputs>(x, weight + v * H, out + v, rows, H, V);
        }
#pragma omp single
        for (int64_t v = whole * kOutputs; v < V; ++v) all_rows<1>(x, weight + v * H, out + v, rows, H, V);
    }
}

}  // extern "C"
