// Norm of gradients, and the factor that clips it. Macro of `squares`: X, type of elements.
#include "device.cuh"

#ifndef X
#define X float
#endif

// Sums squares of `per_block` elements into an element of `sums`. Grid: blocks of 256 threads.
extern "C" __global__ void squares(const X* x, double* sums, long long len, int per_block) {
    __shared__ float parts[32];
    const long long begin = static_cast<long long>(blockIdx.x) * per_block;
    const long long end = min(len, begin + per_block);
    float sum = 0.f;
    for (long long i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const float value = load(x + i);
        sum += value * value;
    }
    sum = block_sum(sum, parts);
    if (threadIdx.x == 0) sums[blockIdx.x] = static_cast<double>(sum);
}

// Writes the sum of numbers. Grid: one warp.
extern "C" __global__ void sum_of_sums(const double* sums, int count, double* into) {
    double sum = 0.;
    for (int i = threadIdx.x; i < count; i += 32) sum += sums[i];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
    if (threadIdx.x == 0) *into = sum;
}

// Writes the norm and the factor; the factor is not a number if a figure is not finite. Grid: one thread.
// norm_max: negative for none
extern "C" __global__ void clip_factor(const double* figures, int count, int first, int last, double norm_max,
                                       double* into) {
    double sum = 0.;
    for (int i = first; i < last; i++) sum += figures[i];
    bool is_finite = true;
    for (int i = 0; i < count; i++) is_finite = is_finite && fabs(figures[i]) <= 1.7976931348623157e308;
    const double norm = sqrt(sum);
    // the constant that PyTorch adds before it divides
    const double factor = norm_max < 0. ? 1. : fmin(norm_max / (norm + 1e-6), 1.);
    into[0] = norm;
    into[1] = is_finite ? factor : static_cast<double>(__uint_as_float(0x7fc00000u));
}
