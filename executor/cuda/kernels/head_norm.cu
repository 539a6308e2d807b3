// Normalization of heads in wide rows by their root mean square. An offset is added to weights; no weights
// are zeros. Macro: X, type of elements. 256 threads unless stated otherwise: a warp per head, heads of a
// row one after another.
#include "device.cuh"

// Head of a warp: its place among all heads of all rows, and its first element.
struct Head {
    long long index, element;
};

__device__ __forceinline__ Head own_head(int heads, int head_dim, int first, int stride) {
    const long long index = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    return {index, index / heads * stride + first + index % heads * head_dim};
}

__device__ __forceinline__ float scale_of(const X* weight, int column, float offset) {
    return weight ? load(weight + column) + offset : offset;
}

// inverse: 1 / root mean square of every head
extern "C" __global__ void head_norm(const X* weight, X* x, float* inverse, long long all, int heads,
                                     int head_dim, int first, int stride, float epsilon, float offset) {
    const Head head = own_head(heads, head_dim, first, stride);
    if (head.index >= all) return;
    X* own = x + head.element;
    const int lane = threadIdx.x % 32;
    float sum = 0.f;
    for (int column = lane; column < head_dim; column += 32) sum += load(own + column) * load(own + column);
    const float over = 1.f / sqrtf(warp_sum(sum) / head_dim + epsilon);
    if (lane == 0) inverse[head.index] = over;
    for (int column = lane; column < head_dim; column += 32)
        store(own + column, load(own + column) * over * scale_of(weight, column, offset));
}

// The gradient of x, as in head_norm_backward.cu, for heads of more columns than a warp keeps.
extern "C" __global__ void head_norm_dx(const X* weight, const X* x, const float* inverse, X* d,
                                        long long all, int heads, int head_dim, int first, int stride,
                                        float offset) {
    const Head head = own_head(heads, head_dim, first, stride);
    if (head.index >= all) return;
    const X* own = x + head.element;
    X* gradient = d + head.element;
    const int lane = threadIdx.x % 32;
    const float over = inverse[head.index];
    float sum = 0.f;
    for (int column = lane; column < head_dim; column += 32)
        sum += load(gradient + column) * scale_of(weight, column, offset) * load(own + column);
    const float along = warp_sum(sum) / head_dim * over * over;
    for (int column = lane; column < head_dim; column += 32) {
        const float scaled = load(gradient + column) * scale_of(weight, column, offset);
        store(gradient + column, (scaled - load(own + column) * along) * over);
    }
}

// Sums d n over `heads_per_part` heads into a row of `parts`. Grid: columns, parts; a thread per column.
extern "C" __global__ void head_norm_dw(const X* d, const X* x, const float* inverse, float* parts,
                                        long long all, int heads, int head_dim, int first, int stride,
                                        int heads_per_part) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= head_dim) return;
    const long long begin = static_cast<long long>(blockIdx.y) * heads_per_part;
    const long long end = min(all, begin + heads_per_part);
    float sum = 0.f;
    for (long long head = begin; head < end; head++) {
        const long long at = head / heads * stride + first + head % heads * head_dim + column;
        sum += load(d + at) * load(x + at) * inverse[head];
    }
    parts[static_cast<long long>(blockIdx.y) * head_dim + column] = sum;
}
