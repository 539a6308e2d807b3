// Weights of the experts of tokens. Macros: SCORES, function of the logits, in the order of `ExpertScores`;
// X, Y, types of elements. Grid: a thread per token, unless stated otherwise.
#include "device.cuh"

constexpr int SOFTMAX = 0, SOFTMAX_OF_CHOSEN = 1, SIGMOID = 2;
constexpr float SUM_MIN = 1e-20f;

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// Shared by the weights of a token: the largest logit and the sum of exponentials, or of sigmoids.
struct Whole {
    float most, total;

    __device__ Whole(const float* logits, const u32* chosen, int experts, int per_token) {
        most = MINUS_INFINITY, total = 0.f;
        if (SCORES == SOFTMAX) {
            for (int i = 0; i < experts; i++) most = fmaxf(most, logits[i]);
            for (int i = 0; i < experts; i++) total += expf(logits[i] - most);
        } else if (SCORES == SOFTMAX_OF_CHOSEN) {
            for (int i = 0; i < per_token; i++) most = fmaxf(most, logits[chosen[i]]);
            for (int i = 0; i < per_token; i++) total += expf(logits[chosen[i]] - most);
        } else if (SCORES == SIGMOID) {
            total = 1.f;
        } else {
            for (int i = 0; i < per_token; i++) total += sigmoid(logits[chosen[i]]);
            total += SUM_MIN;
        }
    }

    __device__ float weight(float logit) const {
        return (SCORES == SOFTMAX || SCORES == SOFTMAX_OF_CHOSEN ? expf(logit - most) : sigmoid(logit)) / total;
    }
};

extern "C" __global__ void expert_weights(const float* logits, const u32* chosen, float* weights,
                                          long long tokens, int experts, int per_token, float scale) {
    const long long token = first_element<1>();
    if (token >= tokens) return;
    logits += token * experts, chosen += token * per_token, weights += token * per_token;
    const Whole whole(logits, chosen, experts, per_token);
    for (int i = 0; i < per_token; i++) weights[i] = scale * whole.weight(logits[chosen[i]]);
}

extern "C" __global__ void expert_weights_backward(const float* logits, const u32* chosen,
                                                   const float* d_weights, Y* d_logits, long long tokens,
                                                   int experts, int per_token, float scale) {
    const long long token = first_element<1>();
    if (token >= tokens) return;
    logits += token * experts, d_logits += token * experts;
    chosen += token * per_token, d_weights += token * per_token;
    const Whole whole(logits, chosen, experts, per_token);
    float along = 0.f;
    if (SCORES != SIGMOID)
        for (int i = 0; i < per_token; i++) along += d_weights[i] * whole.weight(logits[chosen[i]]);
    for (int i = 0; i < experts; i++)
        store(d_logits + i, SCORES == SOFTMAX ? -scale * along * whole.weight(logits[i]) : 0.f);
    for (int i = 0; i < per_token; i++) {
        const float logit = logits[chosen[i]], weight = whole.weight(logit);
        float gradient = scale * (d_weights[i] - along) * weight;
        if (SCORES >= SIGMOID) gradient *= 1.f - sigmoid(logit);
        store(d_logits + chosen[i], gradient);
    }
}

// Grid: a warp per slot.
extern "C" __global__ void row_products(const X* tokens, const X* rows, const u32* places, float* products,
                                        long long slots, int per_token, int columns) {
    const long long slot = first_element<1>() / 32;
    if (slot >= slots) return;
    const X* token = tokens + slot / per_token * columns;
    const X* row = rows + static_cast<long long>(places[slot]) * columns;
    float sum = 0.f;
    for (int i = threadIdx.x % 32; i < columns; i += 32) sum += load(token + i) * load(row + i);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) products[slot] = sum;
}
