// Initialization, devices, primary contexts and errors.
#include "api.h"
#include "device.h"
#include "errors.h"
#include "launch.h"
#include "schedule.h"
#include "settings.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>

using namespace cuda_stand_in;

namespace {

std::atomic<bool> is_initialized{false};

// Attributes of devices, by their documented numbers.
enum Attribute {
    MAX_THREADS_PER_BLOCK = 1,
    MAX_BLOCK_DIM_X = 2,
    MAX_BLOCK_DIM_Y = 3,
    MAX_BLOCK_DIM_Z = 4,
    MAX_GRID_DIM_X = 5,
    MAX_GRID_DIM_Y = 6,
    MAX_GRID_DIM_Z = 7,
    MAX_SHARED_MEMORY_PER_BLOCK = 8,
    TOTAL_CONSTANT_MEMORY = 9,
    WARP_SIZE = 10,
    MAX_REGISTERS_PER_BLOCK = 12,
    CLOCK_RATE = 13,
    MULTIPROCESSOR_COUNT = 16,
    CAN_MAP_HOST_MEMORY = 19,
    CONCURRENT_KERNELS = 31,
    MEMORY_CLOCK_RATE = 36,
    GLOBAL_MEMORY_BUS_WIDTH = 37,
    L2_CACHE_SIZE = 38,
    MAX_THREADS_PER_MULTIPROCESSOR = 39,
    ASYNC_ENGINE_COUNT = 40,
    UNIFIED_ADDRESSING = 41,
    PCI_DEVICE_ID = 34,
    COMPUTE_CAPABILITY_MAJOR = 75,
    COMPUTE_CAPABILITY_MINOR = 76,
    STREAM_PRIORITIES_SUPPORTED = 78,
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
    MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
    MANAGED_MEMORY = 83,
    MAX_SHARED_MEMORY_PER_BLOCK_BY_ATTRIBUTE = 97,
    MAX_BLOCKS_PER_MULTIPROCESSOR = 106,
    RESERVED_SHARED_MEMORY_PER_BLOCK = 111,
    MEMORY_POOLS_SUPPORTED = 115,
};

int attribute_of(const Device& device, int attribute) {
    switch (attribute) {
        case MAX_THREADS_PER_BLOCK: return THREADS_PER_BLOCK_MAX;
        case MAX_BLOCK_DIM_X:
        case MAX_BLOCK_DIM_Y: return 1024;
        case MAX_BLOCK_DIM_Z: return 64;
        case MAX_GRID_DIM_X: return 0x7fffffff;
        case MAX_GRID_DIM_Y:
        case MAX_GRID_DIM_Z: return 65535;
        case MAX_SHARED_MEMORY_PER_BLOCK: return DYNAMIC_BYTES_DEFAULT;
        case TOTAL_CONSTANT_MEMORY: return 65536;
        case WARP_SIZE: return 32;
        case MAX_REGISTERS_PER_BLOCK:
        case MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
        case CLOCK_RATE: return 1'980'000;
        case MEMORY_CLOCK_RATE: return 2'619'000;
        case GLOBAL_MEMORY_BUS_WIDTH: return 5120;
        case MULTIPROCESSOR_COUNT: return 132;
        case CAN_MAP_HOST_MEMORY:
        case CONCURRENT_KERNELS:
        case UNIFIED_ADDRESSING:
        case STREAM_PRIORITIES_SUPPORTED:
        case MEMORY_POOLS_SUPPORTED: return 1;
        case L2_CACHE_SIZE: return 50 << 20;
        case MAX_THREADS_PER_MULTIPROCESSOR: return THREADS_PER_MULTIPROCESSOR_MAX;
        case ASYNC_ENGINE_COUNT: return 3;
        case PCI_DEVICE_ID: return device.ordinal;
        case COMPUTE_CAPABILITY_MAJOR: return int(settings().compute_capability / 10);
        case COMPUTE_CAPABILITY_MINOR: return int(settings().compute_capability % 10);
        case MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return SHARED_BYTES_PER_MULTIPROCESSOR;
        case MAX_SHARED_MEMORY_PER_BLOCK_BY_ATTRIBUTE: return DYNAMIC_BYTES_MAX;
        case MAX_BLOCKS_PER_MULTIPROCESSOR: return BLOCKS_PER_MULTIPROCESSOR_MAX;
        case RESERVED_SHARED_MEMORY_PER_BLOCK: return SHARED_BYTES_RESERVED;
        default: return 0;
    }
}

}  // namespace

API cuInit(unsigned flags) {
    if (flags != 0) return INVALID_VALUE;
    if (settings().devices == 0) return NO_DEVICE;
    is_initialized = true;
    return SUCCESS;
}

API cuDriverGetVersion(int* version) {
    if (!version) return INVALID_VALUE;
    *version = int(settings().driver_version);
    return SUCCESS;
}

API cuGetErrorName(int error, const char** text) {
    *text = name_of(error);
    return *text ? SUCCESS : INVALID_VALUE;
}

API cuGetErrorString(int error, const char** text) {
    *text = description_of(error);
    return *text ? SUCCESS : INVALID_VALUE;
}

API cuDeviceGetCount(int* count) {
    if (!is_initialized) return NOT_INITIALIZED;
    *count = int(settings().devices);
    return SUCCESS;
}

API cuDeviceGet(int* device, int ordinal) {
    if (!is_initialized) return NOT_INITIALIZED;
    if (!device_of(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

API cuDeviceGetName(char* name, int length, int ordinal) {
    if (!device_of(ordinal)) return INVALID_DEVICE;
    if (length <= 0) return INVALID_VALUE;
    snprintf(name, size_t(length), "CUDA stand-in on a CPU");
    return SUCCESS;
}

API cuDeviceGetUuid_v2(char* uuid, int ordinal) {
    if (!device_of(ordinal)) return INVALID_DEVICE;
    memset(uuid, 0x5d, 16);
    uuid[15] = char(ordinal);
    return SUCCESS;
}

API cuDeviceGetUuid(char* uuid, int ordinal) { return cuDeviceGetUuid_v2(uuid, ordinal); }

API cuDeviceGetPCIBusId(char* text, int length, int ordinal) {
    if (!device_of(ordinal)) return INVALID_DEVICE;
    snprintf(text, size_t(length), "0000:%02X:00.0", ordinal);
    return SUCCESS;
}

API cuDeviceTotalMem_v2(size_t* bytes, int ordinal) {
    if (!device_of(ordinal)) return INVALID_DEVICE;
    *bytes = settings().bytes;
    return SUCCESS;
}

API cuDeviceGetAttribute(int* value, int attribute, int ordinal) {
    const Device* device = device_of(ordinal);
    if (!device) return INVALID_DEVICE;
    *value = attribute_of(*device, attribute);
    return SUCCESS;
}

API cuDevicePrimaryCtxRetain(void** context, int ordinal) {
    if (!is_initialized) return NOT_INITIALIZED;
    Device* device = device_of(ordinal);
    if (!device) return INVALID_DEVICE;
    std::lock_guard lock(device->context_mutex);
    device->retains++;
    *context = device;
    return SUCCESS;
}

// The last release destroys the context: its work, its memory and its error.
API cuDevicePrimaryCtxRelease_v2(int ordinal) {
    Device* device = device_of(ordinal);
    if (!device) return INVALID_DEVICE;
    std::lock_guard lock(device->context_mutex);
    if (device->retains == 0) return INVALID_CONTEXT;
    if (--device->retains > 0) return SUCCESS;
    end_all(*device);
    counts().leaked_buffers += device->memory.clear();
    device->error = SUCCESS;
    return SUCCESS;
}

API cuDevicePrimaryCtxSetFlags_v2(int ordinal, unsigned) {
    return device_of(ordinal) ? SUCCESS : INVALID_DEVICE;
}

API cuCtxSetCurrent(void* context) {
    if (context && !is_context(context)) return INVALID_CONTEXT;
    current_device() = static_cast<Device*>(context);
    return SUCCESS;
}

API cuCtxGetCurrent(void** context) {
    if (!is_initialized) return NOT_INITIALIZED;
    *context = current_device();
    return SUCCESS;
}

API cuCtxGetDevice(int* ordinal) {
    if (!current_device()) return INVALID_CONTEXT;
    *ordinal = current_device()->ordinal;
    return SUCCESS;
}

API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return SUCCESS;
}

API cuCtxSynchronize() {
    if (const int status = status_of_context()) return status;
    counts().context_synchronizations++;
    if (const int status = synchronize_context(*current_device(), "cuCtxSynchronize")) return status;
    run_all(*current_device());
    return current_device()->error;
}
