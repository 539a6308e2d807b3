// Rotary positions. Macro of `rope`: X, type of elements. A thread handles one pair.
#include "device.cuh"

#ifndef X
#define X float
#endif

// cos, sin: [tokens, pairs]; positions: [axes, tokens]
extern "C" __global__ void rope_angles(const float* frequencies, const u32* axes, const u32* positions,
                                       float* cosines, float* sines, int tokens, int pairs) {
    const long long i = first_element<1>();
    if (i >= static_cast<long long>(tokens) * pairs) return;
    const int token = static_cast<int>(i / pairs), pair = static_cast<int>(i % pairs);
    const u32 position = positions[static_cast<long long>(axes[pair]) * tokens + token];
    float sine, cosine;
    sincosf(static_cast<float>(position) * frequencies[pair], &sine, &cosine);
    cosines[i] = cosine;
    sines[i] = sine;
}

// Rotates pairs of columns of the first heads of every row; sign: -1 for the gradient.
// step: columns from a pair to the next; gap: columns between both of a pair
extern "C" __global__ void rope(const float* cosines, const float* sines, X* x, int tokens, int heads,
                                int head_dim, int pairs, int step, int gap, int stride, float sign) {
    const long long i = first_element<1>(), of_row = static_cast<long long>(heads) * pairs;
    if (i >= tokens * of_row) return;
    const long long token = i / of_row;
    const int head = static_cast<int>(i % of_row / pairs), pair = static_cast<int>(i % pairs);
    X* low = x + token * stride + static_cast<long long>(head) * head_dim + pair * step;
    const float a = load(low), b = load(low + gap);
    const float cosine = cosines[token * pairs + pair], sine = sign * sines[token * pairs + pair];
    store(low, a * cosine - b * sine);
    store(low + gap, b * cosine + a * sine);
}
