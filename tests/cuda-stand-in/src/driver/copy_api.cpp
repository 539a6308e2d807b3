// Copies and fills.
//
// Both ends are checked twice: at the call, where a wrong range is an invalid value, and when the stream
// executes the operation, where memory that does not live then is an illegal address.
#include "api.h"
#include "device.h"
#include "errors.h"
#include "host_memory.h"
#include "schedule.h"
#include "settings.h"

#include <cstring>
#include <memory>
#include <vector>

using namespace cuda_stand_in;

namespace {

// Pins what was page-locked at the call: it is an error to free it before the copy runs.
struct HostEnd {
    void* memory;
    bool is_page_locked_memory;

    bool is_there(size_t bytes) const { return !is_page_locked_memory || is_page_locked(memory, bytes); }
};

HostEnd host_end(const void* memory, size_t bytes) {
    return {const_cast<void*>(memory), is_page_locked(memory, bytes)};
}

// A device, of the current context or another, whose buffer in use holds these bytes.
Device* owner_of(Address address, size_t bytes) {
    for (int ordinal = 0; Device* device = device_of(ordinal); ordinal++)
        if (device->memory.is_in_use(address, bytes)) return device;
    return nullptr;
}

int enqueue_work(void* stream_handle, const char* name, std::function<int()> run) {
    const auto stream = stream_of(stream_handle);
    if (!stream) return INVALID_HANDLE;
    Operation operation;
    operation.name = name;
    operation.run = std::move(run);
    enqueue(stream, std::move(operation));
    return SUCCESS;
}

int finish(void* stream_handle) {
    const auto stream = stream_of(stream_handle);
    run_until(end_of(stream));
    return stream->device->error;
}

int copy_up(Address to, const void* from, size_t bytes, void* stream) {
    if (bytes == 0) return SUCCESS;
    Device* device = owner_of(to, bytes);
    if (!device || !from) return INVALID_VALUE;
    counts().copies_up++;
    const HostEnd host = host_end(from, bytes);
    auto* target = reinterpret_cast<void*>(to);
    if (host.is_page_locked_memory)
        return enqueue_work(stream, "copy up from page-locked memory", [=] {
            if (!device->memory.is_open(to, bytes) || !host.is_there(bytes)) return ILLEGAL_ADDRESS;
            memcpy(target, host.memory, bytes);
            return SUCCESS;
        });
    const auto* begin = static_cast<const unsigned char*>(from);
    auto staged = std::make_shared<std::vector<unsigned char>>(begin, begin + bytes);
    return enqueue_work(stream, "copy up", [=] {
        if (!device->memory.is_open(to, bytes)) return ILLEGAL_ADDRESS;
        memcpy(target, staged->data(), bytes);
        return SUCCESS;
    });
}

int copy_down(void* to, Address from, size_t bytes, void* stream) {
    if (bytes == 0) return SUCCESS;
    Device* device = owner_of(from, bytes);
    if (!device || !to) return INVALID_VALUE;
    counts().copies_down++;
    const HostEnd host = host_end(to, bytes);
    const int status = enqueue_work(stream, "copy down", [=] {
        if (!device->memory.is_open(from, bytes) || !host.is_there(bytes)) return ILLEGAL_ADDRESS;
        memcpy(host.memory, reinterpret_cast<const void*>(from), bytes);
        return SUCCESS;
    });
    // A copy to other memory is documented to have ended when the call returns.
    return status || host.is_page_locked_memory ? status : finish(stream);
}

int copy_device(Address to, Address from, size_t bytes, void* stream) {
    if (bytes == 0) return SUCCESS;
    Device *source = owner_of(from, bytes), *target = owner_of(to, bytes);
    if (!source || !target) return INVALID_VALUE;
    counts().copies_device++;
    return enqueue_work(stream, "copy on the device", [=] {
        if (!source->memory.is_open(from, bytes) || !target->memory.is_open(to, bytes))
            return ILLEGAL_ADDRESS;
        memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
        return SUCCESS;
    });
}

int copy_between(Address to, Address from, size_t bytes, void* stream) {
    const bool is_to_device = owner_of(to, bytes), is_from_device = owner_of(from, bytes);
    if (is_to_device && is_from_device) return copy_device(to, from, bytes, stream);
    if (is_to_device) return copy_up(to, reinterpret_cast<const void*>(from), bytes, stream);
    if (is_from_device) return copy_down(reinterpret_cast<void*>(to), from, bytes, stream);
    return INVALID_VALUE;
}

template <class T>
int fill(Address to, T value, size_t count, void* stream) {
    if (count == 0) return SUCCESS;
    const size_t bytes = count * sizeof(T);
    Device* device = owner_of(to, bytes);
    if (!device || to % sizeof(T) != 0) return INVALID_VALUE;
    counts().memsets++;
    return enqueue_work(stream, "fill", [=] {
        if (!device->memory.is_open(to, bytes)) return ILLEGAL_ADDRESS;
        T* x = reinterpret_cast<T*>(to);
        for (size_t i = 0; i < count; i++) x[i] = value;
        return SUCCESS;
    });
}

// Runs an operation of the default stream to its end.
template <class Enqueue>
int run_now(Enqueue enqueue_operation, const char* call = __builtin_FUNCTION()) {
    if (const int status = status_of_context(call)) return status;
    if (const int status = enqueue_operation()) return status;
    return finish(nullptr);
}

template <class Enqueue>
int run_later(Enqueue enqueue_operation, const char* call = __builtin_FUNCTION()) {
    if (const int status = status_of_context(call)) return status;
    return enqueue_operation();
}

}  // namespace

API cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
    return run_later([=] { return copy_up(to, from, bytes, stream); });
}
API cuMemcpyHtoD_v2(Address to, const void* from, size_t bytes) {
    return run_now([=] { return copy_up(to, from, bytes, nullptr); });
}
API cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
    return run_later([=] { return copy_down(to, from, bytes, stream); });
}
API cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) {
    return run_now([=] { return copy_down(to, from, bytes, nullptr); });
}
API cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* stream) {
    return run_later([=] { return copy_device(to, from, bytes, stream); });
}
API cuMemcpyDtoD_v2(Address to, Address from, size_t bytes) {
    return run_now([=] { return copy_device(to, from, bytes, nullptr); });
}
API cuMemcpyAsync(Address to, Address from, size_t bytes, void* stream) {
    return run_later([=] { return copy_between(to, from, bytes, stream); });
}
API cuMemcpy(Address to, Address from, size_t bytes) {
    return run_now([=] { return copy_between(to, from, bytes, nullptr); });
}
API cuMemcpyPeerAsync(Address to, void*, Address from, void*, size_t bytes, void* stream) {
    return run_later([=] { return copy_device(to, from, bytes, stream); });
}

API cuMemsetD8Async(Address to, unsigned char value, size_t count, void* stream) {
    return run_later([=] { return fill<uint8_t>(to, value, count, stream); });
}
API cuMemsetD16Async(Address to, unsigned short value, size_t count, void* stream) {
    return run_later([=] { return fill<uint16_t>(to, value, count, stream); });
}
API cuMemsetD32Async(Address to, unsigned value, size_t count, void* stream) {
    return run_later([=] { return fill<uint32_t>(to, value, count, stream); });
}
API cuMemsetD8_v2(Address to, unsigned char value, size_t count) {
    return run_now([=] { return fill<uint8_t>(to, value, count, nullptr); });
}
API cuMemsetD16_v2(Address to, unsigned short value, size_t count) {
    return run_now([=] { return fill<uint16_t>(to, value, count, nullptr); });
}
API cuMemsetD32_v2(Address to, unsigned value, size_t count) {
    return run_now([=] { return fill<uint32_t>(to, value, count, nullptr); });
}
