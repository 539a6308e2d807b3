// Backward passes of norms in one pass over the rows. A block walks over every `gridDim.x`th row; a thread
// keeps its columns of the row, of the weight, and of the sums over the rows in registers.
#pragma once

#include "own_columns.cuh"

// Most threads of a block: a row and its sums then have 128 registers for each thread.
constexpr int ROW_THREADS_MAX = 512;

template <class T>
__device__ __forceinline__ T* row_of(T* rows, u32 row, int columns) {
    return rows + static_cast<long long>(row) * columns;
}

// What is read of a row before its sums are known; the first lane of every warp has its statistics.
template <int STATISTICS>
struct Row {
    Own<X> gradients, values;
    float statistics[STATISTICS];

    __device__ __forceinline__ void load(const X* dy, const X* x, const float* all, u32 row, int columns) {
        gradients = load_own(row_of(dy, row, columns), columns);
        values = load_own(row_of(x, row, columns), columns);
        for (int i = 0; i < STATISTICS; i++)
            statistics[i] = threadIdx.x % 32 == 0 ? row_of(all, row, STATISTICS)[i] : 0.f;
    }
    __device__ __forceinline__ float statistic(int i) const {
        return __shfl_sync(ALL_LANES, statistics[i], 0);
    }
};

// Sums over the threads of a block, in one order, with one barrier: rows take turns at two sets of `parts`.
template <int COUNT>
__device__ __forceinline__ void row_sums(float (&values)[COUNT], float (&parts)[COUNT][32]) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int i = 0; i < COUNT; i++) {
        values[i] = warp_sum(values[i]);
        if (lane == 0) parts[i][threadIdx.x / 32] = values[i];
    }
    __syncthreads();
    for (int i = 0; i < COUNT; i++) values[i] = warp_sum(lane < warps ? parts[i][lane] : 0.f);
}

// Walks over the rows of this block. Two rows are under way at once, and take turns at registers, so that
// none waits to be moved.
template <int COUNT, class Rows>
__device__ __forceinline__ void walk_rows(Rows& all, float (&shared)[2][COUNT][32]) {
    Row<COUNT> even, odd;
    u32 row = blockIdx.x;
    even.load(all.dy, all.x, all.statistics, row, all.columns);
    while (row < all.rows) {
        all.step(row, even, odd, shared[0]);
        row += gridDim.x;
        if (row >= all.rows) return;
        all.step(row, odd, even, shared[1]);
        row += gridDim.x;
    }
}
