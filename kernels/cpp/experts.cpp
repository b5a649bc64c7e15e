// The routed experts of a layer on a CPU, for tensors of `Element`. `cpp.py` loads this file and calls it: for weights in
// words, whose products are here, or for quantized ones, whose product is that of other layers.
//
// Sizes: T tokens, k experts picked for each, E experts of this rank, H hidden size, F inner width of an expert. A pair
// is a token and an expert picked for it. Pairs lie sorted by expert, so that each weight is read from memory once.

#if defined(__AVX512F__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")  // the compiler's choice is half of it
#endif

#include <omp.h>

#include <memory>
#include <optional>
#include <vector>

#include "exponential.h"
#include "tiles.h"

namespace {

constexpr int64_t kLeastTiled = 5, kAllAtOnce = 4 * kTile;  // rows
constexpr int64_t kInLine = kStep / sizeof(Element), kLines = kBlock / kInLine;  // elements of one; of a block's outputs
constexpr int64_t kFewWords = 16;  // at once for few rows, and fetched ahead; twice as many take 4% longer
constexpr int64_t kAtOnce = 8;  // steps of weights, 16 KB, which stay in the first cache for all rows

// Numbers that are not set.
template <class T>
std::unique_ptr<T[]> room(int64_t size) {
    return std::unique_ptr<T[]>(new T[size]);
}

// At least so many elements, in a thread's memory, which is kept from call to call.
template <class T>
T* at_least(int64_t size, std::vector<T>& memory) {
    memory.resize(std::max<int64_t>(memory.size(), size));
    return memory.data();
}

inline int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// Some of the pairs of one expert: so many from `row` on.
struct Part {
    int64_t expert, row, count;
    bool tiled;  // they lie in tiles
};

// The pairs of this rank's experts, sorted by expert, each expert's rows padded to a multiple.
struct Pairs {
    int64_t rows = 0;            // of all, with their padding
    std::vector<int64_t> at;     // [T * k], the row of a pair; -1: another rank's
    std::vector<int64_t> token;  // [rows]; -1: padding
    std::vector<float> scale;    // [rows]
    std::vector<Part> parts;     // of at most `most` pairs

    Pairs(const int64_t* picked, const float* weights, int64_t T, int64_t k, int64_t first, int64_t E, int64_t multiple,
          int64_t most)
        : at(T * k) {
        std::vector<int64_t> counts(E, 0), next(E);
        for (int64_t p = 0; p < T * k; ++p)
            if (picked[p] >= first && picked[p] < first + E) ++counts[picked[p] - first];
        for (int64_t e = 0; e < E; ++e) {
            next[e] = rows;
            for (int64_t begin = 0; begin < counts[e]; begin += most) {
                const int64_t count = std::min(most, counts[e] - begin);
                parts.push_back({e, rows + begin, count, multiple > 1 && count >= kLeastTiled});
            }
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

// A weight of each expert in panels of two blocks of 32 outputs, [E, panels, 2, words, 32], with the biases of these
// outputs, which may be null.
struct Weights {
    const float *memory, *bias;
    int64_t words, panels;  // words of the inputs, 16 of which are a line

    const float* at(int64_t e, int64_t panel) const { return memory + (e * panels + panel) * kOutputs * words; }
    const float* bias_at(int64_t e, int64_t panel) const {
        static const float none[kOutputs] = {};
        return bias ? bias + (e * panels + panel) * kOutputs : none;
    }

    // Calls `finish(r, sums, others)` with the sums of both blocks for each row, and `fetch(r)` some time before. `then` is
    // what is read after this panel.
    template <class Finish, class Fetch>
    void multiply(const Part& part, int64_t panel, const Line* x, const float* then, float* sums, Finish finish,
                  Fetch fetch) const {
        const float *own = at(part.expert, panel), *rows = reinterpret_cast<const float*>(x);
        const int64_t count = part.count, steps = words / kLineLanes;
        if (part.tiled)
            return block_by_tiles<2>(
                reinterpret_cast<const Element*>(x), steps, count, count <= kAllAtOnce ? steps : kAtOnce, true, then, sums,
                [&](int64_t block, int64_t first, int64_t) { return own + (block * steps + first) * kTile * kBlock; },
                fetch, [&](int64_t r, float* found) { finish(r, found, found + kPartSums); });
        std::fill(sums, sums + count * kOutputs, 0.0f);
        const int64_t some = count <= kRows ? kFewWords : kWords;
        for (int64_t i = 0; i < words; i += some)
            multiply_rows<kBlock>(rows + i, words, own + i * kBlock, std::min(some, words - i), sums, count,
                                  words - i <= some);
        for (int64_t r = 0; r < count; ++r) finish(r, sums + r * kOutputs, sums + r * kOutputs + kBlock);
    }
};

}  // namespace

extern "C" {

// out[T, H] = residual[T, H] (null: zero) + the sum over each token's picked experts of weight * down(act(gate, up)).
//
// Of picked[T, k], numbers from `first` to first + E - 1 are experts of this rank; the others add nothing. Each expert has
// weights gate_up and down in words, as `cpp.py` packs them: a panel of gate_up has the gates and ups of 32 columns of the
// inner width. Biases have the outputs of each panel, and may be null.
//
// Threads take panels of gate_up for an expert's rows. Of down they take outputs, which they add up for all experts.
void experts(const Element* x, int64_t T, int64_t H, const int64_t* picked, const float* weights, int64_t k, int64_t first,
             int64_t E, int64_t F, const float* gate_up_words, const float* down_words, const float* gate_up_bias,
             const float* down_bias, float alpha, float limit, float shift, const Element* residual, Element* out) {
    const bool tiled = kInWord == 2 && has_tiles();
    const int64_t words = padded(H, kBlock) / kInWord, inner_words = padded(F, kBlock) / kInWord;
    const int64_t steps = words / kLineLanes, inner_steps = inner_words / kLineLanes;
    const Weights gate_up = {gate_up_words, gate_up_bias, words, padded(F, kBlock) / kBlock};
    const Weights down = {down_words, down_bias, inner_words, padded(H, kOutputs) / kOutputs};
    const Pairs pairs(picked, weights, T, k, first, E, tiled ? kTile : 1, tiled ? kPanel : kMostRows);
    const Activation act = {alpha, limit, shift};
    const int64_t num_parts = pairs.parts.size(), tasks = num_parts * gate_up.panels, threads = omp_get_max_threads();
    const int64_t chunk = std::max<int64_t>(1, tasks / (16 * threads));  // panels, few of which fetch another thread's
    const int64_t share = std::min<int64_t>(4, std::max<int64_t>(1, down.panels / (2 * threads)));  // panels of outputs
    static thread_local std::vector<Line> inner_memory;
    Line* inner = at_least(pairs.rows * inner_steps, inner_memory);
#pragma omp parallel
    {
        static thread_local std::vector<Line> gathered;
        static thread_local std::vector<float> totals;
        alignas(64) float sums[2 * kPartSums];
        std::optional<Tiles> config;
        if (tiled) config.emplace();
        int64_t held = -1;  // the part whose rows are gathered
#pragma omp for schedule(dynamic, chunk)
        for (int64_t task = 0; task < tasks; ++task) {
            const Part& part = pairs.parts[task / gate_up.panels];
            const int64_t panel = task % gate_up.panels, last = std::min(task + 1, tasks - 1);
            if (held != task / gate_up.panels) {
                held = task / gate_up.panels;
                Line* to = at_least(padded(part.count, kTile) * steps, gathered);
                for (int64_t r = 0; r < part.count; ++r) {
                    const char* from = reinterpret_cast<const char*>(x + pairs.token[part.row + r] * H);
                    int64_t left = H * sizeof(Element);
                    for (int64_t step = 0; step < steps; ++step, from += kStep, left -= kStep) {
                        char* line = to[place(r, step, steps, part.tiled)].bytes;
                        if (left >= kStep) {
                            std::memcpy(line, from, kStep);
                        } else {
                            std::memset(line, 0, kStep);
                            std::memcpy(line, from, std::max<int64_t>(0, left));
                        }
                    }
                }
            }
            const float* bias = gate_up.bias_at(part.expert, panel);
            const float* then = gate_up.at(pairs.parts[last / gate_up.panels].expert, last % gate_up.panels);
            const auto line = [&](int64_t r, int64_t i) {
                return inner + part.row * inner_steps + place(r, panel * kLines + i, inner_steps, part.tiled);
            };
            const auto finish = [&](int64_t r, float* gates, float* ups) {
#pragma omp simd
                for (int64_t o = 0; o < kBlock; ++o) gates[o] = act(gates[o] + bias[o], ups[o] + bias[kBlock + o]);
                for (int64_t o = 0; o < kBlock; o += kLane)
                    narrow(read(gates + o), reinterpret_cast<Element*>(line(r, o / kInLine)) + o % kInLine);
            };
            gate_up.multiply(part, panel, gathered.data(), then, sums, finish,
                             [&](int64_t r) { __builtin_prefetch(line(r, 0), 1); });
        }
#pragma omp for schedule(dynamic)
        for (int64_t begin = 0; begin < down.panels; begin += share) {
            const int64_t end = std::min(begin + share, down.panels), width = (end - begin) * kOutputs;
            float* total = at_least(T * width, totals);
            std::fill(total, total + T * width, 0.0f);
            for (int64_t i = 0; i < num_parts; ++i)
                for (int64_t panel = begin; panel < end; ++panel) {
                    const Part& part = pairs.parts[i];
                    const bool is_last = panel + 1 == end;
                    const float* then = down.at(pairs.parts[std::min(i + is_last, num_parts - 1)].expert,
                                                is_last ? begin : panel + 1);
                    const float* bias = down.bias_at(part.expert, panel);
                    const auto finish = [&](int64_t r, const float* some, const float* others) {
                        const float scale = pairs.scale[part.row + r];
                        float* to = total + pairs.token[part.row + r] * width + (panel - begin) * kOutputs;
                        for (int64_t o = 0; o < kOutputs; o += kLane) {
                            const float* from = o < kBlock ? some + o : others + o - kBlock;
                            narrow(read(to + o) + scale * (read(from) + read(bias + o)), to + o);
                        }
                    };
                    down.multiply(part, panel, inner + part.row * inner_steps, then, sums, finish, [](int64_t) {});
                }
            const Output to = {nullptr, residual, out, H};
            for (int64_t t = 0; t < T; ++t) to.write(total + t * width, t, begin * kOutputs, width);
        }
    }
}

// The same for experts whose weights are packed one by one: `multiply` computes with an expert's gate_up, [2 F, H], or
// down, [H, F].
//
// Where there are many experts with tokens, threads take whole ones; else they share the products of one.
void separate_experts(const Element* x, int64_t T, int64_t H, const int64_t* picked, const float* weights, int64_t k,
                      int64_t first, int64_t E, int64_t F, Multiply multiply, const void* const* gate_up,
                      const void* const* down, const Element* gate_up_bias, const Element* down_bias, float alpha,
                      float limit, float shift, const Element* residual, Element* out) {
    const Pairs pairs(picked, weights, T, k, first, E, 1, kPanel);
    const Activation act = {alpha, limit, shift};
    const auto gathered = room<Element>(pairs.rows * H), inner = room<Element>(pairs.rows * 2 * F);
    const auto added = room<Element>(pairs.rows * H);
    const auto compute = [&](const Part& part) {
        Element *own = gathered.get() + part.row * H, *hidden = inner.get() + part.row * 2 * F;
        const int64_t rows = part.count, e = part.expert;
        for (int64_t r = 0; r < rows; ++r) std::memcpy(own + r * H, x + pairs.token[part.row + r] * H, H * sizeof(Element));
        multiply(gate_up[e], own, gate_up_bias ? gate_up_bias + e * 2 * F : nullptr, nullptr, hidden, rows, 0);
        for (int64_t r = 0; r < rows; ++r) {  // rows of 2 F become rows of F, in place
            const Element* gates = hidden + r * 2 * F;
            Element* to = hidden + r * F;
#pragma omp simd
            for (int64_t f = 0; f < F; ++f) to[f] = act(gates[f], gates[f + F]);
        }
        multiply(down[e], hidden, down_bias ? down_bias + e * H : nullptr, nullptr, added.get() + part.row * H, rows, 0);
    };
    const int64_t num_parts = pairs.parts.size();
    if (num_parts >= 2 * omp_get_max_threads()) {
#pragma omp parallel for schedule(dynamic)
        for (int64_t i = 0; i < num_parts; ++i) compute(pairs.parts[i]);
    } else {
        for (const Part& part : pairs.parts) compute(part);
    }
#pragma omp parallel for collapse(2)
    for (int64_t t = 0; t < T; ++t)
        for (int64_t block = 0; block < H; block += kOutputs) {
            const int64_t count = std::min(kOutputs, H - block);
            float total[kOutputs] = {};
            for (int64_t p = t * k; p < (t + 1) * k; ++p) {
                if (pairs.at[p] < 0) continue;
                const Element* from = added.get() + pairs.at[p] * H + block;
                const float scale = pairs.scale[pairs.at[p]];
                for (int64_t o = 0; o < count; ++o) total[o] += scale * float(from[o]);
            }
            Output{nullptr, residual, out, H}.write(total, t, block, kOutputs);
        }
}

}  // extern "C"
