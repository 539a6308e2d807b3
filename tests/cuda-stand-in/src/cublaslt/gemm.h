// Products of matrices in f32.
#pragma once

#include "types.h"

#include "../execution/bf16.h"

#include <cstdint>
#include <vector>

namespace cuda_stand_in {

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
