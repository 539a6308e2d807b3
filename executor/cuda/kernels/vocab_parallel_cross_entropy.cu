// Cross entropy of logits whose vocabulary is sharded over ranks. Macro: X, type of logits. Grid: a block per
// row, of whole warps.
#include "device.cuh"

// Replaces logits by exponentials relative to the largest of the row, and writes that, their sum, and the
// logit of the target, or 0 if the target is a word of another rank.
extern "C" __global__ void partial_softmax(X* logits, const u32* targets, float* own, int columns,
                                           u32 first_word) {
    __shared__ float parts[32];
    X* row = logits + static_cast<long long>(blockIdx.x) * columns;
    const u32 target = targets[blockIdx.x] - first_word;
    float most = MINUS_INFINITY, sum = 0.f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) most = fmaxf(most, load(row + i));
    most = block_max(most, parts);
    const float of_target = target < static_cast<u32>(columns) ? load(row + target) : 0.f;
    // in a row of minus infinities, the difference from their maximum would not be a number
    const float base = most == MINUS_INFINITY ? 0.f : most;
    __syncthreads();
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        const float value = expf(load(row + i) - base);
        sum += value;
        store(row + i, value);
    }
    sum = block_sum(sum, parts);
    if (threadIdx.x == 0) {
        own[3 * blockIdx.x] = most;
        own[3 * blockIdx.x + 1] = sum;
        own[3 * blockIdx.x + 2] = of_target;
    }
}

// Replaces exponentials by the gradient of `scale` times the loss, and writes the unscaled loss of every row.
// parts: [ranks, rows, 3], as `partial_softmax` writes them
extern "C" __global__ void join_softmax(X* exponentials, const u32* targets, const float* parts,
                                        double* losses, int columns, u32 first_word, int ranks, int rank,
                                        double scale) {
    X* row = exponentials + static_cast<long long>(blockIdx.x) * columns;
    const u32 target = targets[blockIdx.x] - first_word;
    const long long rows = gridDim.x;
    float most = MINUS_INFINITY;
    for (int r = 0; r < ranks; r++) most = fmaxf(most, parts[3 * (r * rows + blockIdx.x)]);
    double total = 0., of_target = 0., above = 0.;
    for (int r = 0; r < ranks; r++) {
        const float* part = parts + 3 * (r * rows + blockIdx.x);
        // from the maximum of a rank to the common one
        const double factor = exp(static_cast<double>(part[0]) - most);
        total += part[1] * factor;
        of_target += part[2];
        if (r == rank) above = factor;
    }
    const float factor = static_cast<float>(above * scale / total), step = static_cast<float>(scale);
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        const float gradient = load(row + i) * factor;
        store(row + i, static_cast<u32>(i) == target ? gradient - step : gradient);
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = log(total) - (of_target - most);
}
