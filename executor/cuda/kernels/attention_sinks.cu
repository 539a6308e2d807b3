// Sinks of attention. Macros: X, type of elements; Y, type of the sinks' gradient.
#include "device.cuh"

// Grid: a warp per head of every token.
extern "C" __global__ void attention_sinks(const X* sinks, X* output, float* log_sums, long long rows, int heads,
                                           int head_dim) {
    const long long row = first_element<1>() / 32;
    if (row >= rows) return;
    const float sink = load(sinks + row % heads), sum = log_sums[row];
    const float share = 1.f / (1.f + expf(sink - sum));
    X* own = output + row * head_dim;
    for (int i = threadIdx.x % 32; i < head_dim; i += 32) store(own + i, load(own + i) * share);
    __syncwarp();
    if (threadIdx.x % 32 == 0) log_sums[row] = fmaxf(sink, sum) + log1pf(expf(-fabsf(sink - sum)));
}

// Writes what every row adds to the gradient of its sink. Grid: a warp per head of every token.
extern "C" __global__ void attention_sinks_backward(const X* sinks, const X* output, const float* log_sums,
                                                    const X* d_output, float* terms, long long rows, int heads,
                                                    int head_dim) {
    const long long row = first_element<1>() / 32;
    if (row >= rows) return;
    const X *own = output + row * head_dim, *gradient = d_output + row * head_dim;
    float along = 0.f;
    for (int i = threadIdx.x % 32; i < head_dim; i += 32) along += load(own + i) * load(gradient + i);
    along = warp_sum(along);
    if (threadIdx.x % 32 == 0) terms[row] = -expf(load(sinks + row % heads) - log_sums[row]) * along;
}
