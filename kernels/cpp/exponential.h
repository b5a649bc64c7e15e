#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// e^r for |r| <= ln(2) / 2, by the polynomial of Cephes' expf, of a float or a vector of them.
template <class Number>
inline Number small_exponential(Number r) {
    Number p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r + 1.0f;
}

// e^x to 2 units in the last place, in a form that the compiler vectorizes: 2^n * e^r. Below -87 it is 0.
inline float exponential(float x) {
    float clamped = x > 88.0f ? 88.0f : x;
    float n = std::nearbyint(clamped * 1.44269504f);
    float p = small_exponential(clamped - n * 0.693359375f + n * 2.12194440e-4f);
    int32_t bits = (static_cast<int32_t>(n < -126.0f ? -126.0f : n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof(power));
    return x < -87.0f ? 0.0f : p * power;
}
