// Numbers and sums of kernels, in C++ alone.
#pragma once

#include "intrinsics.cuh"

#define MINUS_INFINITY __uint_as_float(0xff800000u)
constexpr u32 ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Widens a stored number.
__device__ __forceinline__ float load(const float* x) { return *x; }
__device__ __forceinline__ float load(const bf16* x) { return __uint_as_float(static_cast<u32>(*x) << 16); }

// Stores a number, rounded to the nearest, ties to even.
__device__ __forceinline__ void store(float* y, float value) { *y = value; }
__device__ __forceinline__ void store(bf16* y, float value) { *y = static_cast<bf16>(pack_bf16(value, 0.f)); }

// Widens and stores `COUNT` consecutive numbers; eight at a time are aligned to 16 bytes.
template <int COUNT>
struct Wide;

template <>
struct Wide<1> {
    template <class T>
    static __device__ __forceinline__ void load(const T* x, float (&values)[1]) {
        values[0] = ::load(x);
    }
    template <class T>
    static __device__ __forceinline__ void store(T* y, const float (&values)[1]) {
        ::store(y, values[0]);
    }
};

template <>
struct Wide<8> {
    static __device__ __forceinline__ void load(const float* x, float (&values)[8]) {
        const float4 a = reinterpret_cast<const float4*>(x)[0], b = reinterpret_cast<const float4*>(x)[1];
        values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w;
        values[4] = b.x, values[5] = b.y, values[6] = b.z, values[7] = b.w;
    }
    static __device__ __forceinline__ void load(const bf16* x, float (&values)[8]) {
        const uint4 pairs = *reinterpret_cast<const uint4*>(x);
        values[0] = low_of(pairs.x), values[1] = high_of(pairs.x);
        values[2] = low_of(pairs.y), values[3] = high_of(pairs.y);
        values[4] = low_of(pairs.z), values[5] = high_of(pairs.z);
        values[6] = low_of(pairs.w), values[7] = high_of(pairs.w);
    }
    static __device__ __forceinline__ void store(float* y, const float (&v)[8]) {
        reinterpret_cast<float4*>(y)[0] = make_float4(v[0], v[1], v[2], v[3]);
        reinterpret_cast<float4*>(y)[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
    static __device__ __forceinline__ void store(bf16* y, const float (&v)[8]) {
        *reinterpret_cast<uint4*>(y) = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                                  pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    }
};

// First of the elements of a thread, if each has `COUNT` of them.
template <int COUNT>
__device__ __forceinline__ long long first_element() {
    return (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * COUNT;
}

// Sum over the lanes of a warp, in one order; every lane gets it.
__device__ __forceinline__ float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int offset = 16; offset > 0; offset /= 2)
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, offset));
    return value;
}

// Sum over the threads of a block of whole warps, in one order; every thread gets it. `parts` has 32 elements
// of shared memory.
__device__ __forceinline__ float block_sum(float value, float* parts) {
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    return warp_sum(lane < static_cast<int>(blockDim.x) / 32 ? parts[lane] : 0.f);
}

__device__ __forceinline__ float block_max(float value, float* parts) {
    value = warp_max(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    return warp_max(lane < static_cast<int>(blockDim.x) / 32 ? parts[lane] : MINUS_INFINITY);
}
