// Threads of streams, in the threaded mode.
#include "device.h"
#include "hardware_queue.h"
#include "schedule.h"
#include "settings.h"

#include <algorithm>
#include <cstdio>
#include <pthread.h>
#include <thread>

namespace cuda_stand_in {

namespace {

using Clock = std::chrono::steady_clock;

// A thread without work ends after this time.
constexpr auto IDLE = std::chrono::seconds(1);
// Work that has not ended by then, when its context ends, never will.
constexpr auto END = std::chrono::seconds(5);
constexpr auto PAUSE = std::chrono::milliseconds(20);

thread_local Stream* stream_here = nullptr;

void run_thread(const std::shared_ptr<Stream>& stream) {
    stream_here = stream.get();
    pthread_setname_np(pthread_self(), "cuda-stream");
    std::unique_lock lock(schedule().mutex);
    for (;;) {
        stream->arrived.wait_for(lock, IDLE, [&] {
            return !stream->operations.empty() || !is_threaded() || stream->is_destroyed;
        });
        if (stream->operations.empty() || !is_threaded()) break;
        Operation operation = std::move(stream->operations.front());
        stream->operations.pop_front();
        stream->running = operation.number;
        stream->running_name = operation.name;
        stream->running_waits = !operation.runs_alone;
        lock.unlock();
        run_operation(*stream, operation);
        operation = {};  // what it holds ends before a host thread goes on
        lock.lock();
        stream->running = 0;
        stream->progressed.notify_all();
    }
    stream->has_thread = false;
    stream->progressed.notify_all();
    forget_if_over(stream);
}

bool is_idle(Device& device) {
    std::lock_guard lock(schedule().mutex);
    return std::all_of(device.streams.begin(), device.streams.end(),
                       [](const auto& stream) { return stream->operations.empty() && stream->running == 0; });
}

bool becomes_idle(Device& device, Clock::duration time) {
    const auto end = Clock::now() + time;
    while (!is_idle(device)) {
        if (Clock::now() > end) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
}

// Drops what a device has not run, and ends what it runs.
void drop_all(Device& device) {
    std::deque<Operation> dropped;  // their destructors run without the lock
    std::unique_lock lock(schedule().mutex);
    for (const auto& stream : device.streams) {
        for (Operation& operation : stream->operations) {
            leave_queue(*stream, operation);
            dropped.push_back(std::move(operation));
        }
        stream->operations.clear();
        stream->is_stopped = true;
    }
    lock.unlock();
    while (!is_idle(device)) std::this_thread::sleep_for(PAUSE);
    lock.lock();
    const auto streams = device.streams;
    for (const auto& stream : streams) {
        stream->is_stopped = false;
        forget_if_over(stream);
    }
}

}  // namespace

bool is_ending() { return stream_here && stream_here->is_stopped; }

bool is_stopped() { return is_ending() || (stream_here && stream_here->device->error != 0); }

void wake_thread(const std::shared_ptr<Stream>& stream) {
    if (stream->has_thread) return stream->arrived.notify_all();
    stream->has_thread = true;
    std::thread([stream] { run_thread(stream); }).detach();
}

void end_all(Device& device) {
    if (!is_threaded()) run_all(device);
    else if (!becomes_idle(device, END))
        fprintf(stderr, "cuda stand-in: device %d drops work that does not end\n", device.ordinal);
    drop_all(device);
}

void end_mode() {
    for (int i = 0; Device* device = device_of(i); i++)
        if (!is_idle(*device)) end_all(*device);
}

}  // namespace cuda_stand_in
