// Memory of a device: host memory with guard pages.
//
// A buffer starts at a multiple of 256 bytes and ends less than 256 bytes before a page that is not
// accessible. It lives from the moment at which its stream executes the allocation to that at which its
// stream executes the release; before and after, an access faults. New memory holds 0xff, NaN in every
// format. Bytes count as in use from the call that allocates to the call that releases, as if streams were
// never late.
#pragma once

#include "traffic.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>

namespace cuda_stand_in {

class Memory {
public:
    // Reserves a buffer; 0 if that exceeds `bytes_max` bytes in use.
    uintptr_t reserve(size_t bytes, size_t bytes_max);
    // Makes a reserved buffer accessible; false if it was closed before.
    bool open(uintptr_t buffer);
    // Counts a buffer as released; false if no buffer in use starts there.
    bool release(uintptr_t buffer);
    // Ends a released buffer; false if bytes around it were written.
    bool close(uintptr_t buffer);

    // Whether a buffer that is not yet released holds all these bytes.
    bool is_in_use(uintptr_t address, size_t bytes) const;
    // Whether these bytes can be accessed now.
    bool is_open(uintptr_t address, size_t bytes) const;
    // All buffers that can be accessed now, in the order of their addresses.
    std::vector<AddressRange> open_ranges() const;
    // Where an address lies, for messages; an empty text if no buffer is near.
    std::string describe(uintptr_t address) const;

    size_t bytes_in_use() const { return locked(bytes_in_use_); }
    size_t bytes_highest() const { return locked(bytes_highest_); }
    void reset_highest();
    size_t buffers_in_use() const { return locked(buffers_in_use_); }
    // Ends all buffers; returns how many were in use.
    size_t clear();

private:
    enum class State { Reserved, Open, Closed };
    struct Buffer {
        unsigned char* low;  // the first accessible byte when open
        size_t pages_bytes;  // accessible when open
        size_t bytes;
        State state = State::Reserved;
        bool is_released = false;
    };
    using Buffers = std::map<uintptr_t, Buffer>;

    size_t locked(const size_t& value) const {
        std::lock_guard lock(mutex_);
        return value;
    }
    Buffers::const_iterator find(uintptr_t address, size_t bytes) const;
    unsigned char* map_pages(size_t pages_bytes);
    void unmap_pages(unsigned char* low, size_t pages_bytes);

    mutable std::mutex mutex_;
    Buffers buffers_;
    // Mappings of closed buffers by size, oldest first. They stay inaccessible until they are used again.
    std::map<size_t, std::deque<unsigned char*>> idle_;
    size_t idle_bytes_ = 0;
    size_t bytes_in_use_ = 0, bytes_highest_ = 0, buffers_in_use_ = 0;
};

}  // namespace cuda_stand_in
