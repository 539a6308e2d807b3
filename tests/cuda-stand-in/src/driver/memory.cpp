#include "memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

namespace cuda_stand_in {

namespace {

constexpr size_t PAGE = 4096, ALIGNMENT = 256;
constexpr int POISON = 0xff;
// Closed mappings of one size wait until this many are idle, so that a use after the release faults.
constexpr size_t IDLE_MIN = 4;
constexpr size_t IDLE_BYTES_MAX = 256 << 20;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

bool is_poison(const unsigned char* from, const unsigned char* to) {
    // Every byte is as the one before it.
    return from == to || (*from == POISON && memcmp(from, from + 1, size_t(to - from) - 1) == 0);
}

}  // namespace

uintptr_t Memory::reserve(size_t bytes, size_t bytes_max) {
    std::lock_guard lock(mutex_);
    if (bytes > bytes_max || bytes_in_use_ > bytes_max - bytes) return 0;
    const size_t pages_bytes = round_up(bytes, PAGE);
    unsigned char* low = map_pages(pages_bytes);
    if (!low) return 0;
    const auto start = reinterpret_cast<uintptr_t>(low) + pages_bytes - round_up(bytes, ALIGNMENT);
    buffers_[start] = {low, pages_bytes, bytes};
    bytes_in_use_ += bytes;
    bytes_highest_ = std::max(bytes_highest_, bytes_in_use_);
    buffers_in_use_++;
    return start;
}

bool Memory::open(uintptr_t buffer) {
    std::lock_guard lock(mutex_);
    const auto at = buffers_.find(buffer);
    if (at == buffers_.end()) return false;
    Buffer& found = at->second;
    if (mprotect(found.low, found.pages_bytes, PROT_READ | PROT_WRITE) != 0) {
        perror("cuda stand-in: memory of a buffer");
        abort();
    }
    memset(found.low, POISON, found.pages_bytes);
    found.state = State::Open;
    return true;
}

bool Memory::release(uintptr_t buffer) {
    std::lock_guard lock(mutex_);
    const auto found = buffers_.find(buffer);
    if (found == buffers_.end() || found->second.is_released) return false;
    found->second.is_released = true;
    bytes_in_use_ -= found->second.bytes;
    buffers_in_use_--;
    return true;
}

bool Memory::close(uintptr_t buffer) {
    std::lock_guard lock(mutex_);
    const auto found = buffers_.find(buffer);
    if (found == buffers_.end()) return true;
    const Buffer closed = found->second;
    const auto* start = reinterpret_cast<const unsigned char*>(buffer);
    const bool is_intact =
        closed.state != State::Open ||
        (is_poison(closed.low, start) && is_poison(start + closed.bytes, closed.low + closed.pages_bytes));
    buffers_.erase(found);
    mprotect(closed.low, closed.pages_bytes, PROT_NONE);
    idle_[closed.pages_bytes].push_back(closed.low);
    idle_bytes_ += closed.pages_bytes;
    while (idle_bytes_ > IDLE_BYTES_MAX) {
        // The largest mappings go first.
        auto largest = std::prev(idle_.end());
        unmap_pages(largest->second.front(), largest->first);
        idle_bytes_ -= largest->first;
        largest->second.pop_front();
        if (largest->second.empty()) idle_.erase(largest);
    }
    return is_intact;
}

Memory::Buffers::const_iterator Memory::find(uintptr_t address, size_t bytes) const {
    auto found = buffers_.upper_bound(address);
    if (found == buffers_.begin()) return buffers_.end();
    --found;
    const uintptr_t end = found->first + found->second.bytes;
    return address <= end && bytes <= end - address ? found : buffers_.end();
}

bool Memory::is_in_use(uintptr_t address, size_t bytes) const {
    std::lock_guard lock(mutex_);
    const auto found = find(address, bytes);
    return found != buffers_.end() && !found->second.is_released;
}

bool Memory::is_open(uintptr_t address, size_t bytes) const {
    std::lock_guard lock(mutex_);
    const auto found = find(address, bytes);
    return found != buffers_.end() && found->second.state == State::Open;
}

std::vector<AddressRange> Memory::open_ranges() const {
    std::lock_guard lock(mutex_);
    std::vector<AddressRange> ranges;
    for (const auto& [start, buffer] : buffers_)
        if (buffer.state == State::Open) ranges.push_back({start, start + buffer.bytes});
    return ranges;
}

std::string Memory::describe(uintptr_t address) const {
    std::lock_guard lock(mutex_);
    for (const auto& [start, buffer] : buffers_) {
        const auto low = reinterpret_cast<uintptr_t>(buffer.low), end = start + buffer.bytes;
        if (address < low - PAGE || address >= low + buffer.pages_bytes + PAGE) continue;
        const std::string name = "a buffer of " + std::to_string(buffer.bytes) + " bytes";
        if (address < start) return std::to_string(start - address) + " bytes before " + name;
        if (address >= end) return std::to_string(address - end) + " bytes behind the end of " + name;
        return "in " + name + (buffer.state == State::Open ? "" : " that its stream has not allocated yet");
    }
    return {};
}

void Memory::reset_highest() {
    std::lock_guard lock(mutex_);
    bytes_highest_ = bytes_in_use_;
}

size_t Memory::clear() {
    std::lock_guard lock(mutex_);
    const size_t in_use = buffers_in_use_;
    for (const auto& [start, buffer] : buffers_) unmap_pages(buffer.low, buffer.pages_bytes);
    buffers_.clear();
    bytes_in_use_ = bytes_highest_ = buffers_in_use_ = 0;
    return in_use;
}

unsigned char* Memory::map_pages(size_t pages_bytes) {
    const auto idle = idle_.find(pages_bytes);
    if (idle != idle_.end() && idle->second.size() >= IDLE_MIN) {
        unsigned char* low = idle->second.front();
        idle->second.pop_front();
        idle_bytes_ -= pages_bytes;
        return low;
    }
    void* mapping =
        mmap(nullptr, pages_bytes + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return mapping == MAP_FAILED ? nullptr : static_cast<unsigned char*>(mapping) + PAGE;
}

void Memory::unmap_pages(unsigned char* low, size_t pages_bytes) {
    munmap(low - PAGE, pages_bytes + 2 * PAGE);
}

}  // namespace cuda_stand_in
