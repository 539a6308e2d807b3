// Allocations and pools.
#include "api.h"
#include "device.h"
#include "errors.h"
#include "host_memory.h"
#include "schedule.h"
#include "settings.h"

#include <set>
#include <mutex>

using namespace cuda_stand_in;

namespace {

struct Pool {
    Device* device;
    uint64_t release_threshold = 0;
};

std::mutex pools_mutex;
std::set<Pool*> pools;
Pool default_pools[DEVICES_MAX];

// The attributes of pools, by their documented numbers.
enum PoolAttribute {
    REUSE_FOLLOW_EVENT_DEPENDENCIES = 1,
    REUSE_ALLOW_OPPORTUNISTIC = 2,
    REUSE_ALLOW_INTERNAL_DEPENDENCIES = 3,
    RELEASE_THRESHOLD = 4,
    RESERVED_CURRENT = 5,
    RESERVED_HIGH = 6,
    USED_CURRENT = 7,
    USED_HIGH = 8,
};

struct PoolProperties {
    int allocation_type, handle_types, location_type, location_id;
    void* security_attributes;
    size_t bytes_max;
};

bool is_pool(Pool* pool) {
    std::lock_guard lock(pools_mutex);
    return pools.count(pool) > 0 || (pool >= default_pools && pool < default_pools + DEVICES_MAX);
}

Pool* default_pool(Device& device) {
    Pool* pool = &default_pools[device.ordinal];
    pool->device = &device;
    return pool;
}

int allocate(Device& device, size_t bytes, Address* address) {
    if (!address || bytes == 0) return INVALID_VALUE;
    *address = device.memory.reserve(bytes, settings().bytes);
    if (*address == 0) return OUT_OF_MEMORY;
    counts().allocations++;
    return SUCCESS;
}

int close(Device& device, Address address) {
    if (device.memory.close(address)) return SUCCESS;
    device.fail(ILLEGAL_ADDRESS, "bytes next to a buffer were written");
    return ILLEGAL_ADDRESS;
}

int allocate_in_order(Device& device, size_t bytes, void* stream_handle, Address* address) {
    const auto stream = stream_of(stream_handle);
    if (!stream) return INVALID_HANDLE;
    if (const int status = allocate(device, bytes, address)) return status;
    Operation operation;
    operation.name = "allocation";
    // Without order among streams, another stream may have released the buffer already.
    operation.run = [&device, at = *address] { return device.memory.open(at) ? SUCCESS : ILLEGAL_ADDRESS; };
    enqueue(stream, std::move(operation));
    return SUCCESS;
}

}  // namespace

API cuMemGetInfo_v2(size_t* free, size_t* total) {
    if (const int status = status_of_context()) return status;
    const size_t all = settings().bytes, used = current_device()->memory.bytes_in_use();
    *total = all;
    *free = used < all ? all - used : 0;
    return SUCCESS;
}

API cuMemAlloc_v2(Address* address, size_t bytes) {
    if (const int status = status_of_context()) return status;
    if (const int status = synchronize_context(*current_device(), "cuMemAlloc_v2")) return status;
    if (const int status = allocate(*current_device(), bytes, address)) return status;
    current_device()->memory.open(*address);
    return SUCCESS;
}

// Waits for all work of the device first.
API cuMemFree_v2(Address address) {
    if (const int status = status_of_context()) return status;
    if (address == 0) return SUCCESS;
    if (const int status = synchronize_context(*current_device(), "cuMemFree_v2")) return status;
    Device& device = *current_device();
    run_all(device);
    if (!device.memory.release(address)) return INVALID_VALUE;
    return close(device, address);
}

API cuMemAllocAsync(Address* address, size_t bytes, void* stream) {
    if (const int status = status_of_context()) return status;
    return allocate_in_order(*current_device(), bytes, stream, address);
}

API cuMemAllocFromPoolAsync(Address* address, size_t bytes, Pool* pool, void* stream) {
    if (const int status = status_of_context()) return status;
    if (!is_pool(pool)) return INVALID_VALUE;
    return allocate_in_order(*pool->device, bytes, stream, address);
}

API cuMemFreeAsync(Address address, void* stream_handle) {
    if (const int status = status_of_context()) return status;
    if (address == 0) return SUCCESS;
    const auto stream = stream_of(stream_handle);
    if (!stream) return INVALID_HANDLE;
    Device& device = *stream->device;
    if (!device.memory.release(address)) return INVALID_VALUE;
    Operation operation;
    operation.name = "release";
    operation.runs_after_errors = true;
    operation.run = [&device, address] { return close(device, address); };
    enqueue(stream, std::move(operation));
    return SUCCESS;
}

API cuDeviceGetDefaultMemPool(Pool** pool, int ordinal) {
    Device* device = device_of(ordinal);
    if (!device) return INVALID_DEVICE;
    *pool = default_pool(*device);
    return SUCCESS;
}

API cuDeviceGetMemPool(Pool** pool, int ordinal) { return cuDeviceGetDefaultMemPool(pool, ordinal); }

API cuMemPoolCreate(Pool** pool, const PoolProperties* properties) {
    if (!pool || !properties) return INVALID_VALUE;
    Device* device = device_of(properties->location_id);
    if (!device) return INVALID_DEVICE;
    *pool = new Pool{device};
    std::lock_guard lock(pools_mutex);
    pools.insert(*pool);
    return SUCCESS;
}

API cuMemPoolDestroy(Pool* pool) {
    std::lock_guard lock(pools_mutex);
    if (pools.erase(pool) == 0) return INVALID_VALUE;
    delete pool;
    return SUCCESS;
}

API cuMemPoolSetAttribute(Pool* pool, int attribute, void* value) {
    if (!is_pool(pool) || !value) return INVALID_VALUE;
    switch (attribute) {
        case REUSE_FOLLOW_EVENT_DEPENDENCIES:
        case REUSE_ALLOW_OPPORTUNISTIC:
        case REUSE_ALLOW_INTERNAL_DEPENDENCIES: return SUCCESS;
        case RELEASE_THRESHOLD: pool->release_threshold = *static_cast<uint64_t*>(value); return SUCCESS;
        case RESERVED_HIGH:
        case USED_HIGH:
            if (*static_cast<uint64_t*>(value) != 0) return INVALID_VALUE;
            pool->device->memory.reset_highest();
            return SUCCESS;
        default: return INVALID_VALUE;
    }
}

API cuMemPoolGetAttribute(Pool* pool, int attribute, void* value) {
    if (!is_pool(pool) || !value) return INVALID_VALUE;
    const Memory& memory = pool->device->memory;
    switch (attribute) {
        case REUSE_FOLLOW_EVENT_DEPENDENCIES:
        case REUSE_ALLOW_OPPORTUNISTIC:
        case REUSE_ALLOW_INTERNAL_DEPENDENCIES: *static_cast<int*>(value) = 1; return SUCCESS;
        case RELEASE_THRESHOLD: *static_cast<uint64_t*>(value) = pool->release_threshold; return SUCCESS;
        case RESERVED_CURRENT:
        case USED_CURRENT: *static_cast<uint64_t*>(value) = memory.bytes_in_use(); return SUCCESS;
        case RESERVED_HIGH:
        case USED_HIGH: *static_cast<uint64_t*>(value) = memory.bytes_highest(); return SUCCESS;
        default: return INVALID_VALUE;
    }
}

API cuMemPoolTrimTo(Pool* pool, size_t) {
    if (!is_pool(pool)) return INVALID_VALUE;
    enter(*pool->device, "cuMemPoolTrimTo");
    return synchronize_context(*pool->device, "cuMemPoolTrimTo");
}

API cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
    if (const int status = status_of_context()) return status;
    if (const int status = synchronize_context(*current_device(), "cuMemHostAlloc")) return status;
    if (!memory || bytes == 0) return INVALID_VALUE;
    *memory = allocate_page_locked(bytes);
    return *memory ? SUCCESS : OUT_OF_MEMORY;
}

API cuMemAllocHost_v2(void** memory, size_t bytes) { return cuMemHostAlloc(memory, bytes, 0); }

API cuMemFreeHost(void* memory) {
    enter_current("cuMemFreeHost");
    if (current_device()) synchronize_context(*current_device(), "cuMemFreeHost");
    return free_page_locked(memory) ? SUCCESS : INVALID_VALUE;
}

API cuMemHostGetFlags(unsigned* flags, void* memory) {
    if (!is_page_locked(memory, 0)) return INVALID_VALUE;
    *flags = 0;
    return SUCCESS;
}
