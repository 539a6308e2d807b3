// Limits of launches, and the host threads that run them.
#pragma once

#include "worker.h"

namespace cuda_stand_in {

constexpr int THREADS_PER_BLOCK_MAX = 1024;
constexpr int THREADS_PER_MULTIPROCESSOR_MAX = 2048;
constexpr int BLOCKS_PER_MULTIPROCESSOR_MAX = 32;
constexpr int DYNAMIC_BYTES_DEFAULT = 48 << 10;
constexpr int DYNAMIC_BYTES_MAX = 232448;
constexpr int SHARED_BYTES_PER_MULTIPROCESSOR = 233472;
constexpr int SHARED_BYTES_RESERVED = 1024;  // per block

// Runs all blocks of a launch on the number of host threads that is set.
Fault run_launch(const Launch& launch);

}  // namespace cuda_stand_in
