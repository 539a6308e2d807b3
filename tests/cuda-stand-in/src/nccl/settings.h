// What a process or a test can choose about the library, and faults on request.
//
// Settings start as the environment gives them and change through the control functions.
#pragma once

#include "types.h"

#include <atomic>
#include <cstdint>
#include <string>

namespace nccl_stand_in {

struct Settings {
    std::atomic<uint64_t> version;         // 22809 for 2.28.9
    std::atomic<uint64_t> init_ms;         // that a rank waits for the others
    std::atomic<uint64_t> delay_us;        // before each batch of operations
    std::atomic<uint64_t> shares_devices;  // other than 0: ranks of one process may have one device

    Settings() { reset(); }
    void reset();
    // The setting of a name, or null.
    std::atomic<uint64_t>* find(const std::string& name);
};

Settings& settings();

// The numbers are those of the Rust library.
enum class Fault : int {
    None,
    Error,  // an asynchronous error, and the operation never ends
    Hang,   // this operation and all later ones never end
    Lost,   // the rank closes its connections, and the operation never ends
    Init,   // the making of a communicator fails
};

struct ChosenFault {
    Fault fault = Fault::None;
    Result result = SUCCESS;
};

// Requests a fault of the `n`-th operation, or communicator, of a rank, counted from 1 and from now. The rank
// is that of the communicator that was made of a unique id, also for operations on its splits.
void request_fault(Fault fault, int rank, uint64_t n, Result result);
// Counts an operation of a rank, and returns its fault.
ChosenFault next_fault(int rank);
// Counts a communicator of a rank, and returns what its making fails with.
Result next_init_fault(int rank);

}  // namespace nccl_stand_in
