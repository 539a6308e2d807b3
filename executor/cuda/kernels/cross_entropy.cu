// Cross entropy of logits with its gradient. Macros: X, type of logits; WIDTH, elements of a thread at a time.
// Grid: a block per row, of whole warps.
#include "device.cuh"

// A term of a sum of exponentials; a logit of minus infinity has none, one that is no number has itself.
__device__ __forceinline__ float exponential(float logit, float most) {
    return logit == MINUS_INFINITY ? 0.f : expf(logit - most);
}

// Replaces logits by the gradient of `scale` times the loss, and writes the unscaled loss of every row.
extern "C" __global__ void cross_entropy(X* logits, const u32* targets, double* losses, int columns,
                                         float scale) {
    __shared__ float parts[32];
    X* row = logits + static_cast<long long>(blockIdx.x) * columns;
    const u32 target = targets[blockIdx.x];
    const bool is_word = target < static_cast<u32>(columns);
    const float logit = is_word ? load(row + target) : 0.f;
    // the maximum so far keeps exponentials from overflowing
    float most = MINUS_INFINITY, sum = 0.f, values[WIDTH];
    for (int i = threadIdx.x * WIDTH; i < columns; i += blockDim.x * WIDTH) {
        Wide<WIDTH>::load(row + i, values);
        float largest = values[0];
        for (int k = 1; k < WIDTH; k++) largest = fmaxf(largest, values[k]);
        if (largest > most) {
            sum *= exponential(most, largest);
            most = largest;
        }
        for (int k = 0; k < WIDTH; k++) sum += exponential(values[k], most);
    }
    const float of_thread = most;
    most = block_max(most, parts);
    const float total = block_sum(sum * exponential(of_thread, most), parts), factor = scale / total;
    for (int i = threadIdx.x * WIDTH; i < columns; i += blockDim.x * WIDTH) {
        Wide<WIDTH>::load(row + i, values);
        for (int k = 0; k < WIDTH; k++) {
            values[k] = expf(values[k] - most) * factor;
            if (static_cast<u32>(i + k) == target) values[k] -= scale;
        }
        Wide<WIDTH>::store(row + i, values);
    }
    if (threadIdx.x == 0) {
        const double loss = log(static_cast<double>(total)) - (logit - most);
        losses[blockIdx.x] = is_word ? loss : static_cast<double>(__uint_as_float(0x7fc00000u));
    }
}
