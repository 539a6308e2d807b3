// One learned scale per column. Macros: X, type of elements; Y, type of what is written. A thread handles one
// element unless stated otherwise.
#include "device.cuh"

// y += scale x
extern "C" __global__ void layer_scale(const X* x, const X* scales, Y* y, long long len, int columns) {
    const long long i = first_element<1>();
    if (i >= len) return;
    store(y + i, load(y + i) + load(scales + i % columns) * load(x + i));
}

// dx = scale dy
extern "C" __global__ void layer_scale_dx(const X* dy, const X* scales, Y* dx, long long len, int columns) {
    const long long i = first_element<1>();
    if (i >= len) return;
    store(dx + i, load(scales + i % columns) * load(dy + i));
}

// Sums x dy over `rows_per_part` rows into a row of `parts`. Grid: columns, parts; a thread per column.
extern "C" __global__ void layer_scale_ds(const X* x, const X* dy, float* parts, long long rows, int columns,
                                          int rows_per_part) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const long long begin = static_cast<long long>(blockIdx.y) * rows_per_part;
    const long long end = min(rows, begin + rows_per_part);
    float sum = 0.f;
    for (long long row = begin; row < end; row++)
        sum += load(x + row * columns + column) * load(dy + row * columns + column);
    parts[static_cast<long long>(blockIdx.y) * columns + column] = sum;
}
