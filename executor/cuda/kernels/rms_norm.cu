// Normalization of rows by their root mean square. An offset is added to weights. Macros: X, type of
// elements; Y, type of what is written; WIDTH, elements of a thread at a time. Grid: a block per row, of
// whole warps, unless stated otherwise.
#include "norm_rows.cuh"

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

// Part of a gradient along its row, by the sum of dn x over the row; `share` is 1 / columns.
__device__ __forceinline__ float along_row(float sum, float share, float over) {
    return sum * share * over * over;
}

// A thread's part of rows, with the sums of dy n over the rows so far.
struct RmsRows {
    const X *dy, *x;
    const float* statistics;
    Y* dx;
    u32 rows;
    int columns;
    float share, offset;
    Own<X> weights;
    float sums[OWN];

    // Handles `row`, which is loaded, and starts to load the row after it in this block.
    __device__ __forceinline__ void step(u32 row, Row<1>& own, Row<1>& next, float (&parts)[1][32]) {
        Own<Y> before = {};
        if (dx) before = load_own(row_of(dx, row, columns), columns);
        if (row + gridDim.x < rows) next.load(dy, x, statistics, row + gridDim.x, columns);
        float sum[1] = {0.f}, results[OWN];
        const float over = own.statistic(0);
        for (int k = 0; k < OWN; k++) {
            const float product = own.gradients[k] * own.values[k];
            sum[0] += product * (weights[k] + offset);
            sums[k] += product * over;
        }
        row_sums(sum, parts);
        const float along = along_row(sum[0], share, over);
        for (int k = 0; k < OWN; k++) {
            const float scaled = own.gradients.again(k) * (weights[k] + offset);
            results[k] = before[k] + (scaled - own.values.again(k) * along) * over;
        }
        if (dx) store_own(row_of(dx, row, columns), columns, results);
    }
};

// dx += (dn - n mean(dn n)) / rms, with n = x / rms and dn = dy (weight + offset), unless `dx` is null. Sums
// dy n over the rows of a block into a row of `parts`, unless that is null. Grid: at most a block per row;
// OWN columns for each thread.
extern "C" __global__ void __launch_bounds__(ROW_THREADS_MAX)
    rms_norm_backward(const X* dy, const X* x, const X* weight, const float* inverse, Y* dx, float* parts,
                      u32 rows, int columns, float share, float offset) {
    __shared__ float shared[2][1][32];
    RmsRows all = {dy, x, inverse, dx, rows, columns, share, offset, load_own(weight, columns), {}};
    walk_rows(all, shared);
    if (parts) store_own(parts + static_cast<long long>(blockIdx.x) * columns, columns, all.sums);
}

// The gradient of x for rows of more columns than a block keeps.
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
    const float along = along_row(block_sum(sum, parts), 1.f / columns, over);
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
