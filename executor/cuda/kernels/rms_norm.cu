// Normalization of rows by their root mean square. An offset is added to weights. Macros: X, type of elements; Y,
// type of what is written; WIDTH, elements of a thread at a time. Grid: a block per row, of whole warps, unless stated otherwise.
#include "device.cuh"

// inverse: 1 / root mean square of every row
extern "C" __global__ void rms_norm(const X* x, const X* weight, Y* y, float* inverse, int columns,
                                    float epsilon, float offset) {
    __shared__ float parts[32];
    const long long row = static_cast<long long>(blockIdx.x) * columns;
    float sum = 0.f, values[WIDTH], weights[WIDTH];
    for (int i = threadIdx.x * WIDTH; i < columns; i += blockDim.x * WIDTH) {
        Wide<WIDTH>::load(x + row + i, values);
        for (int k = 0; k < WIDTH; k++) sum += values[k] * values[k];
    }
    const float over = 1.f / sqrtf(block_sum(sum, parts) / columns + epsilon);
    if (threadIdx.x == 0) inverse[blockIdx.x] = over;
    for (int i = threadIdx.x * WIDTH; i < columns; i += blockDim.x * WIDTH) {
        Wide<WIDTH>::load(x + row + i, values);
        Wide<WIDTH>::load(weight + i, weights);
        for (int k = 0; k < WIDTH; k++) values[k] *= over * (weights[k] + offset);
        Wide<WIDTH>::store(y + row + i, values);
    }
}

// dx += (dn - n mean(dn n)) / rms, with n = x / rms and dn = dy (weight + offset)
extern "C" __global__ void rms_norm_dx(const X* dy, const X* x, const X* weight, const float* inverse, Y* dx,
                                       int columns, float offset) {
    __shared__ float parts[32];
    const long long row = static_cast<long long>(blockIdx.x) * columns;
    const float over = inverse[blockIdx.x];
    float sum = 0.f, gradients[WIDTH], values[WIDTH], weights[WIDTH], sums[WIDTH];
    for (int i = threadIdx.x * WIDTH; i < columns; i += blockDim.x * WIDTH) {
        Wide<WIDTH>::load(dy + row + i, gradients);
        Wide<WIDTH>::load(x + row + i, values);
        Wide<WIDTH>::load(weight + i, weights);
        for (int k = 0; k < WIDTH; k++) sum += gradients[k] * (weights[k] + offset) * values[k];
    }
    const float along = block_sum(sum, parts) / columns * over * over;
    for (int i = threadIdx.x * WIDTH; i < columns; i += blockDim.x * WIDTH) {
        Wide<WIDTH>::load(dy + row + i, gradients);
        Wide<WIDTH>::load(x + row + i, values);
        Wide<WIDTH>::load(weight + i, weights);
        Wide<WIDTH>::load(dx + row + i, sums);
        for (int k = 0; k < WIDTH; k++)
            sums[k] += (gradients[k] * (weights[k] + offset) - values[k] * along) * over;
        Wide<WIDTH>::store(dx + row + i, sums);
    }
}

// Sums dy n over `rows_per_part` rows into a row of `parts`. Grid: columns, parts; a thread per column.
extern "C" __global__ void rms_norm_dw(const X* dy, const X* x, const float* inverse, float* parts,
                                       long long rows, int columns, int rows_per_part) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const long long begin = static_cast<long long>(blockIdx.y) * rows_per_part;
    const long long end = min(rows, begin + rows_per_part);
    float sum = 0.f;
    for (long long row = begin; row < end; row++)
        sum += load(dy + row * columns + column) * load(x + row * columns + column) * inverse[row];
    parts[static_cast<long long>(blockIdx.y) * columns + column] = sum;
}
