// The interface between compiled kernels and the driver library, which runs their threads.
#pragma once

namespace cuda_stand_in {

struct Dim {
    unsigned x, y, z;
};

// What a running thread can read about itself. One instance per worker thread of the host; the driver library
// switches `thread_index` whenever it switches threads.
struct Place {
    const Dim* thread_index;
    unsigned char* dynamic_shared;
    Dim block_index, block_dim, grid_dim;
};

// One kernel of a compiled object, which exports it as `cuda_stand_in_kernel_<name>`.
struct Kernel {
    const char* name;
    void (*run)(void* const* parameters);  // runs one thread
    const unsigned* parameter_bytes;
    unsigned parameters;
    unsigned threads_max;  // the first argument of __launch_bounds__, or 1024
    bool has_counts;       // each access to memory calls a function that counts it
};

// Operations that the lanes of a warp do together. Each lane gives the address of its operands.
enum class WarpOperation : unsigned char {
    Sync,
    Shuffle,
    Ballot,
    LoadMatrix,
    LoadMatrixTransposed,
    Multiply
};

struct ShuffleOperands {
    unsigned long long value;
    unsigned source;  // lane
};

struct BallotOperands {
    unsigned is_set, result;
};

struct LoadMatrixOperands {
    unsigned* result;  // [4]
    const void* row;
};

struct MultiplyOperands {
    float* c;           // [4]
    const unsigned* a;  // [4]
    unsigned b[2];
};

}  // namespace cuda_stand_in

#pragma GCC visibility push(default)
extern "C" {
extern __thread cuda_stand_in::Place cuda_stand_in_place __attribute__((tls_model("initial-exec")));

void cuda_stand_in_barrier(const char* file, int line);
void cuda_stand_in_warp(cuda_stand_in::WarpOperation operation, unsigned mask, void* operands);
unsigned cuda_stand_in_lane();
unsigned cuda_stand_in_active_lanes();
void cuda_stand_in_copy_async(void* shared, const void* global, bool is_there);
void cuda_stand_in_copy_commit();
void cuda_stand_in_copy_wait(unsigned groups_left);
[[noreturn]] void cuda_stand_in_trap(const char* reason);
}
#pragma GCC visibility pop
