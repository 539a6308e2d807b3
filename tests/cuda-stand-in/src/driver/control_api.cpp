// What only the stand-in has: settings, counts, and work of the other libraries.
#include "api.h"
#include "control.h"
#include "device.h"
#include "errors.h"
#include "schedule.h"
#include "settings.h"

#include <algorithm>
#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <pthread.h>
#include <thread>

using namespace cuda_stand_in;

namespace {

// Sums a value of the memory of all devices.
template <class Value>
uint64_t over_devices(Value value) {
    uint64_t sum = 0;
    for (int i = 0; Device* device = device_of(i); i++) sum += value(device->memory);
    return sum;
}

// Copies as much of a text as fits; returns its length.
int copy_text(const std::string& from, char* to, size_t length) {
    if (length > 0) {
        const size_t copied = std::min(length - 1, from.size());
        memcpy(to, from.data(), copied);
        to[copied] = '\0';
    }
    return int(from.size());
}

int enqueue_work(void* stream_handle, const char* name, bool runs_alone, int (*run)(void*),
                 const std::shared_ptr<void>& argument) {
    // Libraries launch kernels.
    if (const int status = status_of_context("cuLaunchKernel")) return status;
    const auto stream = stream_of(stream_handle);
    if (!stream) return INVALID_HANDLE;
    Operation operation;
    operation.name = name;
    operation.runs_alone = runs_alone;
    operation.run = [run, argument] { return run(argument.get()); };
    enqueue(stream, std::move(operation));
    return SUCCESS;
}

}  // namespace

API cuda_stand_in_set(const char* name, uint64_t value) {
    std::atomic<uint64_t>* setting = settings().find(name);
    if (!setting) return INVALID_VALUE;
    if (setting == &settings().stream_threads && *setting != value) end_mode();
    *setting = value;
    return SUCCESS;
}

API cuda_stand_in_get(const char* name, uint64_t* value) {
    const std::atomic<uint64_t>* setting = settings().find(name);
    if (!setting) return INVALID_VALUE;
    *value = *setting;
    return SUCCESS;
}

API cuda_stand_in_fail_launch(const char* kernel, uint64_t n) {
    fail_launch(kernel, n);
    return SUCCESS;
}

// Settings as the environment gives them, no counts, no errors. Buffers and streams stay.
API cuda_stand_in_reset() {
    if (is_threaded()) end_mode();
    settings().reset();
    counts().reset();
    forget_calls();
    for (int i = 0; Device* device = device_of(i); i++) {
        device->error = SUCCESS;
        device->memory.reset_highest();
    }
    forget_failure();
    return SUCCESS;
}

// Writes up to `length` counts, in the order of `Counts` of the Rust library.
API cuda_stand_in_counts(uint64_t* out, size_t length) {
    const Counts& all = counts();
    const uint64_t values[] = {
        all.launches,
        all.copies_up,
        all.copies_down,
        all.copies_device,
        all.memsets,
        all.stream_synchronizations,
        all.event_synchronizations,
        all.context_synchronizations,
        all.allocations,
        over_devices([](const Memory& memory) { return memory.bytes_in_use(); }),
        over_devices([](const Memory& memory) { return memory.bytes_highest(); }),
        over_devices([](const Memory& memory) { return memory.buffers_in_use(); }),
        all.leaked_buffers,
        all.matrix_products,
        all.bytes_loaded,
        all.bytes_stored,
    };
    std::copy_n(values, std::min(length, std::size(values)), out);
    return int(std::size(values));
}

// Copies the calls since the last reset, a line each with name and number; returns the length.
API cuda_stand_in_calls(char* text, size_t length) { return copy_text(calls_so_far(), text, length); }

// A library loads kernels of its own.
API cuda_stand_in_load(const char* call) {
    if (const int status = status_of_context(call)) return status;
    return synchronize_context(*current_device(), call);
}

// Lets a thread, as other code of the process, wait for all work of every context, one after another.
API cuda_stand_in_synchronize_contexts() {
    std::thread([] {
        pthread_setname_np(pthread_self(), "other-code");
        for (int i = 0; Device* device = device_of(i); i++)
            if (device->retains > 0) synchronize_context(*device, "cuCtxSynchronize");
    }).detach();
    return SUCCESS;
}

// The lowest ordinal of a device whose context nobody holds, or -1.
API cuda_stand_in_idle_device() {
    for (int i = 0; Device* device = device_of(i); i++) {
        std::lock_guard lock(device->context_mutex);
        if (device->retains == 0) return i;
    }
    return -1;
}

// Copies the cause of the last failure; returns its length.
API cuda_stand_in_last_failure(char* text, size_t length) { return copy_text(last_failure(), text, length); }

API cuda_stand_in_enqueue(void* stream_handle, const char* name, int (*run)(void*), void (*destroy)(void*),
                          void* argument) {
    return enqueue_work(stream_handle, name, true, run, std::shared_ptr<void>(argument, destroy));
}

API cuda_stand_in_enqueue_waiting(void* stream_handle, const char* name, int (*run)(void*),
                                  void (*destroy)(void*), void* argument) {
    return enqueue_work(stream_handle, name, false, run, std::shared_ptr<void>(argument, destroy));
}

API cuda_stand_in_is_stopped() { return is_stopped(); }

API cuda_stand_in_finish_event(void* event_handle) {
    const auto event = event_of(event_handle);
    if (!event) return INVALID_HANDLE;
    run_until(point_of(*event));
    return SUCCESS;
}

API cuda_stand_in_device_of_stream(void* stream_handle) {
    const auto stream = stream_of(stream_handle);
    return stream ? stream->device->ordinal : -1;
}

API cuda_stand_in_device_of_buffer(const void* address, size_t bytes) {
    for (int i = 0; Device* device = device_of(i); i++)
        if (device->memory.is_in_use(reinterpret_cast<uintptr_t>(address), bytes)) return i;
    return -1;
}

API cuda_stand_in_describe(const void* address, char* text, size_t length) {
    return copy_text(describe_address(address), text, length);
}

API cuda_stand_in_fail_device(int ordinal, int code, const char* cause) {
    Device* device = device_of(ordinal);
    if (!device) return INVALID_DEVICE;
    device->fail(code, cause);
    return SUCCESS;
}

API cuda_stand_in_report(const char* cause) {
    report(cause);
    return SUCCESS;
}

API cuda_stand_in_is_open(const void* address, size_t bytes) {
    for (int i = 0; Device* device = device_of(i); i++)
        if (device->memory.is_open(reinterpret_cast<uintptr_t>(address), bytes)) return 1;
    return 0;
}

API cuda_stand_in_count_matrix_product() {
    counts().matrix_products++;
    return SUCCESS;
}

API cuGetProcAddress_v2(const char* symbol, void** function, int, uint64_t, int* status) {
    // Newer versions first, as the real library does for a recent CUDA version.
    for (const char* version : {"_v2", ""}) {
        *function = dlsym(RTLD_DEFAULT, (std::string(symbol) + version).c_str());
        if (*function) break;
    }
    constexpr int FOUND = 0, SYMBOL_NOT_FOUND = 1;
    if (status) *status = *function ? FOUND : SYMBOL_NOT_FOUND;
    return *function ? SUCCESS : NOT_FOUND;
}

API cuGetProcAddress(const char* symbol, void** function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}
