// Cross entropy of logits with its gradient. Macro: X, type of logits. Grid: a block per row, of whole warps.
#include "device.cuh"

// Replaces logits by the gradient of `scale` times the loss, and writes the unscaled loss of every row.
extern "C" __global__ void cross_entropy(X* logits, const u32* targets, double* losses, int columns,
                                         float scale) {
    __shared__ float parts[32];
    X* row = logits + static_cast<long long>(blockIdx.x) * columns;
    const u32 target = targets[blockIdx.x];
    const bool is_word = target < static_cast<u32>(columns);
    float most = MINUS_INFINITY, sum = 0.f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) most = fmaxf(most, load(row + i));
    // the maximum keeps exponentials from overflowing
    most = block_max(most, parts);
    const float of_target = is_word ? load(row + target) - most : 0.f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += expf(load(row + i) - most);
    const float total = block_sum(sum, parts), factor = scale / total;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        const float gradient = expf(load(row + i) - most) * factor;
        store(row + i, static_cast<u32>(i) == target ? gradient - scale : gradient);
    }
    if (threadIdx.x == 0) {
        const double loss = log(static_cast<double>(total)) - of_target;
        losses[blockIdx.x] = is_word ? loss : static_cast<double>(__uint_as_float(0x7fc00000u));
    }
}
