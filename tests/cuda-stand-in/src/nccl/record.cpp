#include "record.h"

#include <mutex>

namespace nccl_stand_in {

namespace {

// A process that runs for long keeps the first ones.
constexpr size_t LAUNCHES_MAX = 1 << 20;

struct Record {
    std::mutex mutex;
    std::vector<Launch> launches;
};

Record& record() {
    static auto& shared = *new Record;
    return shared;
}

}  // namespace

void Counts::reset() {
    for (auto& count : operations) count = 0;
    bytes = 0;
    in_flight_highest = in_flight.load();
}

void Counts::begin(uint64_t begun) {
    const uint64_t now = in_flight += begun;
    uint64_t highest = in_flight_highest;
    while (now > highest && !in_flight_highest.compare_exchange_weak(highest, now)) {
    }
}

Counts& counts() {
    static Counts counts;
    return counts;
}

void record_launch(const Launch& launch) {
    std::lock_guard lock(record().mutex);
    if (record().launches.size() < LAUNCHES_MAX) record().launches.push_back(launch);
}

void clear_launches() {
    std::lock_guard lock(record().mutex);
    record().launches.clear();
}

std::vector<Launch> launches() {
    std::lock_guard lock(record().mutex);
    return record().launches;
}

}  // namespace nccl_stand_in
