// Normalization of rows to mean 0 and variance 1. Macros: X, type of elements; Y, type of what is written;
// WIDTH, elements of a thread at a time. Grid: a block per row, of whole warps, unless stated otherwise.
#include "norm_rows.cuh"

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

// A thread's part of rows, with the sums of dy n and dy over the rows so far; `share` is 1 / columns.
struct LayerRows {
    const X *dy, *x;
    const float* statistics;
    Y* dx;
    u32 rows;
    int columns;
    float share;
    Own<X> weights;
    float weight_sums[OWN], bias_sums[OWN];

    // Handles `row`, which is loaded, and starts to load the row after it in this block.
    __device__ __forceinline__ void step(u32 row, Row<2>& own, Row<2>& next, float (&parts)[2][32]) {
        Own<Y> before = {};
        if (dx) before = load_own(row_of(dx, row, columns), columns);
        if (row + gridDim.x < rows) next.load(dy, x, statistics, row + gridDim.x, columns);
        const float mean = own.statistic(0), over = own.statistic(1);
        float means[2] = {0.f, 0.f}, results[OWN];
        for (int k = 0; k < OWN; k++) {
            const float scaled = own.gradients[k] * weights[k], normal = (own.values[k] - mean) * over;
            means[0] += scaled;
            means[1] += scaled * normal;
            weight_sums[k] += own.gradients[k] * normal;
            bias_sums[k] += own.gradients[k];
        }
        row_sums(means, parts);
        const float average = means[0] * share, along = means[1] * share;
        for (int k = 0; k < OWN; k++) {
            const float normal = (own.values.again(k) - mean) * over;
            results[k] = before[k] + (own.gradients.again(k) * weights[k] - average - normal * along) * over;
        }
        if (dx) store_own(row_of(dx, row, columns), columns, results);
    }
};

// dx += (dn - mean(dn) - n mean(dn n)) / deviation, with n = (x - mean) / deviation and dn = dy weight,
// unless `dx` is null. Sums dy n and dy over the rows of a block into a row of `parts`, `[2, columns]`,
// unless that is null. Grid: at most a block per row; OWN columns for each thread.
extern "C" __global__ void __launch_bounds__(ROW_THREADS_MAX)
    layer_norm_backward(const X* dy, const X* x, const X* weight, const float* statistics, Y* dx,
                        float* parts, u32 rows, int columns, float share) {
    __shared__ float shared[2][2][32];
    LayerRows all = {dy, x, statistics, dx, rows, columns, share, load_own(weight, columns), {}, {}};
    walk_rows(all, shared);
    if (!parts) return;
    float* part = parts + 2ll * blockIdx.x * columns;
    store_own(part, columns, all.weight_sums);
    store_own(part + columns, columns, all.bias_sums);
}

// The gradient of x for rows of more columns than a block keeps.
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
        const float normal =
            (load(x + row * columns + column) - statistics[2 * row]) * statistics[2 * row + 1];
        weight += gradient * normal;
        bias += gradient;
    }
    float* part = parts + 2ll * blockIdx.y * columns;
    part[column] = weight;
    part[columns + column] = bias;
}
