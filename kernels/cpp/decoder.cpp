// Runs a decode-only micro-batch through all decoder layers of a stage in one call, for `kernels/decoder.py`.
//
// For one row, calling a layer's operators from Python takes longer than computing them. The computation is that of
// `models/decoder.py`, in the same order.

#include <cmath>
#include <vector>

#include "operators.h"
#include "rows.h"

namespace {

struct Product {
    Multiply multiply;
    const void* weight;
    const Element* bias;
};

struct Norm {
    const Element *weight, *bias;  // no bias: null
};

struct Layer {
    Product qkv, out, fc1, fc2;
    Norm attention_norm, ffn_norm;
    const Element *query_norm, *key_norm;  // null: none
    void *keys, *values;
    int64_t kind;  // index of its `Tables`
};

// Inputs of a micro-batch that layers of one kind share.
struct Tables {
    const int64_t* slots;
    const Element *cos, *sin;  // null: no rotation
    const int64_t* starts;
    const int32_t* blocks;
    int64_t width, window;
};

// Arguments of the tensor-parallel all-reduce, `all_reduce` in shared_memory.cpp.
struct Ranks {
    int64_t (*all_reduce)(void* base, int64_t rank, int64_t size, int64_t capacity, const void* ended, int64_t* round,
                          Element* x, int64_t n, double timeout_s);
    void* base;
    int64_t rank, size, capacity;
    const void* ended;
    int64_t* round;
    double timeout_s;
};

// The operators, sizes and layers of a stage.
struct Stage {
    decltype(&::add_and_norm) add_and_norm;
    decltype(&::gated_silu) gated_silu;
    decltype(&::rotate_and_write) rotate_and_write;
    decltype(&::attend_decodes) attend_decodes;
    const Layer* layers;
    int64_t num_layers, H, K, G, D, F;
    int64_t cache_kind, cache_head, block_size;
    double eps, head_eps;
};

}  // namespace

extern "C" {

// Runs the layers on x[T, H], in place. `ranks` is null without tensor parallelism. Returns 1 if an all-reduce timed out.
int64_t decode(const Stage* s, const Tables* tables, const Ranks* ranks, Element* x, int64_t T) {
    const int64_t H = s->H, K = s->K, G = s->G, D = s->D, F = s->F, group = (G + 2) * D;
    static thread_local std::vector<Element> memory;
    memory.resize(std::max<int64_t>(memory.size(), T * (2 * H + K * group + 2 * K * G * D + 3 * F)));
    Element *normed = memory.data(), *part = normed + T * H, *qkv = part + T * H, *queries = qkv + T * K * group;
    Element *attended = queries + T * K * G * D, *hidden = attended + T * K * G * D, *gated = hidden + T * 2 * F;
    const Element* term = nullptr;  // an all-reduce's result that the next norm adds to x
    const auto multiply = [&](const Product& p, const Element* from, const Element* residual, Element* to) {
        p.multiply(p.weight, from, p.bias, residual, to, T, 0);
    };
    const auto norm = [&](const Norm& of) {
        s->add_and_norm(x, term, of.weight, of.bias, normed, T, H, float(s->eps));
        term = nullptr;
    };
    const auto add = [&](const Product& p, const Element* from) {  // false: the all-reduce timed out
        multiply(p, from, ranks ? nullptr : x, ranks ? part : x);
        if (!ranks) return true;
        term = part;
        return !ranks->all_reduce(ranks->base, ranks->rank, ranks->size, ranks->capacity, ranks->ended, ranks->round, part,
                                  T * H, ranks->timeout_s);
    };
    for (int64_t i = 0; i < s->num_layers; ++i) {
        const Layer& layer = s->layers[i];
        const Tables& of = tables[layer.kind];
        norm(layer.attention_norm);
        multiply(layer.qkv, normed, nullptr, qkv);
        s->rotate_and_write(s->cache_kind, layer.keys, layer.values, s->cache_head, qkv, K * group, group,
                            qkv + (G + 1) * D, K * group, group, layer.query_norm, layer.key_norm, float(s->head_eps),
                            of.cos, of.sin, of.slots, queries, T, K, G, D);
        s->attend_decodes(s->cache_kind, layer.keys, layer.values, s->cache_head, queries, of.starts, of.blocks, of.width,
                          s->block_size, of.window, attended, T, K, G, D, 1.0f / std::sqrt(float(D)));
        if (!add(layer.out, attended)) return 1;
        norm(layer.ffn_norm);
        multiply(layer.fc1, normed, nullptr, hidden);
        s->gated_silu(hidden, gated, T, F);
        if (!add(layer.fc2, gated)) return 1;
    }
    if (term)
        for (int64_t i = 0; i < T * H; ++i) x[i] = float(x[i]) + float(term[i]);
    return 0;
}

}  // extern "C"
