// Instructions of the machine that C++ has no words for, computed on a CPU. Replaces the header of this name.
#pragma once

typedef unsigned short bf16;  // bits
typedef unsigned int u32;

#define DYNAMIC_SHARED(name) unsigned char* const name = cuda_stand_in_place.dynamic_shared

namespace cuda_stand_in {

// Rounds to the nearest bf16, ties to even; every NaN becomes 0x7fff, as on the device.
__device__ __forceinline__ u32 round_to_bf16(float value) {
    const u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Numbers too small for a normal float count as zero.
__device__ __forceinline__ float flush(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.f, x) : x; }

}  // namespace cuda_stand_in

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    return cuda_stand_in::round_to_bf16(low) | cuda_stand_in::round_to_bf16(high) << 16;
}

__device__ __forceinline__ float low_again(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_again(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float exp2_fast(float x) {
    return cuda_stand_in::flush(exp2f(cuda_stand_in::flush(x)));
}
__device__ __forceinline__ float log2_fast(float x) { return log2f(cuda_stand_in::flush(x)); }

__device__ __forceinline__ void load_matrix_x4(u32 (&r)[4], const void* row) {
    cuda_stand_in::LoadMatrixOperands operands{r, row};
    cuda_stand_in_warp(cuda_stand_in::WarpOperation::LoadMatrix, 0xffffffffu, &operands);
}

__device__ __forceinline__ void load_matrix_x4_trans(u32 (&r)[4], const void* row) {
    cuda_stand_in::LoadMatrixOperands operands{r, row};
    cuda_stand_in_warp(cuda_stand_in::WarpOperation::LoadMatrixTransposed, 0xffffffffu, &operands);
}

__device__ __forceinline__ void mma_16816(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    cuda_stand_in::MultiplyOperands operands{c, a, {b0, b1}};
    cuda_stand_in_warp(cuda_stand_in::WarpOperation::Multiply, 0xffffffffu, &operands);
}

__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool is_there) {
    cuda_stand_in_copy_async(shared, global, is_there);
}

__device__ __forceinline__ void copy_commit() { cuda_stand_in_copy_commit(); }

template <int N>
__device__ __forceinline__ void copy_wait() {
    cuda_stand_in_copy_wait(N);
}
