// Normalization of rows to mean 0 and variance 1. Macros: X, type of elements; Y, type of what is written;
// WIDTH, elements of a thread at a time. Grid: a block per row, of whole warps, unless stated otherwise.
#include "device.cuh"

// statistics: mean and 1 / deviation of every row
extern "C" __global__ void layer_norm(const X* x, const X* weight, const X* bias, Y* y, float* statistics,
                                      int columns, float epsilon) {
    __shared__ float parts[32];
    const long long row = static_cast<long long>(blockIdx.x) * columns;
    float sum = 0.f, values[WIDTH], weights[WIDTH], biases[WIDTH];
    for (int i = threadIdx.x * WIDTH; i < columns; i += blockDim.x * WIDTH) {
        Wide<WIDTH>::load(x + row + i, values);
        for (int k = 0; k < WIDTH; k++) sum += values[k];
    }
    const float mean = block_sum(sum, parts) / columns;
    sum = 0.f;
    for (int i = threadIdx.x * WIDTH; i < columns; i += blockDim.x * WIDTH) {
        Wide<WIDTH>::load(x + row + i, values);
        for (int k = 0; k < WIDTH; k++) sum += (values[k] - mean) * (values[k] - mean);
    }
    const float over = 1.f / sqrtf(block_sum(sum, parts) / columns + epsilon);
    if (threadIdx.x == 0) {
        statistics[2 * blockIdx.x] = mean;
        statistics[2 * blockIdx.x + 1] = over;
    }
    for (int i = threadIdx.x * WIDTH; i < columns; i += blockDim.x * WIDTH) {
        Wide<WIDTH>::load(x + row + i, values);
        Wide<WIDTH>::load(weight + i, weights);
        Wide<WIDTH>::load(bias + i, biases);
        for (int k = 0; k < WIDTH; k++) values[k] = (values[k] - mean) * over * weights[k] + biases[k];
        Wide<WIDTH>::store(y + row + i, values);
    }
}

// dx += (dn - mean(dn) - n mean(dn n)) / deviation, with n = (x - mean) / deviation and dn = dy weight
extern "C" __global__ void layer_norm_dx(const X* dy, const X* x, const X* weight, const float* statistics,
                                         Y* dx, int columns) {
    __shared__ float parts[32];
    const long long row = static_cast<long long>(blockIdx.x) * columns;
    const float mean = statistics[2 * blockIdx.x], over = statistics[2 * blockIdx.x + 1];
    float sum = 0.f, product = 0.f, gradients[WIDTH], values[WIDTH], weights[WIDTH], sums[WIDTH];
    for (int i = threadIdx.x * WIDTH; i < columns; i += blockDim.x * WIDTH) {
        Wide<WIDTH>::load(dy + row + i, gradients);
        Wide<WIDTH>::load(x + row + i, values);
        Wide<WIDTH>::load(weight + i, weights);
        for (int k = 0; k < WIDTH; k++) {
            sum += gradients[k] * weights[k];
            product += gradients[k] * weights[k] * (values[k] - mean) * over;
        }
    }
    const float average = block_sum(sum, parts) / columns, along = block_sum(product, parts) / columns;
    for (int i = threadIdx.x * WIDTH; i < columns; i += blockDim.x * WIDTH) {
        Wide<WIDTH>::load(dy + row + i, gradients);
        Wide<WIDTH>::load(x + row + i, values);
        Wide<WIDTH>::load(weight + i, weights);
        Wide<WIDTH>::load(dx + row + i, sums);
        for (int k = 0; k < WIDTH; k++) {
            const float normal = (values[k] - mean) * over;
            sums[k] += (gradients[k] * weights[k] - average - normal * along) * over;
        }
        Wide<WIDTH>::store(dx + row + i, sums);
    }
}

// Sums dy n and dy over `rows_per_part` rows into a row of `parts`, `[2, columns]`. Grid: columns, parts; a
// thread per column.
extern "C" __global__ void layer_norm_dw(const X* dy, const X* x, const float* statistics, float* parts,
                                         long long rows, int columns, int rows_per_part) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const long long begin = static_cast<long long>(blockIdx.y) * rows_per_part;
    const long long end = min(rows, begin + rows_per_part);
    float weight = 0.f, bias = 0.f;
    for (long long row = begin; row < end; row++) {
        const float gradient = load(dy + row * columns + column);
        const float normal = (load(x + row * columns + column) - statistics[2 * row]) * statistics[2 * row + 1];
        weight += gradient * normal;
        bias += gradient;
    }
    float* part = parts + 2ll * blockIdx.y * columns;
    part[column] = weight;
    part[columns + column] = bias;
}
