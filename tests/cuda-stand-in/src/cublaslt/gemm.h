// Products of matrices in f32.
#pragma once

#include "types.h"

#include <cstdint>
#include <vector>

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

// A matrix in memory, of which element (i, j) lies at i * row_step + j * column_step.
struct View {
    const void* elements;
    int type;
    size_t row_step, column_step;

    float at(size_t i, size_t j) const {
        const size_t offset = i * row_step + j * column_step;
        return type == BF16 ? widen(static_cast<const uint16_t*>(elements)[offset])
                            : static_cast<const float*>(elements)[offset];
    }
};

// The sum over k of a(i, k) * b(k, j), in ascending order of k, for each element alone: its bits depend on
// row i of `a` and column j of `b` and on nothing else. `mantissa_bits` rounds the factors first; 23 keeps
// them. The result is [m, n], by columns.
std::vector<float> multiply(const View& a, const View& b, size_t m, size_t n, size_t k, int mantissa_bits);

}  // namespace cuda_stand_in
