// Modules, functions and launches.
#include "api.h"
#include "device.h"
#include "errors.h"
#include "launch.h"
#include "object.h"
#include "schedule.h"
#include "settings.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>

using namespace cuda_stand_in;

namespace {

std::mutex modules_mutex;
std::set<Module*> modules;
std::set<Function*> functions;

bool is_function(Function* function) {
    std::lock_guard lock(modules_mutex);
    return functions.count(function) > 0;
}

// Whether the function of a kernel was asked for before.
bool is_loaded(Module* module, const char* name) {
    std::lock_guard lock(modules_mutex);
    return modules.count(module) && functions.count(module->function(name));
}

// The attributes of functions, by their documented numbers.
enum FunctionAttribute {
    MAX_THREADS_PER_BLOCK = 0,
    SHARED_SIZE_BYTES = 1,
    CONST_SIZE_BYTES = 2,
    LOCAL_SIZE_BYTES = 3,
    NUM_REGS = 4,
    PTX_VERSION = 5,
    BINARY_VERSION = 6,
    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
    PREFERRED_SHARED_MEMORY_CARVEOUT = 9,
};

// Values of parameters, copied at the call.
class Parameters {
public:
    Parameters(const Kernel& kernel, void* const* values) {
        size_t bytes = 0;
        std::vector<size_t> offsets;
        for (unsigned i = 0; i < kernel.parameters; i++) {
            offsets.push_back(bytes);
            bytes += (kernel.parameter_bytes[i] + 15) / 16 * 16;
        }
        // Words of 16 bytes keep parameters of every type aligned.
        words_.resize(bytes / 16);
        for (unsigned i = 0; i < kernel.parameters; i++) {
            auto* at = reinterpret_cast<unsigned char*>(words_.data()) + offsets[i];
            memcpy(at, values[i], kernel.parameter_bytes[i]);
            pointers_.push_back(at);
        }
    }
    Parameters(const Parameters&) = delete;
    Parameters& operator=(const Parameters&) = delete;

    void* const* pointers() const { return pointers_.data(); }

private:
    struct alignas(16) Word {
        unsigned char bytes[16];
    };
    std::vector<Word> words_;
    std::vector<void*> pointers_;
};

bool is_valid(const Dim& grid, const Dim& block, const Function& function) {
    constexpr unsigned GRID_YZ_MAX = 65535, GRID_X_MAX = 0x7fffffff;
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z) return false;
    if (grid.x > GRID_X_MAX || grid.y > GRID_YZ_MAX || grid.z > GRID_YZ_MAX) return false;
    if (block.x > 1024 || block.y > 1024 || block.z > 64) return false;
    return size_t(block.x) * block.y * block.z <= function.kernel->threads_max;
}

int launch(Function& function, const Dim& grid, const Dim& block, size_t dynamic_bytes, void* stream_handle,
           void** values) {
    if (const int status = status_of_context("cuLaunchKernel")) return status;
    if (!is_function(&function)) return INVALID_HANDLE;
    const auto stream = stream_of(stream_handle);
    if (!stream || stream->device != current_device()) return INVALID_HANDLE;
    if (!is_valid(grid, block, function)) return INVALID_VALUE;
    if (dynamic_bytes > size_t(function.dynamic_bytes_max)) return INVALID_VALUE;
    if (function.kernel->parameters > 0 && !values) return INVALID_VALUE;
    counts().launches++;
    const bool is_failing = is_failing_launch(function.kernel->name);
    Device* device = current_device();
    auto parameters = std::make_shared<Parameters>(*function.kernel, values);
    Operation operation;
    operation.name = std::string("kernel ") + function.kernel->name;
    operation.run = [=, function = function]() -> int {
        if (is_failing) return ILLEGAL_ADDRESS;
        const Launch work{
            function.kernel,
            grid,
            block,
            dynamic_bytes,
            function.shared_module,
            function.shared_module_bytes,
            settings().order,
            parameters->pointers(),
            function.kernel->has_counts ? device->memory.open_ranges() : std::vector<AddressRange>()};
        const Fault fault = run_launch(work);
        if (fault.error) device->fail(fault.error, fault.message);
        return fault.error;
    };
    enqueue(stream, std::move(operation));
    return SUCCESS;
}

}  // namespace

API cuModuleLoadData(Module** module, const void* image) {
    if (const int status = status_of_context()) return status;
    if (!module || !image) return INVALID_VALUE;
    if (const int status = synchronize_context(*current_device(), "cuModuleLoadData")) return status;
    std::unique_ptr<Module> loaded;
    if (const int status = Module::load(image, &loaded)) return status;
    std::lock_guard lock(modules_mutex);
    modules.insert(loaded.get());
    *module = loaded.release();
    return SUCCESS;
}

API cuModuleGetLoadingMode(int* mode) {
    constexpr int EAGER = 1, LAZY = 2;
    if (!mode) return INVALID_VALUE;
    *mode = settings().eager_loading ? EAGER : LAZY;
    return SUCCESS;
}

API cuModuleLoadDataEx(Module** module, const void* image, unsigned, void*, void**) {
    return cuModuleLoadData(module, image);
}

// Handles become invalid; the code stays for what runs late.
API cuModuleUnload(Module* module) {
    enter_current("cuModuleUnload");
    if (current_device()) synchronize_context(*current_device(), "cuModuleUnload");
    std::lock_guard lock(modules_mutex);
    return modules.erase(module) ? SUCCESS : INVALID_HANDLE;
}

API cuModuleGetFunction(Function** function, Module* module, const char* name) {
    if (const int status = status_of_context()) return status;
    // A module that was loaded lazily loads a kernel when its function is asked for.
    const bool loads = !settings().eager_loading && !is_loaded(module, name);
    if (const int status = loads ? synchronize_context(*current_device(), "cuModuleGetFunction") : SUCCESS)
        return status;
    std::lock_guard lock(modules_mutex);
    if (!modules.count(module)) return INVALID_HANDLE;
    *function = module->function(name);
    if (!*function) return NOT_FOUND;
    functions.insert(*function);
    return SUCCESS;
}

API cuFuncGetAttribute(int* value, int attribute, Function* function) {
    if (!is_function(function)) return INVALID_HANDLE;
    switch (attribute) {
        case MAX_THREADS_PER_BLOCK: *value = int(function->kernel->threads_max); return SUCCESS;
        case SHARED_SIZE_BYTES: *value = int(function->shared_module_bytes); return SUCCESS;
        case CONST_SIZE_BYTES:
        case LOCAL_SIZE_BYTES: *value = 0; return SUCCESS;
        case NUM_REGS: *value = 64; return SUCCESS;
        case PTX_VERSION:
        case BINARY_VERSION: *value = int(settings().compute_capability); return SUCCESS;
        case MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = function->dynamic_bytes_max; return SUCCESS;
        case PREFERRED_SHARED_MEMORY_CARVEOUT: *value = -1; return SUCCESS;
        default: return INVALID_VALUE;
    }
}

API cuFuncSetAttribute(Function* function, int attribute, int value) {
    if (!is_function(function)) return INVALID_HANDLE;
    switch (attribute) {
        case MAX_DYNAMIC_SHARED_SIZE_BYTES:
            if (value < 0 || value > DYNAMIC_BYTES_MAX) return INVALID_VALUE;
            function->dynamic_bytes_max = value;
            return SUCCESS;
        case PREFERRED_SHARED_MEMORY_CARVEOUT: return value >= -1 && value <= 100 ? SUCCESS : INVALID_VALUE;
        default: return INVALID_VALUE;
    }
}

API cuFuncSetCacheConfig(Function* function, int) { return is_function(function) ? SUCCESS : INVALID_HANDLE; }

API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, Function* function, int threads,
                                                         size_t dynamic_bytes, unsigned) {
    if (!is_function(function)) return INVALID_HANDLE;
    if (threads <= 0) return INVALID_VALUE;
    if (threads > int(function->kernel->threads_max) || dynamic_bytes > size_t(function->dynamic_bytes_max)) {
        *blocks = 0;
        return SUCCESS;
    }
    const int by_threads = THREADS_PER_MULTIPROCESSOR_MAX / threads;
    const size_t shared = dynamic_bytes + function->shared_module_bytes + SHARED_BYTES_RESERVED;
    const int by_shared = int(SHARED_BYTES_PER_MULTIPROCESSOR / shared);
    *blocks = std::min({by_threads, by_shared, BLOCKS_PER_MULTIPROCESSOR_MAX});
    return SUCCESS;
}

API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int threads, size_t bytes) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, bytes, 0);
}

API cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned dynamic_bytes, void* stream, void** values,
                   void** extra) {
    if (extra) return NOT_SUPPORTED;
    return launch(*function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, dynamic_bytes, stream,
                  values);
}
