// What a process or a test can choose about the stand-in.
//
// Settings start as the environment gives them and change through the control functions.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace cuda_stand_in {

struct Settings {
    std::atomic<uint64_t> bytes;               // of memory per device
    std::atomic<uint64_t> order;               // of threads: 0 ascending, 1 descending, else a seed
    std::atomic<uint64_t> workers;             // host threads that run a launch
    std::atomic<uint64_t> devices;             // 0: as on a machine without one
    std::atomic<uint64_t> driver_version;      // 13000 for 13.0
    std::atomic<uint64_t> compute_capability;  // 90 for 9.0
    std::atomic<uint64_t> fail_compilation;    // other than 0: the compiler library fails
    std::atomic<uint64_t> count_bytes;         // other than 0: kernels that are compiled count their bytes
    std::atomic<uint64_t> stream_threads;      // other than 0: streams run on threads of their own
    std::atomic<uint64_t> queues;              // of a device, shared by its threaded streams; 0: one each
    std::atomic<uint64_t> eager_loading;       // other than 0: modules load with all of their kernels
    std::atomic<uint64_t> hang_ms;             // time without progress after which a context hangs
    std::atomic<uint64_t> logs;                // other than 0: operations are written to stderr

    Settings() { reset(); }
    void reset();
    // The setting of a name, or null.
    std::atomic<uint64_t>* find(const std::string& name);
};

Settings& settings();

// Makes the `n`-th next launch of a kernel fail with an illegal address; the first is 1.
void fail_launch(const std::string& kernel, uint64_t n);
// Counts a launch; returns whether it shall fail.
bool is_failing_launch(const std::string& kernel);

struct Counts {
    std::atomic<uint64_t> launches, copies_up, copies_down, copies_device, memsets, stream_synchronizations,
        event_synchronizations, context_synchronizations, allocations, leaked_buffers, matrix_products,
        bytes_loaded, bytes_stored;

    void reset();
};

Counts& counts();

}  // namespace cuda_stand_in
