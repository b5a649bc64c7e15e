// The type `Element` of the tensors that a library takes: float, or BFloat16. `cpp_build.py` compiles it for each.
// Sums are float32 for both.

#pragma once

#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

struct BFloat16 {
    uint16_t bits;

    // Takes the nearest number, and of two as near the even one. Compilers make vectors of this, not of a constructor.
    void operator=(float x) {
        uint32_t word;
        std::memcpy(&word, &x, sizeof(word));
        bits = x != x ? 0x7fc0 : (word + 0x7fff + (word >> 16 & 1)) >> 16;
    }
    operator float() const {
        const uint32_t word = static_cast<uint32_t>(bits) << 16;
        float x;
        std::memcpy(&x, &word, sizeof(x));
        return x;
    }
};

typedef ELEMENT Element;

// A word is what a product reads at once: 4 bytes, which are one float or two neighbouring BFloat16.
constexpr int64_t kInWord = sizeof(float) / sizeof(Element);

// Returns sum + x * w, lane by lane, of vectors of words.
template <class Vector>
inline Vector add_product(Vector sum, Vector x, Vector w) {
    if constexpr (kInWord == 1) {
        return sum + x * w;
    } else {
#ifdef __AVX512BF16__
        if constexpr (sizeof(Vector) == 64) return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#endif
        typedef uint32_t Bits __attribute__((vector_size(sizeof(Vector))));
        const Bits a = (Bits)x, b = (Bits)w;
        return sum + (Vector)(a << 16) * (Vector)(b << 16) + (Vector)(a & 0xffff0000u) * (Vector)(b & 0xffff0000u);
    }
}
