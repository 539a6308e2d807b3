// Gate with bounds, gate and up in turns. Macro: X, type of elements. Grid: a thread per gated number.
#include "device.cuh"

extern "C" __global__ void clamped_gate(const X* gate_up, X* y, long long len, float limit, float alpha) {
    const long long i = first_element<1>();
    if (i >= len) return;
    const float gate = fminf(load(gate_up + 2 * i), limit);
    const float up = fmaxf(fminf(load(gate_up + 2 * i + 1), limit), -limit);
    store(y + i, (up + 1.f) * gate / (1.f + expf(-alpha * gate)));
}

extern "C" __global__ void clamped_gate_backward(const X* dy, const X* gate_up, X* d_gate_up, long long len,
                                                 float limit, float alpha) {
    const long long i = first_element<1>();
    if (i >= len) return;
    const float raw_gate = load(gate_up + 2 * i), raw_up = load(gate_up + 2 * i + 1), d = load(dy + i);
    const float gate = fminf(raw_gate, limit), up = fmaxf(fminf(raw_up, limit), -limit);
    const float open = 1.f / (1.f + expf(-alpha * gate));
    const float d_gate = d * (up + 1.f) * open * (1.f + alpha * gate * (1.f - open));
    store(d_gate_up + 2 * i, raw_gate > limit ? 0.f : d_gate);
    store(d_gate_up + 2 * i + 1, fabsf(raw_up) > limit ? 0.f : d * gate * open);
}
