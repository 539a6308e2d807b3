// What CUDA C++ has and C++ has not. Included before every kernel source, as a precompiled header.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <math.h>
#include <utility>

#include "thread.h"
#include "vectors.h"
#include "warp.h"
#include "numbers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __constant__ static const
#define __grid_constant__
// The thread-local storage of a kernel object holds its shared memory and nothing else: the driver library
// poisons it as a whole before every block.
#define __shared__ static thread_local

#define threadIdx (*cuda_stand_in_place.thread_index)
#define blockIdx (cuda_stand_in_place.block_index)
#define blockDim (cuda_stand_in_place.block_dim)
#define gridDim (cuda_stand_in_place.grid_dim)
#define warpSize 32
#define __syncthreads() cuda_stand_in_barrier(__FILE__, __LINE__)
#define __trap() cuda_stand_in_trap("trap")
#define assert(condition) ((condition) ? void() : cuda_stand_in_trap("assertion " #condition))

inline void __threadfence() {}
inline void __threadfence_block() {}

namespace cuda_stand_in {

// Lists the sizes of a kernel's parameters and calls it with parameters from memory.
template <auto kernel>
struct Caller;

template <class... Parameters, void (*kernel)(Parameters...)>
struct Caller<kernel> {
    static constexpr unsigned count = sizeof...(Parameters);
    static constexpr unsigned bytes[] = {unsigned(sizeof(Parameters))..., 0};

    static void run(void* const* parameters) {
        run_at(parameters, std::make_index_sequence<sizeof...(Parameters)>());
    }

private:
    template <size_t... index>
    static void run_at([[maybe_unused]] void* const* parameters, std::index_sequence<index...>) {
        kernel(*static_cast<Parameters*>(parameters[index])...);
    }
};

#ifdef __SANITIZE_THREAD__
constexpr bool HAS_COUNTS = true;
#else
constexpr bool HAS_COUNTS = false;
#endif

template <auto kernel>
constexpr Kernel describe(const char* name, unsigned threads_max) {
    return {name, Caller<kernel>::run, Caller<kernel>::bytes, Caller<kernel>::count, threads_max, HAS_COUNTS};
}

}  // namespace cuda_stand_in

#define CUDA_STAND_IN_KERNEL(name, threads_max)               \
    extern "C" __attribute__((visibility("default")))         \
    const cuda_stand_in::Kernel cuda_stand_in_kernel_##name = \
        cuda_stand_in::describe<name>(#name, threads_max);

// Names that the runtime compiler does not know: their use is an error here too.
#undef INFINITY
#undef NAN
#undef M_PI
#undef M_SQRT2
#undef M_LOG2E
#define std nvrtc_has_no_std
#define int8_t nvrtc_has_no_int8_t
#define int16_t nvrtc_has_no_int16_t
#define int32_t nvrtc_has_no_int32_t
#define int64_t nvrtc_has_no_int64_t
#define uint8_t nvrtc_has_no_uint8_t
#define uint16_t nvrtc_has_no_uint16_t
#define uint32_t nvrtc_has_no_uint32_t
#define uint64_t nvrtc_has_no_uint64_t
#define uintptr_t nvrtc_has_no_uintptr_t
#define intptr_t nvrtc_has_no_intptr_t

#define __CUDACC__ 1
#define __CUDACC_RTC__ 1
#define __CUDA_ARCH__ 900
