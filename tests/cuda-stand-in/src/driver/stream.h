// Streams and events.
//
// A call enqueues an operation. Operations are numbered in the order of their calls. The legacy stream and
// blocking streams wait for earlier operations of each other. `schedule.h` decides when operations run.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>

namespace cuda_stand_in {

struct Device;
struct Stream;

// A point in a stream: the operation of this number, and all before it, have run.
struct Point {
    std::shared_ptr<Stream> stream;  // null: nowhere, always reached
    uint64_t number = 0;
};

struct Event {
    bool has_time = true;
    Point recorded;
    std::chrono::steady_clock::time_point time;  // at which the record ran
};

struct Operation {
    std::string name;
    std::function<int()> run;  // returns an error code of the driver
    Point waits_for;
    bool runs_after_errors = false;  // once the device has failed, other operations are skipped
    bool runs_alone = true;          // no other operation of any device computes meanwhile
    uint64_t number = 0;
    int queue = -1;  // of the device, if streams share queues
};

struct Stream {
    Device* device = nullptr;
    bool is_blocking = true;
    bool is_destroyed = false;
    int priority = 0;
    uint64_t created = 0;  // streams of the device before this one
    std::deque<Operation> operations;
    uint64_t enqueued = 0, running = 0;  // the number of the last operation, and of the one that runs
    std::string running_name;
    bool running_waits = false;  // for work of other streams

    bool has_thread = false;
    std::atomic<bool> is_stopped{false};  // running operations shall end
    std::condition_variable arrived;      // an operation, a change of mode, or the end
    std::condition_variable progressed;   // an operation has ended, or the thread
};

// Handles of streams and events that programs hold.
std::shared_ptr<Stream> create_stream(Device& device, bool is_blocking, int priority);
// The stream of a handle, of the calling thread's device for the default stream; null if there is none.
std::shared_ptr<Stream> stream_of(void* handle);
// What was enqueued still runs.
bool destroy_stream(void* handle);
void* create_event(bool has_time);
std::shared_ptr<Event> event_of(void* handle);
bool destroy_event(void* handle);

// Where an event was last recorded.
Point point_of(const Event& event);
void record(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream);
// Milliseconds between two events that are reached.
float elapsed_milliseconds(const Event& start, const Event& end);

}  // namespace cuda_stand_in
