// What only the stand-in has: settings, faults on request, counts, and the launch record.
#include "api.h"
#include "record.h"
#include "settings.h"

#include <algorithm>

using namespace nccl_stand_in;

NCCL nccl_stand_in_set(const char* name, uint64_t value) {
    std::atomic<uint64_t>* setting = settings().find(name);
    if (!setting) return INVALID_ARGUMENT;
    *setting = value;
    return SUCCESS;
}

NCCL nccl_stand_in_request_fault(int fault, int rank, uint64_t n, int result) {
    settings();  // which would forget the request if they were read for the first time later
    request_fault(Fault(fault), rank, n, Result(result));
    return SUCCESS;
}

// Settings as the environment gives them, no counts, no launches. Communicators stay.
NCCL nccl_stand_in_reset() {
    settings().reset();
    counts().reset();
    clear_launches();
    return SUCCESS;
}

// Writes up to `length` counts, in the order of `NcclCounts` of the Rust library.
NCCL nccl_stand_in_counts(uint64_t* out, size_t length) {
    const Counts& all = counts();
    uint64_t values[KINDS + 3];
    std::copy(std::begin(all.operations), std::end(all.operations), values);
    values[KINDS] = all.bytes;
    values[KINDS + 1] = all.communicators;
    values[KINDS + 2] = all.in_flight_highest;
    std::copy_n(values, std::min(length, std::size(values)), out);
    return int(std::size(values));
}

// Writes up to `length` launches, oldest first; returns how many there are.
NCCL nccl_stand_in_launches(Launch* out, size_t length) {
    const auto all = launches();
    std::copy_n(all.begin(), std::min(length, all.size()), out);
    return int(all.size());
}
