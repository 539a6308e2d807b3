// Sinks of attention, a logit per head. Macro: X, type of outputs and sinks. 256 threads: a warp per row and head.
#include "device.cuh"

// Scales the output by the share of the keys, and adds the sink to the log-sum-exp. rows: tokens times heads
extern "C" __global__ void attention_sinks(const X* sinks, X* output, float* log_sums, long long rows, int heads,
                                           int head_dim) {
    const long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const int lane = threadIdx.x % 32;
    const float sink = load(sinks + row % heads), before = log_sums[row], most = fmaxf(sink, before);
    const float with_sink = most + logf(expf(before - most) + expf(sink - most));
    const float share = expf(before - with_sink);
    X* own = output + row * head_dim;
    for (int column = lane; column < head_dim; column += 32) store(own + column, load(own + column) * share);
    __syncwarp();  // all lanes have read the sum
    if (lane == 0) log_sums[row] = with_sink;
}

// Sums the gradient of the sinks over `rows_per_part` tokens into a row of `parts`. Grid: parts, a warp per head.
extern "C" __global__ void attention_sinks_backward(const X* sinks, const X* output, const float* log_sums,
                                                    const X* d_output, float* parts, long long tokens, int heads,
                                                    int head_dim, int rows_per_part) {
    const int head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head >= heads) return;
    const long long begin = static_cast<long long>(blockIdx.y) * rows_per_part;
    const long long end = min(tokens, begin + rows_per_part);
    const float sink = load(sinks + head);
    float sum = 0.f;
    for (long long token = begin; token < end; token++) {
        const long long row = token * heads + head;
        float dot = 0.f;
        for (int column = lane; column < head_dim; column += 32)
            dot += load(output + row * head_dim + column) * load(d_output + row * head_dim + column);
        sum -= expf(sink - log_sums[row]) * warp_sum(dot);
    }
    if (lane == 0) parts[static_cast<long long>(blockIdx.y) * heads + head] = sum;
}
