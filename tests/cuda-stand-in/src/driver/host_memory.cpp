#include "host_memory.h"

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>

namespace cuda_stand_in {

namespace {
std::mutex mutex;
// Bytes by address. Never destroyed: threads of streams may copy while the process ends.
auto& page_locked = *new std::map<uintptr_t, size_t>;
}  // namespace

void* allocate_page_locked(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    memset(memory, 0xff, bytes);
    std::lock_guard lock(mutex);
    page_locked[reinterpret_cast<uintptr_t>(memory)] = bytes;
    return memory;
}

bool free_page_locked(void* memory) {
    std::lock_guard lock(mutex);
    const auto found = page_locked.find(reinterpret_cast<uintptr_t>(memory));
    if (found == page_locked.end()) return false;
    munmap(memory, found->second);
    page_locked.erase(found);
    return true;
}

bool is_page_locked(const void* memory, size_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    std::lock_guard lock(mutex);
    auto found = page_locked.upper_bound(address);
    if (found == page_locked.begin()) return false;
    --found;
    return address - found->first <= found->second && bytes <= found->second - (address - found->first);
}

}  // namespace cuda_stand_in
