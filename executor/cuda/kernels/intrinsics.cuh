// Instructions of the machine that C++ has no words for. Tests replace this file by one that computes on a
// CPU.
#pragma once

typedef unsigned short bf16;  // bits
typedef unsigned int u32;

// Dynamic shared memory of a block, aligned for 16-byte copies.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

// Rounds two numbers to the nearest bf16, ties to even; the first becomes the lower half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Widens the lower bf16 of a pair, and the higher one, by an instruction that is not made of shifts.
__device__ __forceinline__ float low_again(u32 pair) {
    float y;
    asm volatile("prmt.b32 %0, %1, 0, 0x1044;" : "=f"(y) : "r"(pair));
    return y;
}

__device__ __forceinline__ float high_again(u32 pair) {
    float y;
    asm volatile("prmt.b32 %0, %1, 0, 0x3244;" : "=f"(y) : "r"(pair));
    return y;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Loads four 8 x 8 matrices of bf16 from shared memory; lane l gives the address of row l % 8 of matrix l /
// 8.
__device__ __forceinline__ void load_matrix_x4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, with every matrix transposed.
__device__ __forceinline__ void load_matrix_x4_trans(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Multiplies matrices of a warp, [16, 16] x [16, 8], and adds to `c`.
__device__ __forceinline__ void mma_16816(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Starts a copy of 16 bytes to shared memory; writes zeros, and reads nothing, if `is_there` is false.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool is_there) {
    const int bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(bytes)
                 : "memory");
}

// Closes the group of the copies that this thread started.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `N` groups of this thread are under way.
template <int N>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
