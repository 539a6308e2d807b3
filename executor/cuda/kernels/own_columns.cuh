// Columns of a row that a thread keeps in registers, as they are stored. Macros: X, Y, types of elements;
// WIDTH, 8 if rows are aligned, or 1.
#pragma once

#include "device.cuh"

// Columns of a thread.
constexpr int OWN = WIDTH == 1 ? 4 : sizeof(X) + sizeof(Y) == 4 ? 16 : 8;

// A thread among those that share a row.
struct Lanes {
    int own, count;
};

__device__ __forceinline__ Lanes lanes_of_block() {
    return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
}

// Column of a thread: blocks of WIDTH consecutive ones.
__device__ __forceinline__ int own_column(int k, Lanes lanes) {
    return (k / WIDTH * lanes.count + lanes.own) * WIDTH + k % WIDTH;
}

// Numbers of the columns of a thread, as they are stored.
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
    // The same by another instruction, so that the compiler widens numbers twice and keeps only the narrow
    // ones.
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

// Loads the columns of a thread; there are zeros behind the last column.
template <class T>
__device__ __forceinline__ Own<T> load_own(const T* row, int columns, Lanes lanes = lanes_of_block()) {
    Own<T> own = {};
    for (int k = 0; k < OWN; k += WIDTH) {
        if (own_column(k, lanes) >= columns) continue;
        if constexpr (WIDTH == 8) own.load_eight(k, row + own_column(k, lanes));
        else own.set(k, row[own_column(k, lanes)]);
    }
    return own;
}

template <class T>
__device__ __forceinline__ void store_own(T* row, int columns, const float (&values)[OWN],
                                          Lanes lanes = lanes_of_block()) {
    for (int k = 0; k < OWN; k += WIDTH) {
        if (own_column(k, lanes) >= columns) continue;
        float some[WIDTH];
        for (int i = 0; i < WIDTH; i++) some[i] = values[k + i];
        Wide<WIDTH>::store(row + own_column(k, lanes), some);
    }
}
