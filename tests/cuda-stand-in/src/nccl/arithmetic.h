// Reductions of vectors.
#pragma once

#include "types.h"

#include <vector>

namespace nccl_stand_in {

bool can_reduce(int type, int reduction);

// Reduces vectors of `count` elements element by element, in the order of the vectors. Narrow floating-point
// types are computed in float32 and rounded once. The result may lie in one of the vectors.
void reduce(const std::vector<const void*>& vectors, size_t count, int type, int reduction, void* result);

}  // namespace nccl_stand_in
