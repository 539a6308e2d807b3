// Activation functions, element by element. Macros: X, Y, types of elements; WIDTH, elements of a thread.
#include "activation.cuh"

extern "C" __global__ void activate(const X* x, Y* y, long long len, int kind) {
    const long long i = first_element<WIDTH>();
    if (i >= len) return;
    float values[WIDTH], slope;
    Wide<WIDTH>::load(x + i, values);
    for (int k = 0; k < WIDTH; k++) both(kind, values[k], values[k], slope);
    Wide<WIDTH>::store(y + i, values);
}

// d becomes the gradient of x.
extern "C" __global__ void activate_backward(const X* x, Y* d, long long len, int kind) {
    const long long i = first_element<WIDTH>();
    if (i >= len) return;
    float values[WIDTH], gradients[WIDTH], value, slope;
    Wide<WIDTH>::load(x + i, values);
    Wide<WIDTH>::load(d + i, gradients);
    for (int k = 0; k < WIDTH; k++) {
        both(kind, values[k], value, slope);
        gradients[k] *= slope;
    }
    Wide<WIDTH>::store(d + i, gradients);
}
