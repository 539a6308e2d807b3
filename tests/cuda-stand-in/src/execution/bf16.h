// Conversions of bf16.
#pragma once

#include <cstdint>

namespace cuda_stand_in {

inline float widen(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    __builtin_memcpy(&value, &word, sizeof value);
    return value;
}

// Rounds to the nearest bf16, ties to even.
inline uint16_t round_to_bf16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace cuda_stand_in
