// Backward passes of norms in one pass over the rows. A block walks over every `gridDim.x`th row; a thread keeps
// its columns of the row, of the weight, and of the sums over the rows in registers. Macros: X, type of elements;
// WIDTH, 8 if rows are aligned, or 1.
#pragma once

#include "device.cuh"

// Columns of a thread, and most threads of a block: a row and its sums then have 128 registers for each thread.
constexpr int OWN = WIDTH == 1 ? 4 : sizeof(X) + sizeof(Y) == 4 ? 16 : 8;
constexpr int ROW_THREADS_MAX = 512;

// Column of this thread: blocks of WIDTH consecutive ones.
__device__ __forceinline__ int own_column(int k) {
    return (k / WIDTH * blockDim.x + threadIdx.x) * WIDTH + k % WIDTH;
}

// Numbers of the columns of this thread, as they are stored.
template <class T>
struct Own;

template <>
struct Own<float> {
    float values[OWN];
    __device__ __forceinline__ float operator[](int k) const { return values[k]; }
    __device__ __forceinline__ float again(int k) const { return values[k]; }
    // of zeros
    __device__ __forceinline__ void set(int k, float value) { values[k] = value; }
    __device__ __forceinline__ void load_eight(int first, const float* x) {
        float eight[8];
        Wide<8>::load(x, eight);
        for (int k = 0; k < 8; k++) values[first + k] = eight[k];
    }
};

template <>
struct Own<bf16> {
    u32 pairs[OWN / 2];
    __device__ __forceinline__ float operator[](int k) const {
        return k % 2 ? high_of(pairs[k / 2]) : low_of(pairs[k / 2]);
    }
    // The same by another instruction, so that the compiler widens numbers twice and keeps only the narrow ones.
    __device__ __forceinline__ float again(int k) const {
        return k % 2 ? high_again(pairs[k / 2]) : low_again(pairs[k / 2]);
    }
    // of zeros
    __device__ __forceinline__ void set(int k, bf16 bits) {
        pairs[k / 2] |= static_cast<u32>(bits) << (k % 2 * 16);
    }
    __device__ __forceinline__ void load_eight(int first, const bf16* x) {
        const uint4 all = *reinterpret_cast<const uint4*>(x);
        u32* own = pairs + first / 2;
        own[0] = all.x, own[1] = all.y, own[2] = all.z, own[3] = all.w;
    }
};

// Loads the columns of this thread; there are zeros behind the last column.
template <class T>
__device__ __forceinline__ Own<T> load_own(const T* row, int columns) {
    Own<T> own = {};
    for (int k = 0; k < OWN; k += WIDTH) {
        if (own_column(k) >= columns) continue;
        if constexpr (WIDTH == 8) own.load_eight(k, row + own_column(k));
        else own.set(k, row[own_column(k)]);
    }
    return own;
}

template <class T>
__device__ __forceinline__ void store_own(T* row, int columns, const float (&values)[OWN]) {
    for (int k = 0; k < OWN; k += WIDTH) {
        if (own_column(k) >= columns) continue;
        float some[WIDTH];
        for (int i = 0; i < WIDTH; i++) some[i] = values[k + i];
        Wide<WIDTH>::store(row + own_column(k), some);
    }
}

template <class T>
__device__ __forceinline__ T* row_of(T* rows, u32 row, int columns) {
    return rows + static_cast<long long>(row) * columns;
}

// What is read of a row before its sums are known; the first lane of every warp has its statistics.
template <int STATISTICS>
struct Row {
    Own<X> gradients, values;
    float statistics[STATISTICS];

    __device__ __forceinline__ void load(const X* dy, const X* x, const float* all, u32 row, int columns) {
        gradients = load_own(row_of(dy, row, columns), columns);
        values = load_own(row_of(x, row, columns), columns);
        for (int i = 0; i < STATISTICS; i++)
            statistics[i] = threadIdx.x % 32 == 0 ? row_of(all, row, STATISTICS)[i] : 0.f;
    }
    __device__ __forceinline__ float statistic(int i) const {
        return __shfl_sync(ALL_LANES, statistics[i], 0);
    }
};

// Sums over the threads of a block, in one order, with one barrier: rows take turns at two sets of `parts`.
template <int COUNT>
__device__ __forceinline__ void row_sums(float (&values)[COUNT], float (&parts)[COUNT][32]) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int i = 0; i < COUNT; i++) {
        values[i] = warp_sum(values[i]);
        if (lane == 0) parts[i][threadIdx.x / 32] = values[i];
    }
    __syncthreads();
    for (int i = 0; i < COUNT; i++) values[i] = warp_sum(lane < warps ? parts[i][lane] : 0.f);
}

// Walks over the rows of this block. Two rows are under way at once, and take turns at registers, so that none
// waits to be moved.
template <int COUNT, class Rows>
__device__ __forceinline__ void walk_rows(Rows& all, float (&shared)[2][COUNT][32]) {
    Row<COUNT> even, odd;
    u32 row = blockIdx.x;
    even.load(all.dy, all.x, all.statistics, row, all.columns);
    while (row < all.rows) {
        all.step(row, even, odd, shared[0]);
        row += gridDim.x;
        if (row >= all.rows) return;
        all.step(row, odd, even, shared[1]);
        row += gridDim.x;
    }
}
