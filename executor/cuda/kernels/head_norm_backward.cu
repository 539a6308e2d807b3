// Backward pass of the normalization of heads in one pass over them: some lanes of a warp share a head, and
// walk over heads. Macros: X, Y, type of elements; WIDTH, 8 if heads are aligned, or 1.
#include "own_columns.cuh"

constexpr int HEAD_THREADS = 256;

// d becomes (dn - n mean(dn n)) / rms, with n = x / rms and dn = d (weight + offset); no weights are zeros.
// Sums d n over the heads of a block into a row of `parts`, unless that is null. `lanes`: threads of a head,
// a power of 2, with OWN columns each. Grid: a row of `parts` for every block.
extern "C" __global__ void __launch_bounds__(HEAD_THREADS)
    head_norm_backward(const X* weight, const X* x, const float* inverse, X* d, float* parts, long long all,
                       int heads, int head_dim, int first, int stride, float offset, int lanes) {
    __shared__ float shared[OWN][HEAD_THREADS];
    const Lanes own = {static_cast<int>(threadIdx.x) % lanes, lanes};
    const int groups = HEAD_THREADS / lanes, of_warp = threadIdx.x % 32 / lanes;
    const long long step = static_cast<long long>(gridDim.x) * groups;
    const int step_heads = step % heads;
    const long long step_rows = step / heads;
    long long index = static_cast<long long>(blockIdx.x) * groups + threadIdx.x / lanes;
    long long row = index / heads;
    int head = index % heads;
    Own<X> weights = {};
    if (weight) weights = load_own(weight, head_dim, own);
    float sums[OWN] = {};
    // lanes of a warp go on until the first of its heads is behind the last
    for (; index - of_warp < all; index += step) {
        const bool is_there = index < all;
        const int columns = is_there ? head_dim : 0;
        const long long element = row * stride + first + static_cast<long long>(head) * head_dim;
        const Own<X> values = load_own(x + element, columns, own);
        const Own<X> gradients = load_own(d + element, columns, own);
        float over = is_there && own.own == 0 ? inverse[index] : 0.f, sum = 0.f, results[OWN];
        over = __shfl_sync(ALL_LANES, over, 0, lanes);
        for (int k = 0; k < OWN; k++) {
            const float product = gradients[k] * values[k];
            sum += product * (weights[k] + offset);
            sums[k] += product * over;
        }
        for (int apart = lanes / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, apart);
        const float along = sum / head_dim * over * over;
        for (int k = 0; k < OWN; k++)
            results[k] = (gradients.again(k) * (weights[k] + offset) - values.again(k) * along) * over;
        store_own(d + element, columns, results, own);
        row += step_rows;
        head += step_heads;
        if (head >= heads) head -= heads, row++;
    }
    if (!parts) return;
    for (int k = 0; k < OWN; k++) shared[k][threadIdx.x] = sums[k];
    __syncthreads();
    for (int i = threadIdx.x; i < OWN * lanes; i += HEAD_THREADS) {
        const int k = i / lanes, column = own_column(k, {i % lanes, lanes});
        float sum = 0.f;
        for (int group = 0; group < groups; group++) sum += shared[k][group * lanes + i % lanes];
        if (column < head_dim) parts[static_cast<long long>(blockIdx.x) * head_dim + column] = sum;
    }
}
