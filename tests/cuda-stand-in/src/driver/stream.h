// Streams that run as late as they may.
//
// A call enqueues an operation; nothing runs until a host thread waits for it. Then the stream runs its
// operations in order up to the one that is waited for, and other streams run only as far as events ask for,
// so that a missing wait shows. Operations are numbered in the order of their calls. The legacy stream and
// blocking streams wait for earlier operations of each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
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
    uint64_t number = 0;
};

struct Stream {
    Device* device = nullptr;
    bool is_blocking = true;
    bool is_destroyed = false;
    int priority = 0;
    std::deque<Operation> operations;
    uint64_t enqueued = 0, done = 0;  // numbers of the last operations
};

// Appends an operation to a stream and returns its number. Long queues run early, in part.
uint64_t enqueue(const std::shared_ptr<Stream>& stream, Operation operation);
// Runs a stream until the point is reached.
void run_until(const Point& point);
bool is_reached(const Point& point);
// Tells whether a point is reached; if not, runs one operation behind the answer, so that polling ends.
bool poll(const Point& point);
// The point after all that was enqueued to a stream.
Point end_of(const std::shared_ptr<Stream>& stream);
// Runs all streams of a device.
void run_all(Device& device);
// Drops what a device has not run.
void drop_all(Device& device);

// Handles of streams and events that programs hold.
std::shared_ptr<Stream> create_stream(Device& device, bool is_blocking, int priority);
// The stream of a handle, of the calling thread's device for the default stream; null if there is none.
std::shared_ptr<Stream> stream_of(void* handle);
bool destroy_stream(void* handle);
void* create_event(bool has_time);
std::shared_ptr<Event> event_of(void* handle);
bool destroy_event(void* handle);

// Where an event was last recorded.
Point point_of(const Event& event);
void record(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream);

}  // namespace cuda_stand_in
