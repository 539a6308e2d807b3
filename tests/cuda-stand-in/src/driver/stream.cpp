#include "stream.h"

#include "device.h"
#include "settings.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <vector>

namespace cuda_stand_in {

namespace {

// More operations than this in one stream run early: each may hold a mapping of memory.
constexpr size_t OPERATIONS_MAX = 8192;

std::mutex state_mutex;          // guards queues, numbers and handles; held for short
std::recursive_mutex run_mutex;  // held by the host thread that runs operations
uint64_t last_number = 0;
std::map<void*, std::shared_ptr<Stream>> streams;
std::map<void*, std::shared_ptr<Event>> events;

// Takes the oldest operation of a stream if its number is at most `number`.
bool take(Stream& stream, uint64_t number, Operation& operation) {
    std::lock_guard lock(state_mutex);
    if (stream.operations.empty() || stream.operations.front().number > number) return false;
    operation = std::move(stream.operations.front());
    stream.operations.pop_front();
    return true;
}

std::vector<std::shared_ptr<Stream>> streams_of(Device& device) {
    std::lock_guard lock(state_mutex);
    return device.streams;
}

// Runs what the default stream and blocking streams must have done before an operation.
void run_implicit_waits(const Stream& stream, uint64_t number) {
    Device& device = *stream.device;
    if (&stream != device.legacy.get()) {
        if (stream.is_blocking) run_until({device.legacy, number - 1});
        return;
    }
    for (const auto& other : streams_of(device))
        if (other->is_blocking && other != device.legacy) run_until({other, number - 1});
}

void run_operation(Stream& stream, const Operation& operation) {
    run_implicit_waits(stream, operation.number);
    if (operation.waits_for.stream) run_until(operation.waits_for);
    Device& device = *stream.device;
    if (operation.run && (device.error == 0 || operation.runs_after_errors)) {
        if (settings().logs)
            fprintf(stderr, "cuda stand-in: stream %p runs %s\n", static_cast<void*>(&stream),
                    operation.name.c_str());
        if (const int error = operation.run()) device.fail(error, operation.name);
    }
    std::lock_guard lock(state_mutex);
    stream.done = operation.number;
}

}  // namespace

uint64_t enqueue(const std::shared_ptr<Stream>& stream, Operation operation) {
    Point early;
    uint64_t number;
    {
        std::lock_guard lock(state_mutex);
        number = operation.number = ++last_number;
        stream->operations.push_back(std::move(operation));
        stream->enqueued = number;
        if (stream->operations.size() > OPERATIONS_MAX)
            early = {stream, stream->operations[OPERATIONS_MAX / 2].number};
    }
    run_until(early);
    return number;
}

void run_until(const Point& point) {
    if (!point.stream || is_reached(point)) return;
    std::lock_guard running(run_mutex);
    Operation operation;
    while (take(*point.stream, point.number, operation)) run_operation(*point.stream, operation);
}

bool is_reached(const Point& point) {
    if (!point.stream) return true;
    std::lock_guard lock(state_mutex);
    return point.stream->done >= std::min(point.number, point.stream->enqueued);
}

bool poll(const Point& point) {
    if (is_reached(point)) return true;
    std::lock_guard running(run_mutex);
    Operation operation;
    if (take(*point.stream, point.number, operation)) run_operation(*point.stream, operation);
    return false;
}

Point end_of(const std::shared_ptr<Stream>& stream) {
    std::lock_guard lock(state_mutex);
    return {stream, stream->enqueued};
}

void run_all(Device& device) {
    for (const auto& stream : streams_of(device)) run_until(end_of(stream));
    std::lock_guard lock(state_mutex);
    std::erase_if(device.streams,
                  [](const auto& stream) { return stream->is_destroyed && stream->operations.empty(); });
}

void drop_all(Device& device) {
    std::lock_guard running(run_mutex);
    std::deque<Operation> dropped;  // their destructors run without the lock
    std::lock_guard lock(state_mutex);
    for (const auto& stream : device.streams) {
        for (Operation& operation : stream->operations) dropped.push_back(std::move(operation));
        stream->operations.clear();
        stream->done = stream->enqueued;
    }
    std::erase_if(device.streams, [](const auto& stream) { return stream->is_destroyed; });
}

std::shared_ptr<Stream> create_stream(Device& device, bool is_blocking, int priority) {
    auto stream = std::make_shared<Stream>();
    stream->device = &device;
    stream->is_blocking = is_blocking;
    stream->priority = priority;
    std::lock_guard lock(state_mutex);
    device.streams.push_back(stream);
    streams[stream.get()] = stream;
    return stream;
}

std::shared_ptr<Stream> stream_of(void* handle) {
    constexpr uintptr_t DEFAULT_HANDLES = 2;  // 0, the legacy stream, the stream of a thread
    if (reinterpret_cast<uintptr_t>(handle) <= DEFAULT_HANDLES)
        return current_device() ? current_device()->legacy : nullptr;
    std::lock_guard lock(state_mutex);
    const auto found = streams.find(handle);
    return found == streams.end() ? nullptr : found->second;
}

bool destroy_stream(void* handle) {
    std::lock_guard lock(state_mutex);
    const auto found = streams.find(handle);
    if (found == streams.end()) return false;
    const std::shared_ptr<Stream> stream = found->second;
    stream->is_destroyed = true;
    if (stream->operations.empty()) std::erase(stream->device->streams, stream);
    streams.erase(found);
    return true;
}

void* create_event(bool has_time) {
    auto event = std::make_shared<Event>();
    event->has_time = has_time;
    std::lock_guard lock(state_mutex);
    events[event.get()] = event;
    return event.get();
}

std::shared_ptr<Event> event_of(void* handle) {
    std::lock_guard lock(state_mutex);
    const auto found = events.find(handle);
    return found == events.end() ? nullptr : found->second;
}

bool destroy_event(void* handle) {
    std::lock_guard lock(state_mutex);
    return events.erase(handle) > 0;
}

Point point_of(const Event& event) {
    std::lock_guard lock(state_mutex);
    return event.recorded;
}

void record(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream) {
    Operation operation;
    operation.name = "event record";
    operation.runs_after_errors = true;
    operation.run = [event] {
        event->time = std::chrono::steady_clock::now();
        return 0;
    };
    const uint64_t number = enqueue(stream, std::move(operation));
    std::lock_guard lock(state_mutex);
    event->recorded = {stream, number};
}

}  // namespace cuda_stand_in
