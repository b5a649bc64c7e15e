// Vectors of numbers, as wide as a register of the level of instruction sets that a library is compiled for.

#pragma once

#include "element.h"
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

// What kernels are shaped by. A library is compiled for each level of `processor.py`.
#if defined(__AVX512F__)
constexpr int64_t kLane = 16;  // floats of a register
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int64_t kLane = 8;
constexpr int kRegisters = 16;
#else
constexpr int64_t kLane = 4;
constexpr int kRegisters = 32;
#endif
#ifdef __AVX512BF16__
constexpr bool kMultipliesPairs = true;  // of BFloat16, with each other
#else
constexpr bool kMultipliesPairs = false;
#endif
constexpr int64_t kLineLanes = 16;  // floats of a line of the cache

typedef float Vector __attribute__((vector_size(kLane * 4)));
typedef uint32_t Codes __attribute__((vector_size(kLane * 4)));
typedef int32_t Integers __attribute__((vector_size(kLane * 4)));
typedef uint16_t Shorts __attribute__((vector_size(kLane * 2)));

template <class To>
inline To load(const void* from) {
    To found;
    std::memcpy(&found, from, sizeof(found));
    return found;
}

inline Vector read(const float* from) { return load<Vector>(from); }

inline Vector widen(const float* from) { return load<Vector>(from); }

inline Vector widen(const BFloat16* from) {
    return (Vector)(__builtin_convertvector(load<Shorts>(from), Codes) << 16);
}

// Floats of half precision.
inline Vector widen_halves(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Vector)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
    return (Vector)_mm256_cvtph_ps(load<__m128i>(from));
#elif defined(__ARM_NEON)
    return (Vector)vcvt_f32_f16(load<float16x4_t>(from));
#endif
}

struct Half {  // of half precision
    uint16_t bits;
};

inline Vector widen(const Half* from) { return widen_halves(&from->bits); }

struct Wide {  // a number that was widened
    float number;
};

inline Vector widen(const Wide* from) { return read(&from->number); }

inline void narrow(Vector numbers, float* to) { std::memcpy(to, &numbers, sizeof(numbers)); }

inline void narrow(Vector numbers, BFloat16* to) {
#ifdef __AVX512BF16__
    const auto found = _mm512_cvtneps_pbh((__m512)numbers);
#else
    const Codes words = (Codes)numbers, rounded = (words + 0x7fff + (words >> 16 & 1)) >> 16;
    const Shorts found = __builtin_convertvector(numbers == numbers ? rounded : Codes{} + 0x7fc0, Shorts);
#endif
    std::memcpy(to, &found, sizeof(found));
}
