#include "device.h"

#include "errors.h"
#include "settings.h"

#include <cstdio>
#include <mutex>

namespace cuda_stand_in {

namespace {

std::mutex failure_mutex;
auto& failure = *new std::string;  // threads of streams may fail while the process ends

std::vector<Device>& devices() {
    // Never destroyed: host threads may still call while the process ends.
    static auto& all = *new std::vector<Device>(DEVICES_MAX);
    static std::once_flag once;
    std::call_once(once, [] {
        for (int i = 0; i < DEVICES_MAX; i++) {
            all[size_t(i)].ordinal = i;
            all[size_t(i)].legacy = create_stream(all[size_t(i)], true, 0);
        }
    });
    return all;
}

}  // namespace

void Device::fail(int code, const std::string& cause) {
    int none = 0;
    if (!error.compare_exchange_strong(none, code)) return;
    const char* name = name_of(code);
    fprintf(stderr, "cuda stand-in: %s: %s\n", name ? name : "error", cause.c_str());
    std::lock_guard lock(failure_mutex);
    failure = cause;
}

Device* device_of(int ordinal) {
    return ordinal >= 0 && uint64_t(ordinal) < settings().devices && ordinal < DEVICES_MAX
               ? &devices()[size_t(ordinal)]
               : nullptr;
}

Device*& current_device() {
    static thread_local Device* device = nullptr;
    return device;
}

bool is_context(const void* handle) {
    for (const Device& device : devices())
        if (&device == handle) return device.retains > 0;
    return false;
}

std::string describe_address(const void* address) {
    for (const Device& device : devices()) {
        const std::string found = device.memory.describe(reinterpret_cast<uintptr_t>(address));
        if (!found.empty()) return found;
    }
    return "in no buffer in use";
}

void report(const std::string& cause) {
    fprintf(stderr, "cuda stand-in: %s\n", cause.c_str());
    std::lock_guard lock(failure_mutex);
    failure = cause;
}

std::string last_failure() {
    std::lock_guard lock(failure_mutex);
    return failure;
}

void forget_failure() {
    std::lock_guard lock(failure_mutex);
    failure.clear();
}

void enter_current(const char* call) {
    if (Device* device = current_device()) enter(*device, call);
}

int status_of_context(const char* call) {
    Device* device = current_device();
    if (!device || device->retains == 0) return INVALID_CONTEXT;
    enter(*device, call);
    return device->error;
}

}  // namespace cuda_stand_in
