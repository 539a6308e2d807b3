#include "settings.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

namespace nccl_stand_in {

namespace {

uint64_t from_environment(const char* name, uint64_t otherwise) {
    const char* text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

struct Request {
    Fault fault;
    int rank;
    uint64_t left;  // operations up to that of the fault
    Result result;
};

// Never destroyed: threads of streams may run while the process ends.
struct Requests {
    std::mutex mutex;
    std::vector<Request> all;
};

Requests& requests() {
    static auto& shared = *new Requests;
    return shared;
}

// Such as `error:1:3:6,hang:0:5`: kind, rank, number, and the result of an error.
void request_from(const std::string& text) {
    static const std::map<std::string, Fault> KINDS = {
        {"error", Fault::Error}, {"hang", Fault::Hang}, {"lost", Fault::Lost}, {"init", Fault::Init}};
    std::istringstream all(text);
    for (std::string one; std::getline(all, one, ',');) {
        std::istringstream parts(one);
        std::string kind, part;
        std::getline(parts, kind, ':');
        std::vector<uint64_t> numbers;
        while (std::getline(parts, part, ':')) numbers.push_back(strtoull(part.c_str(), nullptr, 10));
        numbers.resize(std::max<size_t>(numbers.size(), 2));
        const Result result = numbers.size() > 2 ? Result(numbers[2]) : INTERNAL_ERROR;
        const auto found = KINDS.find(kind);
        if (found != KINDS.end()) request_fault(found->second, int(numbers[0]), numbers[1], result);
    }
}

}  // namespace

void Settings::reset() {
    version = from_environment("CUDA_STAND_IN_NCCL_VERSION", 22809);
    init_ms = from_environment("CUDA_STAND_IN_NCCL_INIT_MS", 60'000);
    delay_us = from_environment("CUDA_STAND_IN_NCCL_DELAY_US", 0);
    shares_devices = from_environment("CUDA_STAND_IN_NCCL_SHARES_DEVICES", 0);
    {
        std::lock_guard lock(requests().mutex);
        requests().all.clear();
    }
    if (const char* text = getenv("CUDA_STAND_IN_NCCL_FAULTS")) request_from(text);
}

std::atomic<uint64_t>* Settings::find(const std::string& name) {
    const std::map<std::string, std::atomic<uint64_t>*> all = {
        {"version", &version},
        {"init_ms", &init_ms},
        {"delay_us", &delay_us},
        {"shares_devices", &shares_devices},
    };
    const auto found = all.find(name);
    return found == all.end() ? nullptr : found->second;
}

Settings& settings() {
    static Settings settings;
    return settings;
}

void request_fault(Fault fault, int rank, uint64_t n, Result result) {
    std::lock_guard lock(requests().mutex);
    requests().all.push_back({fault, rank, n, result});
}

ChosenFault next_fault(int rank) {
    std::lock_guard lock(requests().mutex);
    ChosenFault chosen;
    for (Request& request : requests().all) {
        if (request.rank != rank || request.fault == Fault::Init) continue;
        const bool stays = request.fault == Fault::Hang;
        if (request.left == 1 || (request.left == 0 && stays)) chosen = {request.fault, request.result};
        if (request.left > 0) request.left--;
    }
    return chosen;
}

Result next_init_fault(int rank) {
    std::lock_guard lock(requests().mutex);
    Result result = SUCCESS;
    for (Request& request : requests().all) {
        if (request.rank != rank || request.fault != Fault::Init || request.left == 0) continue;
        if (--request.left == 0) result = request.result;
    }
    return result;
}

}  // namespace nccl_stand_in
