// The operators of a decoder layer that `decoder.cpp` calls; `operators.cpp` and `attention.cpp` say what they do.

#pragma once

#include "element.h"

extern "C" {

void add_and_norm(Element* x, const Element* term, const Element* weight, const Element* bias, Element* out, int64_t T,
                  int64_t H, float eps);

void gated_silu(const Element* hidden, Element* out, int64_t T, int64_t F);

void rotate_and_write(int64_t kind, void* keys, void* values, int64_t cache_head, const Element* qk, int64_t qk_token,
                      int64_t qk_head, const Element* v, int64_t v_token, int64_t v_head, const Element* query_weight,
                      const Element* key_weight, float eps, const Element* cos, const Element* sin,
                      const int64_t* slots, Element* queries, int64_t T, int64_t K, int64_t G, int64_t D);

void attend_decodes(int64_t kind, const void* keys, const void* values, int64_t cache_head, const Element* queries,
                    const int64_t* starts, const int32_t* tables, int64_t M, int64_t block_size, int64_t window,
                    Element* out, int64_t B, int64_t K, int64_t G, int64_t D, float scale);

}  // extern "C"
