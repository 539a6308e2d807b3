// Runs the blocks of a launch on one host thread, one fiber per CUDA thread.
//
// A warp runs on until all of its threads wait at the barrier of the block, so warps are as far apart as
// barriers allow. The lanes of a warp take turns at operations of the warp. The thread order of a launch
// chooses which warp and which lane comes first. A fiber gets a stack when it starts and hands it to the next
// thread when it ends, so threads that never wait share one stack.
#pragma once

#include "../execution/thread.h"
#include "fiber.h"
#include "traffic.h"

#include <atomic>
#include <csetjmp>
#include <cstdint>
#include <string>
#include <vector>

namespace cuda_stand_in {

struct Launch {
    const Kernel* kernel;
    Dim grid, block;
    size_t dynamic_bytes;
    size_t shared_module;        // of the thread-local storage that holds static shared memory
    size_t shared_module_bytes;  // 0: none
    uint64_t order;              // 0: ascending, 1: descending, else the seed of shuffles
    void* const* parameters;
    std::vector<AddressRange> buffers;  // if the kernel has its bytes counted

    size_t blocks() const { return size_t(grid.x) * grid.y * grid.z; }
    size_t threads() const { return size_t(block.x) * block.y * block.z; }
};

struct Fault {
    int error = 0;  // a code of the driver, 0: none
    std::string message;
};

class Worker {
public:
    Worker();
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;
    ~Worker();

    // Runs blocks until `next` reaches their number, or until one faults. `next` is shared among workers.
    Fault run(const Launch& launch, std::atomic<size_t>& next);

    // What running threads call.
    void wait_at_barrier(const char* file, int line);
    void wait_for_warp(WarpOperation operation, unsigned mask, void* operands);
    unsigned lane() const { return thread_->number % 32; }
    unsigned active_lanes() const;
    void copy_async(void* shared, const void* global, bool is_there);
    void copy_commit();
    void copy_wait(size_t groups_left);
    // Ends the launch.
    [[noreturn]] void fail(int error, const std::string& message);
    bool is_running() const { return is_running_; }
    Traffic& traffic() { return traffic_; }
    bool is_shared(const void* address, size_t bytes) const;

private:
    struct Copy {
        void* shared;
        const void* global;
        bool is_there;
    };
    struct Thread {
        Dim index;
        unsigned number;
        Context context;
        Stack* stack;
        std::vector<Copy> copies;  // started and not yet landed
        std::vector<size_t> ends;  // of the closed groups among them
    };
    // Sets of lanes; a lane that ended is in none.
    struct Warp {
        unsigned fresh, ready, waiting, at_barrier;
        bool is_uniform;  // all lanes that wait have one mask and one operation
        unsigned masks[32];
        void* operands[32];
        WarpOperation operations[32];

        unsigned live() const { return fresh | ready | waiting | at_barrier; }
    };

    void prepare(const Launch& launch);
    void run_blocks(const Launch& launch, std::atomic<size_t>& next);
    void run_block();
    void poison_shared();
    void run_warp(size_t warp);
    Thread* next_in_turn();
    void resume(Context* from, Thread* next);
    void suspend();
    static void run_threads();
    void run_threads_here();
    bool complete_operations(Warp& warp);
    void complete_operation(Warp& warp, unsigned group);
    void release_barrier();
    unsigned random();

    const Launch* launch_ = nullptr;
    std::vector<Thread> threads_;
    std::vector<Warp> warps_;
    std::vector<unsigned> warp_order_;
    std::vector<unsigned char> lane_orders_;  // permutations of 32 lanes
    const unsigned char* lane_order_ = nullptr;
    unsigned position_ = 0;
    unsigned turn_ = 0;  // lanes that have not come in this turn of the warp
    size_t warp_ = 0;
    Thread* thread_ = nullptr;
    Context scheduler_{};
    Stacks stacks_;
    const char* barrier_file_ = nullptr;  // of the threads that wait
    int barrier_line_ = 0;
    unsigned char* dynamic_mapping_ = nullptr;
    unsigned char* dynamic_end_ = nullptr;
    unsigned char* static_shared_ = nullptr;
    uint64_t random_state_ = 1;
    bool is_running_ = false;
    Fault fault_;
    Traffic traffic_;
    jmp_buf escape_;
};

// Computes an operation for the lanes in `group`. Returns what is wrong with it, or null.
const char* run_warp_operation(WarpOperation operation, unsigned group, void* const* operands,
                               const Worker& worker, int* error);

// A place in the source of a program, without the folder it was compiled in.
std::string place_text(const char* file, unsigned line);

// The worker that runs on this host thread, if any.
Worker*& current_worker();

}  // namespace cuda_stand_in
