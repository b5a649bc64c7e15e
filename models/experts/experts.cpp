// The routed experts of a layer on a CPU, for tensors of `Element`. `cpp.py` loads this file and calls it: for weights in
// words, whose products are here, or for quantized ones, whose product is that of other layers.
//
// Sizes: T tokens, k experts picked for each, E experts of this rank, H hidden size, F inner width of an expert. A pair
// is a token and an expert picked for it. Pairs lie sorted by expert, so that each weight is read from memory once.

#include <omp.h>

#include <memory>
#include <vector>

#include "exponential.h"
#include "few_rows.h"

namespace {

constexpr int64_t kBlock = 16;      // outputs of a block of weights
constexpr int64_t kTileRows = 16;   // of AMX's tiles
constexpr int64_t kRowsByHand = 4;  // for more, AMX is faster

// Numbers that are not set.
template <class T>
std::unique_ptr<T[]> room(int64_t size) {
    return std::unique_ptr<T[]>(new T[size]);
}

inline int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
struct TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// sums[32 or 16, 32 of 64] += x[rows, words] @ weight, of two blocks.
template <bool TWO>
inline void multiply_tiles(const float* x, int64_t words, const float* weight, float* sums) {
    constexpr int64_t stride = kOutputs * sizeof(float), below = kTileRows * kOutputs;
    const float* lower = x + kTileRows * words;
    _tile_loadd(0, sums, stride);
    _tile_loadd(1, sums + kBlock, stride);
    if (TWO) _tile_loadd(2, sums + below, stride);
    if (TWO) _tile_loadd(3, sums + below + kBlock, stride);
    for (int64_t i = 0; i < words; i += 16) {
        _tile_loadd(4, x + i, words * sizeof(float));
        if (TWO) _tile_loadd(5, lower + i, words * sizeof(float));
        _tile_loadd(6, weight + i * kBlock, 64);
        _tile_loadd(7, weight + (words + i) * kBlock, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) _tile_dpbf16ps(2, 5, 6);
        if (TWO) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + kBlock, stride);
    if (TWO) _tile_stored(2, sums + below, stride);
    if (TWO) _tile_stored(3, sums + below + kBlock, stride);
}

inline void multiply_by_amx(const float* x, int64_t words, const float* weight, float* sums, int64_t rows) {
    for (int64_t half = 0; half < 2; ++half)
        for (int64_t r = 0; r < rows; r += 2 * kTileRows) {
            const auto multiply = rows - r > kTileRows ? multiply_tiles<true> : multiply_tiles<false>;
            multiply(x + r * words, words, weight + 2 * half * kBlock * words, sums + r * kOutputs + 2 * half * kBlock);
        }
}
inline void begin_tiles() {
    static const TileShapes shapes;
    _tile_loadconfig(&shapes);
}
inline void end_tiles() { _tile_release(); }
#else
inline void multiply_by_amx(const float*, int64_t, const float*, float*, int64_t) {}
inline void begin_tiles() {}
inline void end_tiles() {}
#endif

// sums[rows, 64] += x[rows, words] @ weight, which has four blocks.
inline void multiply_panel(const float* x, int64_t words, const float* weight, float* sums, int64_t rows, bool amx) {
    if (amx && rows > kRowsByHand) return multiply_by_amx(x, words, weight, sums, rows);
    for (int64_t i = 0; i < words; i += kWords)
        multiply_rows<kBlock>(x + i, words, weight + i * kBlock, std::min(kWords, words - i), sums, rows);
}

// Some of the pairs of one expert: from `row` on, of `begin` to `end` of the sorted pairs.
struct Rows {
    int64_t expert, row, begin, end;
    int64_t count() const { return end - begin; }
};

// The pairs of this rank's experts, sorted by expert, each expert's rows padded to a multiple.
struct Pairs {
    int64_t rows = 0;            // of all, with their padding
    std::vector<int64_t> at;     // [T * k], the row of a pair; -1: another rank's
    std::vector<int64_t> token;  // [rows]; -1: padding
    std::vector<float> scale;    // [rows]
    std::vector<Rows> parts;     // of at most `most` pairs

    Pairs(const int64_t* picked, const float* weights, int64_t T, int64_t k, int64_t first, int64_t E, int64_t multiple,
          int64_t most)
        : at(T * k) {
        std::vector<int64_t> counts(E, 0), next(E);
        for (int64_t p = 0; p < T * k; ++p)
            if (picked[p] >= first && picked[p] < first + E) ++counts[picked[p] - first];
        int64_t pairs = 0;
        for (int64_t e = 0; e < E; ++e) {
            next[e] = rows;
            for (int64_t begin = 0; begin < counts[e]; begin += most) {
                const int64_t count = std::min(most, counts[e] - begin);
                parts.push_back({e, rows + begin, pairs + begin, pairs + begin + count});
            }
            pairs += counts[e];
            rows += padded(counts[e], multiple);
        }
        token.assign(rows, -1);
        scale.resize(rows);
        for (int64_t p = 0; p < T * k; ++p) {
            const int64_t e = picked[p] - first;
            at[p] = e >= 0 && e < E ? next[e]++ : -1;
            if (at[p] < 0) continue;
            token[at[p]] = p / k;
            scale[at[p]] = weights[p];
        }
    }
};

// min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (clamp(up, limit) + shift)
struct Activation {
    float alpha, limit, shift;

    float operator()(float gate, float up) const {
        gate = std::min(gate, limit);
        return gate / (1.0f + exponential(-alpha * gate)) * (std::max(std::min(up, limit), -limit) + shift);
    }
};

// out[T, H] = residual + the sum over each token's pairs of scale * added[rows, width], within a parallel region.
template <class From>
void add_up(const Pairs& pairs, const From* added, int64_t width, int64_t T, int64_t H, int64_t k, const Element* residual,
            Element* out) {
#pragma omp for schedule(static) collapse(2)
    for (int64_t t = 0; t < T; ++t)
        for (int64_t block = 0; block < H; block += kOutputs) {
            const int64_t count = std::min(kOutputs, H - block);
            float total[kOutputs];
            for (int64_t o = 0; o < count; ++o) total[o] = residual ? float(residual[t * H + block + o]) : 0.0f;
            for (int64_t p = t * k; p < (t + 1) * k; ++p) {
                if (pairs.at[p] < 0) continue;
                const From* from = added + pairs.at[p] * width + block;
                const float scale = pairs.scale[pairs.at[p]];
                for (int64_t o = 0; o < count; ++o) total[o] += scale * float(from[o]);
            }
            for (int64_t o = 0; o < count; ++o) out[t * H + block + o] = total[o];
        }
}

// `linear` of parallel/quantized.cpp.
typedef void (*Linear)(const void* matrix, const Element* x, const Element* bias, const Element* residual, Element* out,
                       int64_t rows, int64_t inputs, int64_t rounds, int64_t least_tiled);
struct Product {
    const void* matrix;
    int64_t rounds, least_tiled;
};

constexpr int64_t kPanel = 256;  // rows of a part, for which `linear` makes numbers of weights once

}  // namespace

extern "C" {

// out[T, H] = residual[T, H] (null: zero) + the sum over each token's picked experts of weight * down(act(gate, up)).
//
// Of picked[T, k], numbers from `first` to first + E - 1 are experts of this rank; the others add nothing. Each expert has
// weights gate_up and down in words, as `cpp.py` packs them, of inputs padded to `words` and `inner_words`, and of outputs
// padded to 64. Biases, [E, 2, F] and [E, H], may be null.
void experts(const Element* x, int64_t T, int64_t H, const int64_t* picked, const float* weights, int64_t k, int64_t first,
             int64_t E, int64_t F, int64_t words, int64_t inner_words, int64_t amx, const float* gate_up, const float* down,
             const Element* gate_up_bias, const Element* down_bias, float alpha, float limit, float shift,
             const Element* residual, Element* out) {
    const int64_t width = padded(F, 2 * kBlock), outputs = padded(H, kOutputs);
    const int64_t panel = kOutputs * words, panels = width * 2 / kOutputs;  // of gate and up
    const int64_t down_panel = kOutputs * inner_words, down_panels = outputs / kOutputs;
    const int64_t multiple = amx ? kTileRows : 1;
    const Pairs pairs(picked, weights, T, k, first, E, multiple, kMostRows);
    const Activation act = {alpha, limit, shift};

    const auto gathered = room<float>(pairs.rows * words), inner = room<float>(pairs.rows * inner_words);
    const auto added = room<float>(pairs.rows * outputs);
    const int64_t num_parts = pairs.parts.size();
#pragma omp parallel
    {
        alignas(64) float sums[kMostRows * kOutputs];
        if (amx) begin_tiles();
#pragma omp for schedule(static)
        for (int64_t r = 0; r < pairs.rows; ++r) {
            char* to = reinterpret_cast<char*>(gathered.get() + r * words);
            const int64_t bytes = pairs.token[r] < 0 ? 0 : H * sizeof(Element);
            if (bytes) std::memcpy(to, x + pairs.token[r] * H, bytes);
            std::memset(to + bytes, 0, words * sizeof(float) - bytes);
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < num_parts * panels; ++task) {
            const Rows& part = pairs.parts[task / panels];
            const int64_t block = task % panels * 2 * kBlock, rows = part.count();  // the first of the expert's width
            for (int64_t o = 0; o < kOutputs; ++o) {
                const int64_t f = block + o / (2 * kBlock) * kBlock + o % kBlock, is_up = o / kBlock % 2;
                const bool has_bias = gate_up_bias && f < F;
                sums[o] = has_bias ? float(gate_up_bias[(part.expert * 2 + is_up) * F + f]) : 0.0f;
            }
            for (int64_t r = 1; r < padded(rows, multiple); ++r) std::memcpy(sums + r * kOutputs, sums, 4 * kOutputs);
            multiply_panel(gathered.get() + part.row * words, words,
                           gate_up + (part.expert * panels + task % panels) * panel, sums, rows, amx);
            for (int64_t r = 0; r < rows; ++r) {
                Element* to = reinterpret_cast<Element*>(inner.get() + (part.row + r) * inner_words) + block;
                for (int64_t half = 0; half < 2; ++half) {
                    const float* gates = sums + r * kOutputs + half * 2 * kBlock;
#pragma omp simd
                    for (int64_t o = 0; o < kBlock; ++o) to[half * kBlock + o] = act(gates[o], gates[o + kBlock]);
                }
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < num_parts * down_panels; ++task) {
            const Rows& part = pairs.parts[task / down_panels];
            const int64_t block = task % down_panels * kOutputs, rows = part.count();
            for (int64_t o = 0; o < kOutputs; ++o)
                sums[o] = down_bias && block + o < H ? float(down_bias[part.expert * H + block + o]) : 0.0f;
            for (int64_t r = 1; r < padded(rows, multiple); ++r) std::memcpy(sums + r * kOutputs, sums, 4 * kOutputs);
            multiply_panel(inner.get() + part.row * inner_words, inner_words,
                           down + (part.expert * down_panels + task % down_panels) * down_panel, sums, rows, amx);
            for (int64_t r = 0; r < rows; ++r)
                std::memcpy(added.get() + (part.row + r) * outputs + block, sums + r * kOutputs, 4 * kOutputs);
        }
        if (amx) end_tiles();
        add_up(pairs, added.get(), outputs, T, H, k, residual, out);
    }
}

// The same for quantized weights, of which each expert has a product gate_up, [2 F, H], and down, [H, F].
//
// Where there are many experts with tokens, threads take whole ones; else they share the products of one.
void quantized_experts(const Element* x, int64_t T, int64_t H, const int64_t* picked, const float* weights, int64_t k,
                       int64_t first, int64_t E, int64_t F, Linear linear, const Product* gate_up, const Product* down,
                       const Element* gate_up_bias, const Element* down_bias, float alpha, float limit, float shift,
                       const Element* residual, Element* out) {
    const Pairs pairs(picked, weights, T, k, first, E, 1, kPanel);
    const Activation act = {alpha, limit, shift};
    const auto gathered = room<Element>(pairs.rows * H), inner = room<Element>(pairs.rows * 2 * F);
    const auto added = room<Element>(pairs.rows * H);
    const auto multiply = [&](const Product& product, const Element* from, const Element* bias, Element* to, int64_t rows,
                              int64_t inputs) {
        linear(product.matrix, from, bias, nullptr, to, rows, inputs, product.rounds, product.least_tiled);
    };
    const auto compute = [&](const Rows& part) {
        Element *own = gathered.get() + part.row * H, *hidden = inner.get() + part.row * 2 * F;
        const int64_t rows = part.count(), e = part.expert;
        for (int64_t r = 0; r < rows; ++r) std::memcpy(own + r * H, x + pairs.token[part.row + r] * H, H * sizeof(Element));
        multiply(gate_up[e], own, gate_up_bias ? gate_up_bias + e * 2 * F : nullptr, hidden, rows, H);
        for (int64_t r = 0; r < rows; ++r) {  // rows of 2 F become rows of F, in place
            const Element* gates = hidden + r * 2 * F;
            Element* to = hidden + r * F;
#pragma omp simd
            for (int64_t f = 0; f < F; ++f) to[f] = act(gates[f], gates[f + F]);
        }
        multiply(down[e], hidden, down_bias ? down_bias + e * H : nullptr, added.get() + part.row * H, rows, F);
    };
    const int64_t num_parts = pairs.parts.size();
    if (num_parts >= 2 * omp_get_max_threads()) {
#pragma omp parallel for schedule(dynamic)
        for (int64_t i = 0; i < num_parts; ++i) compute(pairs.parts[i]);
    } else {
        for (const Rows& part : pairs.parts) compute(part);
    }
#pragma omp parallel
    add_up(pairs, added.get(), H, T, H, k, residual, out);
}

}  // extern "C"
