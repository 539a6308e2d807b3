// Exchanges the last two axes. Macros: X, Y, types of elements. A thread handles one element.
#include "device.cuh"

// x: [.., rows, columns]
extern "C" __global__ void transpose(const X* x, Y* y, int rows, int columns, int is_added, long long len) {
    const long long i = first_element<1>();
    if (i >= len) return;
    const long long of_matrix = static_cast<long long>(rows) * columns, matrix = i / of_matrix;
    const int row = static_cast<int>(i % of_matrix / columns), column = static_cast<int>(i % columns);
    Y* place = y + matrix * of_matrix + static_cast<long long>(column) * rows + row;
    const float value = load(x + i);
    store(place, is_added ? load(place) + value : value);
}
