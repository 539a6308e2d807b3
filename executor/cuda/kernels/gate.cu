// Gate of SwiGLU and GeGLU: rows hold gate, then up. Macros: X, type of elements; Y, type of what is written; WIDTH,
// elements of a thread.
#include "activation.cuh"

// y = activation(gate) up; len: elements of y
extern "C" __global__ void gate(const X* gate_up, Y* y, int columns, long long len, int kind) {
    const long long i = first_element<WIDTH>();
    if (i >= len) return;
    const long long at = i / columns * 2 * columns + i % columns;
    float gates[WIDTH], ups[WIDTH];
    Wide<WIDTH>::load(gate_up + at, gates);
    Wide<WIDTH>::load(gate_up + at + columns, ups);
    for (int k = 0; k < WIDTH; k++) {
        float value, slope;
        both(kind, gates[k], value, slope);
        gates[k] = value * ups[k];
    }
    Wide<WIDTH>::store(y + i, gates);
}

extern "C" __global__ void gate_backward(const X* dy, const X* gate_up, Y* d_gate_up, int columns,
                                         long long len, int kind) {
    const long long i = first_element<WIDTH>();
    if (i >= len) return;
    const long long at = i / columns * 2 * columns + i % columns;
    float gradients[WIDTH], gates[WIDTH], ups[WIDTH];
    Wide<WIDTH>::load(dy + i, gradients);
    Wide<WIDTH>::load(gate_up + at, gates);
    Wide<WIDTH>::load(gate_up + at + columns, ups);
    for (int k = 0; k < WIDTH; k++) {
        float value, slope;
        both(kind, gates[k], value, slope);
        gates[k] = gradients[k] * ups[k] * slope;
        ups[k] = gradients[k] * value;
    }
    Wide<WIDTH>::store(d_gate_up + at, gates);
    Wide<WIDTH>::store(d_gate_up + at + columns, ups);
}
