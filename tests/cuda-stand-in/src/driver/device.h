// Devices and their primary contexts.
#pragma once

#include "context_lock.h"
#include "memory.h"
#include "stream.h"

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace cuda_stand_in {

struct Device {
    int ordinal = 0;
    int retains = 0;            // of the primary context
    std::atomic<int> error{0};  // sticky: all that follows fails with it
    Memory memory;
    std::shared_ptr<Stream> legacy;  // the default stream
    std::vector<std::shared_ptr<Stream>> streams;
    uint64_t streams_created = 0;
    std::map<int, std::set<uint64_t>> queues;  // numbers of operations that have not started
    std::condition_variable queue_moved;
    std::mutex context_mutex;        // held while the primary context changes
    ContextLock context_lock;
    uint64_t release_threshold = 0;  // of the default pool; kept for programs that read it

    // Keeps the first error, and writes it with its cause to stderr.
    void fail(int code, const std::string& cause);
};

constexpr int DEVICES_MAX = 64;

// The device of an ordinal, or null.
Device* device_of(int ordinal);
// The device whose context is current in this host thread, or null.
Device*& current_device();
bool is_context(const void* handle);
// Where an address lies in the memory of a device, for messages.
std::string describe_address(const void* address);
// Keeps a cause as the last one, and writes it to stderr.
void report(const std::string& cause);
// The cause of the last error of any device.
std::string last_failure();
// Forgets it.
void forget_failure();

// Enters the driver, and returns the status of a call that needs a context: no context, an earlier error, or
// success.
int status_of_context(const char* call = __builtin_FUNCTION());
// Enters the driver for a call that has no context of its own, on that of this thread, if it has one.
void enter_current(const char* call);

}  // namespace cuda_stand_in
