// The lock of a context, which the calls of a driver take.
//
// NVIDIA documents calls that may wait for all work of a context: loads of kernels, allocations of page-locked
// memory, frees. Such a call holds the lock meanwhile, so that every other call on the context waits for it,
// and with it for work that waits for another rank. That is so where streams have threads; where they run
// late, nothing runs beside a call.
//
// Sources: NVIDIA, "CUDA C++ Programming Guide", sections "Lazy Loading" (loading kernels may require context
// synchronization) and "Implicit Synchronization"; "CUDA Runtime API", notes on `cudaFree` and
// `cudaFreeHost`. That other calls wait for the lock was seen in stacks of threads on a GPU.
#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <string>

namespace cuda_stand_in {

struct Device;

struct ContextLock {
    struct Waiter {
        std::string thread;
        std::string call;
    };

    std::mutex mutex;
    std::condition_variable freed;
    std::string holder;  // the call that holds the lock; empty if none does
    std::list<Waiter> waiters;
};

// Counts a call, and waits while another call holds the context.
void enter(Device& device, const char* call);
// Holds the context until all work has run that was enqueued before. If that work waits for other work, and
// nothing moves for the time `hang_ms`, the device fails, and the report says who waits for whom.
int synchronize_context(Device& device, const char* call);
// The calls since the last reset, a line each: name and number.
std::string calls_so_far();
void forget_calls();

}  // namespace cuda_stand_in
