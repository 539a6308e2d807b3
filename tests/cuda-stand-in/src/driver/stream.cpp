#include "stream.h"

#include "device.h"
#include "schedule.h"

#include <algorithm>

namespace cuda_stand_in {

std::shared_ptr<Stream> create_stream(Device& device, bool is_blocking, int priority) {
    auto stream = std::make_shared<Stream>();
    stream->device = &device;
    stream->is_blocking = is_blocking;
    stream->priority = priority;
    std::lock_guard lock(schedule().mutex);
    stream->created = device.streams_created++;
    device.streams.push_back(stream);
    schedule().streams[stream.get()] = stream;
    return stream;
}

std::shared_ptr<Stream> stream_of(void* handle) {
    constexpr uintptr_t DEFAULT_HANDLES = 2;  // 0, the legacy stream, the stream of a thread
    if (reinterpret_cast<uintptr_t>(handle) <= DEFAULT_HANDLES)
        return current_device() ? current_device()->legacy : nullptr;
    std::lock_guard lock(schedule().mutex);
    const auto found = schedule().streams.find(handle);
    return found == schedule().streams.end() ? nullptr : found->second;
}

bool destroy_stream(void* handle) {
    std::lock_guard lock(schedule().mutex);
    const auto found = schedule().streams.find(handle);
    if (found == schedule().streams.end()) return false;
    const std::shared_ptr<Stream> stream = found->second;
    schedule().streams.erase(found);
    stream->is_destroyed = true;
    stream->arrived.notify_all();
    forget_if_over(stream);
    return true;
}

void* create_event(bool has_time) {
    auto event = std::make_shared<Event>();
    event->has_time = has_time;
    std::lock_guard lock(schedule().mutex);
    schedule().events[event.get()] = event;
    return event.get();
}

std::shared_ptr<Event> event_of(void* handle) {
    std::lock_guard lock(schedule().mutex);
    const auto found = schedule().events.find(handle);
    return found == schedule().events.end() ? nullptr : found->second;
}

bool destroy_event(void* handle) {
    std::lock_guard lock(schedule().mutex);
    return schedule().events.erase(handle) > 0;
}

Point point_of(const Event& event) {
    std::lock_guard lock(schedule().mutex);
    return event.recorded;
}

void record(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream) {
    Operation operation;
    operation.name = "event record";
    operation.runs_after_errors = true;
    operation.runs_alone = false;
    operation.run = [event] {
        std::lock_guard lock(schedule().mutex);
        event->time = std::chrono::steady_clock::now();
        return 0;
    };
    const uint64_t number = enqueue(stream, std::move(operation));
    std::lock_guard lock(schedule().mutex);
    event->recorded = {stream, number};
}

float elapsed_milliseconds(const Event& start, const Event& end) {
    std::lock_guard lock(schedule().mutex);
    return std::chrono::duration<float, std::milli>(end.time - start.time).count();
}

}  // namespace cuda_stand_in
