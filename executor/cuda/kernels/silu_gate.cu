// Gate of SwiGLU: rows hold gate, then up. Macros: X, type of elements; Y, type of what is written; WIDTH,
// elements of a thread.
#include "device.cuh"

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// y = silu(gate) up; len: elements of y
extern "C" __global__ void silu_gate(const X* gate_up, Y* y, int columns, long long len) {
    const long long i = first_element<WIDTH>();
    if (i >= len) return;
    const long long at = i / columns * 2 * columns + i % columns;
    float gates[WIDTH], ups[WIDTH];
    Wide<WIDTH>::load(gate_up + at, gates);
    Wide<WIDTH>::load(gate_up + at + columns, ups);
    for (int k = 0; k < WIDTH; k++) gates[k] = gates[k] * sigmoid(gates[k]) * ups[k];
    Wide<WIDTH>::store(y + i, gates);
}

extern "C" __global__ void silu_gate_backward(const X* dy, const X* gate_up, Y* d_gate_up, int columns,
                                              long long len) {
    const long long i = first_element<WIDTH>();
    if (i >= len) return;
    const long long at = i / columns * 2 * columns + i % columns;
    float gradients[WIDTH], gates[WIDTH], ups[WIDTH];
    Wide<WIDTH>::load(dy + i, gradients);
    Wide<WIDTH>::load(gate_up + at, gates);
    Wide<WIDTH>::load(gate_up + at + columns, ups);
    for (int k = 0; k < WIDTH; k++) {
        const float open = sigmoid(gates[k]), gradient = gradients[k], gate = gates[k];
        gates[k] = gradient * ups[k] * open * (1.f + gate * (1.f - open));
        ups[k] = gradient * gate * open;
    }
    Wide<WIDTH>::store(d_gate_up + at, gates);
    Wide<WIDTH>::store(d_gate_up + at + columns, ups);
}
