// Counts, and the order in which the host has issued operations.
#pragma once

#include "task.h"

#include <atomic>
#include <cstdint>
#include <vector>

namespace nccl_stand_in {

struct Counts {
    std::atomic<uint64_t> operations[KINDS];  // by kind
    std::atomic<uint64_t> bytes;              // that operations have read on their rank
    std::atomic<uint64_t> communicators;      // alive
    std::atomic<uint64_t> in_flight, in_flight_highest;

    // Keeps what is alive.
    void reset();
    void begin(uint64_t operations);
    void end(uint64_t operations) { in_flight -= operations; }
};

Counts& counts();

// As `nccl_stand_in_launches` gives it.
struct Launch {
    uint64_t communicator;
    int32_t rank, kind, peer, type;
    uint64_t count;
};

void record_launch(const Launch& launch);
void clear_launches();
std::vector<Launch> launches();

}  // namespace nccl_stand_in
