// Sums over rows, in two passes with a fixed order. Macros: X, Y, types of elements.
#include "device.cuh"

// Sums `rows_per_part` rows of a range of columns into a row of `parts`. Grid: columns, parts.
extern "C" __global__ void column_sums(const X* x, float* parts, long long rows, int columns, int first,
                                       int stride, int rows_per_part) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const long long begin = static_cast<long long>(blockIdx.y) * rows_per_part;
    const long long end = min(rows, begin + rows_per_part);
    float sum = 0.f;
    for (long long row = begin; row < end; row++) sum += load(x + row * stride + first + column);
    parts[static_cast<long long>(blockIdx.y) * columns + column] = sum;
}

// Adds the sums of all parts to `sums`, and those of `others_columns` columns behind them to `others`. Grid:
// a block for 32 columns, of up to 32 warps, each of which sums every so many parts.
extern "C" __global__ void column_sums_finish(const float* parts, Y* sums, Y* others, int columns,
                                              int others_columns, int stride, int parts_count) {
    __shared__ float shared[32][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int column = blockIdx.x * 32 + lane;
    const bool is_there = column < columns + others_columns;
    float sum = 0.f;
    if (is_there) {
#pragma unroll 8
        for (int part = warp; part < parts_count; part += warps)
            sum += parts[static_cast<long long>(part) * stride + column];
    }
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || !is_there) return;
    for (int i = 1; i < warps; i++) sum += shared[i][lane];
    Y* into = column < columns ? sums + column : others + (column - columns);
    store(into, load(into) + sum);
}
