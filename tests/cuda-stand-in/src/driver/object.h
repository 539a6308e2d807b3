// Compiled kernels: a shared object behind a header, in one image.
#pragma once

#include "../execution/thread.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace cuda_stand_in {

// How the compiler library begins an image. The shared object follows.
struct ImageHeader {
    char magic[8];
    uint64_t bytes;  // of the shared object
    uint64_t digest;
};

constexpr char IMAGE_MAGIC[8] = {'C', 'U', 'D', 'A', 'S', 'I', '0', '1'};

inline uint64_t digest_of(const void* text, size_t bytes, uint64_t digest = 0xcbf29ce484222325u) {
    const auto* at = static_cast<const unsigned char*>(text);
    for (size_t i = 0; i < bytes; i++) digest = (digest ^ at[i]) * 0x100000001b3u;
    return digest;
}

struct Function {
    const Kernel* kernel;
    size_t shared_module;        // of the thread-local storage that holds static shared memory
    size_t shared_module_bytes;  // of all kernels of the object
    int dynamic_bytes_max;       // that a launch may ask for
};

// A loaded object and its functions.
class Module {
public:
    // Returns an error code of the driver.
    static int load(const void* image, std::unique_ptr<Module>* module);

    // The function of a kernel, or null.
    Function* function(const std::string& name);

private:
    void* library_ = nullptr;
    size_t shared_module_ = 0, shared_module_bytes_ = 0;
    std::mutex mutex_;
    std::map<std::string, std::unique_ptr<Function>> functions_;
};

}  // namespace cuda_stand_in
