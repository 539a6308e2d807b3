// Adds weighted rows of x to rows of y, by a sparse matrix. Macros: X, Y, types of elements. Grid: a block
// column per written row.
#include "device.cuh"

// weights: none, or one per entry
extern "C" __global__ void gather_scatter(const u32* targets, const u32* starts, const u32* sources,
                                          const float* weights, const X* x, Y* y, int columns) {
    const u32 begin = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    Y* row = y + static_cast<long long>(targets[blockIdx.x]) * columns;
    for (int column = blockIdx.y * blockDim.x + threadIdx.x; column < columns;
         column += gridDim.y * blockDim.x) {
        float sum = load(row + column);
        for (u32 entry = begin; entry < end; entry++) {
            const float value = load(x + static_cast<long long>(sources[entry]) * columns + column);
            sum += weights ? weights[entry] * value : value;
        }
        store(row + column, sum);
    }
}
