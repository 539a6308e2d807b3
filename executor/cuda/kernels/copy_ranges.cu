// Copies ranges of elements. Macro: X, type of elements. Grid: a block column per range.
#include "device.cuh"

// ranges: [count, 3]: first element that is read, first that is written, number
extern "C" __global__ void copy_ranges(const long long* ranges, const X* x, X* y) {
    const long long* range = ranges + 3ll * blockIdx.x;
    const long long from = range[0], to = range[1], len = range[2];
    for (long long i = static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x; i < len;
         i += static_cast<long long>(gridDim.y) * blockDim.x)
        y[to + i] = x[from + i];
}
