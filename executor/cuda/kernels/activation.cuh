// Activation functions, with their derivatives.
#pragma once

#include "device.cuh"

// The values of `kind`.
enum Activation { GELU_EXACT = 0, GELU_TANH = 1, GELU_QUICK = 2, SILU = 3 };

constexpr float SQRT_2_OVER_PI = 0.7978845608028654f;
constexpr float CUBIC = 0.044715f;

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__device__ __forceinline__ void gated(float x, float steepness, float& value, float& slope) {
    const float open = sigmoid(steepness * x);
    value = x * open;
    slope = open * (1.f + steepness * x * (1.f - open));
}

// Value and derivative.
__device__ __forceinline__ void both(int kind, float x, float& value, float& slope) {
    if (kind == GELU_EXACT) {
        const float below = 0.5f * (1.f + erff(x * 0.7071067811865476f));
        const float density = expf(-0.5f * x * x) * (0.5f * SQRT_2_OVER_PI);
        value = x * below;
        slope = below + x * density;
    } else if (kind == GELU_TANH) {
        const float tanh = tanhf(SQRT_2_OVER_PI * (x + CUBIC * x * x * x));
        const float inner_slope = SQRT_2_OVER_PI * (1.f + 3.f * CUBIC * x * x);
        const float open = 0.5f * (1.f + tanh);
        value = x * open;
        slope = open + 0.5f * x * (1.f - tanh * tanh) * inner_slope;
    } else {
        gated(x, kind == GELU_QUICK ? 1.702f : 1.f, value, slope);
    }
}
