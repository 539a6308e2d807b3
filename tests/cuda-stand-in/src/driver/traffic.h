// Bytes that kernels load from buffers and store to buffers, where the compiler library has them counted.
//
// The compiler calls a function at each access to memory that is left after its optimizations; there is no
// cache: what threads load twice counts twice. Shared memory and variables of threads do not count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace cuda_stand_in {

// Addresses of a buffer, from its first byte to the one behind its last.
struct AddressRange {
    uintptr_t begin, end;
};

// What one worker counts of a launch.
class Traffic {
public:
    // Counts accesses to these buffers, which are in the order of their addresses.
    explicit Traffic(std::vector<AddressRange> buffers = {}) : buffers_(std::move(buffers)) {}
    void load(const void* address, size_t bytes) { loaded_ += in_buffer(address) ? bytes : 0; }
    void store(const void* address, size_t bytes) { stored_ += in_buffer(address) ? bytes : 0; }
    uint64_t loaded() const { return loaded_; }
    uint64_t stored() const { return stored_; }

private:
    bool in_buffer(const void* address);

    std::vector<AddressRange> buffers_;
    size_t last_ = 0;  // buffer of the last access
    uint64_t loaded_ = 0, stored_ = 0;
};

}  // namespace cuda_stand_in
