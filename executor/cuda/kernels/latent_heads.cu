// Heads of latent attention. Macro: X, type of elements. INTERLEAVED: whether neighboring columns are rotated
// together. Grid: a block per token.
#include "device.cuh"

struct Shape {
    int heads, plain, rotated, value;

    __device__ int dim() const { return plain + rotated; }
    __device__ long long row() const { return 3LL * heads * dim(); }
};

// Columns of a pair before the rotation.
__device__ __forceinline__ int first_of(int pair) { return INTERLEAVED ? 2 * pair : pair; }
__device__ __forceinline__ int second_of(int pair, int half) {
    return INTERLEAVED ? 2 * pair + 1 : pair + half;
}

// Rotated column of a head: pairs lie half of the part apart.
__device__ __forceinline__ float rotated(const X* x, const float* cosines, const float* sines, int column,
                                         int half) {
    const int pair = column % half;
    const float a = load(x + first_of(pair)), b = load(x + second_of(pair, half));
    return column < half ? a * cosines[pair] - b * sines[pair] : b * cosines[pair] + a * sines[pair];
}

// Gradient of a column before the rotation.
__device__ __forceinline__ float rotated_back(const X* dy, const float* cosines, const float* sines, int column,
                                              int half) {
    const bool is_first = INTERLEAVED ? column % 2 == 0 : column < half;
    const int pair = INTERLEAVED ? column / 2 : column % half;
    const float a = load(dy + pair), b = load(dy + pair + half);
    return is_first ? a * cosines[pair] + b * sines[pair] : b * cosines[pair] - a * sines[pair];
}

// shared: rows whose columns from `first` on are the rotated part of all keys
extern "C" __global__ void latent_heads(const X* queries, const X* keys_values, const X* shared,
                                        const float* cosines, const float* sines, X* qkv, int heads, int plain,
                                        int rotated_columns, int value, int first, int stride) {
    const Shape shape = {heads, plain, rotated_columns, value};
    const long long token = blockIdx.x;
    const int dim = shape.dim(), half = rotated_columns / 2, width = heads * dim;
    queries += token * width, keys_values += token * heads * (plain + value);
    shared += token * stride + first, cosines += token * half, sines += token * half;
    qkv += token * shape.row();
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const int head = i / dim, column = i % dim;
        const X* own = keys_values + static_cast<long long>(head) * (plain + value);
        const bool is_plain = column < plain;
        store(qkv + i, is_plain ? load(queries + i)
                                : rotated(queries + head * dim + plain, cosines, sines, column - plain, half));
        store(qkv + width + i,
              is_plain ? load(own + column) : rotated(shared, cosines, sines, column - plain, half));
        store(qkv + 2 * width + i, column < value ? load(own + plain + column) : 0.f);
    }
}

extern "C" __global__ void latent_heads_backward(const X* d_qkv, const float* cosines, const float* sines,
                                                 X* d_queries, X* d_keys_values, X* d_shared, int heads,
                                                 int plain, int rotated_columns, int value, int first,
                                                 int stride) {
    const Shape shape = {heads, plain, rotated_columns, value};
    const long long token = blockIdx.x;
    const int dim = shape.dim(), half = rotated_columns / 2, width = heads * dim, of_head = plain + value;
    d_queries += token * width, d_keys_values += token * heads * of_head;
    d_shared += token * stride + first, cosines += token * half, sines += token * half;
    d_qkv += token * shape.row();
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const int head = i / dim, column = i % dim;
        const X* own = d_qkv + head * dim;
        store(d_queries + i, column < plain
                                 ? load(own + column)
                                 : rotated_back(own + plain, cosines, sines, column - plain, half));
    }
    for (int i = threadIdx.x; i < heads * of_head; i += blockDim.x) {
        const int head = i / of_head, column = i % of_head;
        const X* own = d_qkv + width + head * dim;
        store(d_keys_values + i, column < plain ? load(own + column) : load(own + width + column - plain));
    }
    for (int column = threadIdx.x; column < rotated_columns; column += blockDim.x) {
        float sum = 0.f;
        for (int head = 0; head < heads; head++)
            sum += rotated_back(d_qkv + width + head * dim + plain, cosines, sines, column, half);
        store(d_shared + column, sum);
    }
}
