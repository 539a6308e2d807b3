// Sums and scalings of whole tensors. Macros: X, Y, types of elements; WIDTH, elements of a thread.
#include "device.cuh"

// y += x
extern "C" __global__ void add(const X* x, Y* y, long long len) {
    const long long i = first_element<WIDTH>();
    if (i >= len) return;
    float a[WIDTH], b[WIDTH];
    Wide<WIDTH>::load(x + i, a);
    Wide<WIDTH>::load(y + i, b);
    for (int k = 0; k < WIDTH; k++) b[k] += a[k];
    Wide<WIDTH>::store(y + i, b);
}

// y *= factor
extern "C" __global__ void scale(Y* y, long long len, float factor) {
    const long long i = first_element<WIDTH>();
    if (i >= len) return;
    float b[WIDTH];
    Wide<WIDTH>::load(y + i, b);
    for (int k = 0; k < WIDTH; k++) b[k] *= factor;
    Wide<WIDTH>::store(y + i, b);
}
