#include "schedule.h"

#include "device.h"
#include "hardware_queue.h"
#include "settings.h"

#include <algorithm>
#include <cstdio>

namespace cuda_stand_in {

namespace {

// More operations than this in one stream run early: each may hold a mapping of memory.
constexpr size_t OPERATIONS_MAX = 8192;

// Takes the oldest operation of a stream if its number is at most `number`.
bool take(Stream& stream, uint64_t number, Operation& operation) {
    std::lock_guard lock(schedule().mutex);
    if (stream.operations.empty() || stream.operations.front().number > number) return false;
    operation = std::move(stream.operations.front());
    stream.operations.pop_front();
    stream.running = operation.number;
    return true;
}

void run_here(const std::shared_ptr<Stream>& stream, Operation& operation) {
    run_operation(*stream, operation);
    operation = {};  // what it holds ends without the lock
    std::lock_guard lock(schedule().mutex);
    stream->running = 0;
    stream->progressed.notify_all();
}

// Waits for the thread of a stream, which gets one if it may. False if the stream has no thread.
bool wait_for_thread(const Point& point) {
    Stream& stream = *point.stream;
    std::unique_lock lock(schedule().mutex);
    if (is_threaded() && !is_reached_locked(point)) wake_thread(point.stream);
    if (!stream.has_thread) return is_reached_locked(point);
    // A stream whose own operation waits here may be stopped.
    constexpr auto PAUSE = std::chrono::milliseconds(50);
    const auto is_over = [&] { return is_reached_locked(point) || !stream.has_thread; };
    while (!stream.progressed.wait_for(lock, PAUSE, is_over)) {
        lock.unlock();
        if (is_ending()) return true;
        lock.lock();
    }
    return is_reached_locked(point);
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

}  // namespace

Schedule& schedule() {
    static auto& shared = *new Schedule;
    return shared;
}

bool is_threaded() { return settings().stream_threads != 0; }

bool is_reached_locked(const Point& point) {
    const Stream& stream = *point.stream;
    if (stream.running != 0 && stream.running <= point.number) return false;
    return stream.operations.empty() || stream.operations.front().number > point.number;
}

std::vector<std::shared_ptr<Stream>> streams_of(Device& device) {
    std::lock_guard lock(schedule().mutex);
    return device.streams;
}

void forget_if_over(const std::shared_ptr<Stream>& stream) {
    if (stream->is_destroyed && stream->operations.empty() && stream->running == 0)
        std::erase(stream->device->streams, stream);
}

void run_operation(Stream& stream, const Operation& operation) {
    run_implicit_waits(stream, operation.number);
    if (operation.waits_for.stream) run_until(operation.waits_for);
    take_turn(stream, operation);
    Device& device = *stream.device;
    if (!operation.run || (device.error != 0 && !operation.runs_after_errors)) return;
    if (settings().logs)
        fprintf(stderr, "cuda stand-in: stream %p runs %s\n", static_cast<void*>(&stream),
                operation.name.c_str());
    std::unique_lock running(schedule().running, std::defer_lock);
    if (operation.runs_alone) running.lock();
    if (const int error = operation.run()) device.fail(error, operation.name);
}

uint64_t enqueue(const std::shared_ptr<Stream>& stream, Operation operation) {
    Point early;
    uint64_t number;
    {
        std::lock_guard lock(schedule().mutex);
        number = operation.number = ++schedule().last_number;
        join_queue(*stream, operation);
        stream->operations.push_back(std::move(operation));
        stream->enqueued = number;
        if (is_threaded() || stream->has_thread) wake_thread(stream);
        if (stream->operations.size() > OPERATIONS_MAX)
            early = {stream, stream->operations[OPERATIONS_MAX / 2].number};
    }
    run_until(early);
    return number;
}

void run_until(const Point& point) {
    if (!point.stream || wait_for_thread(point)) return;
    std::lock_guard running(schedule().running);
    Operation operation;
    while (take(*point.stream, point.number, operation)) run_here(point.stream, operation);
}

bool is_reached(const Point& point) {
    if (!point.stream) return true;
    std::lock_guard lock(schedule().mutex);
    return is_reached_locked(point);
}

bool poll(const Point& point) {
    if (is_reached(point)) return true;
    if (is_threaded()) {
        std::lock_guard lock(schedule().mutex);
        wake_thread(point.stream);
        return false;
    }
    std::lock_guard running(schedule().running);
    Operation operation;
    if (take(*point.stream, point.number, operation)) run_here(point.stream, operation);
    return false;
}

Point end_of(const std::shared_ptr<Stream>& stream) {
    std::lock_guard lock(schedule().mutex);
    return {stream, stream->enqueued};
}

void run_all(Device& device) {
    for (const auto& stream : streams_of(device)) {
        run_until(end_of(stream));
        std::lock_guard lock(schedule().mutex);
        forget_if_over(stream);
    }
}

}  // namespace cuda_stand_in
