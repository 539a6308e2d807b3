// Columns of rows that may be wider. Macros: X, Y, types of elements. A thread handles one element.
#include "device.cuh"

// Writes a bias to columns of every row.
extern "C" __global__ void bias_fill(const X* bias, Y* y, long long rows, int columns, int first, int stride) {
    const long long i = first_element<1>();
    if (i >= rows * columns) return;
    const long long row = i / columns;
    const int column = static_cast<int>(i % columns);
    store(y + row * stride + first + column, load(bias + column));
}

extern "C" __global__ void copy_columns(const X* x, int from, int from_stride, Y* y, int to, int to_stride,
                                        long long rows, int columns) {
    const long long i = first_element<1>();
    if (i >= rows * columns) return;
    const long long row = i / columns;
    const int column = static_cast<int>(i % columns);
    store(y + row * to_stride + to + column, load(x + row * from_stride + from + column));
}
