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

// Adds the sums of all parts to `sums`.
extern "C" __global__ void column_sums_finish(const float* parts, Y* sums, int columns, int stride,
                                              int parts_count) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float sum = 0.f;
    for (int part = 0; part < parts_count; part++) sum += parts[static_cast<long long>(part) * stride + column];
    store(sums + column, load(sums + column) + sum);
}
