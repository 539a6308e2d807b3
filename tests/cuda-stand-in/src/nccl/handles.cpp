#include "handles.h"

#include <map>
#include <mutex>

namespace nccl_stand_in {

namespace {

// Never destroyed: threads of streams may run while the process ends.
struct Handles {
    std::mutex mutex;
    uintptr_t last = 0;
    std::map<void*, std::shared_ptr<Communicator>> all;
    std::map<void*, Making> making;

    // A handle is never used again, so that the use of one that has ended shows.
    void* next() { return reinterpret_cast<void*>(last += 64); }
};

Handles& handles() {
    static auto& shared = *new Handles;
    return shared;
}

}  // namespace

void* add_communicator(std::shared_ptr<Communicator> communicator) {
    std::lock_guard lock(handles().mutex);
    void* handle = handles().next();
    handles().all[handle] = std::move(communicator);
    return handle;
}

std::shared_ptr<Communicator> communicator_of(void* handle) {
    std::lock_guard lock(handles().mutex);
    const auto found = handles().all.find(handle);
    return found == handles().all.end() ? nullptr : found->second;
}

std::shared_ptr<Communicator> remove_communicator(void* handle) {
    std::lock_guard lock(handles().mutex);
    const auto found = handles().all.find(handle);
    if (found == handles().all.end()) return nullptr;
    const auto communicator = found->second;
    handles().all.erase(found);
    return communicator;
}

void* reserve_handle() {
    std::lock_guard lock(handles().mutex);
    void* handle = handles().next();
    handles().making[handle] = {};
    return handle;
}

void complete_handle(void* handle, std::shared_ptr<Communicator> communicator) {
    {
        std::lock_guard lock(handles().mutex);
        if (handles().making.erase(handle) > 0) {
            handles().all[handle] = std::move(communicator);
            return;
        }
    }
    communicator->close(false);
}

void fail_handle(void* handle, const Making& making) {
    std::lock_guard lock(handles().mutex);
    const auto found = handles().making.find(handle);
    if (found != handles().making.end()) found->second = making;
}

bool find_making(void* handle, Making* making) {
    std::lock_guard lock(handles().mutex);
    const auto found = handles().making.find(handle);
    if (found == handles().making.end()) return false;
    *making = found->second;
    return true;
}

bool give_up_handle(void* handle) {
    std::lock_guard lock(handles().mutex);
    return handles().making.erase(handle) > 0;
}

}  // namespace nccl_stand_in
