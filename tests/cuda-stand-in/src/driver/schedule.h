// Decides when the operations of streams run.
//
// In the lazy mode, the default, streams run as late as they may: nothing runs until a host thread waits for
// it. Then the stream runs its operations in order up to the one that is waited for, and other streams run
// only as far as events ask for, so that a missing wait shows.
//
// In the threaded mode each stream has a thread of its own, from its first operation until it is idle for
// long, which runs operations as soon as it may. Only this lets operations of two streams wait for each
// other, as those of a communication library do. Operations that compute still run one at a time.
#pragma once

#include "stream.h"

#include <map>
#include <mutex>
#include <vector>

namespace cuda_stand_in {

// Appends an operation to a stream and returns its number. Long queues run early, in part.
uint64_t enqueue(const std::shared_ptr<Stream>& stream, Operation operation);
// Runs a stream, or waits for its thread, until the point is reached.
void run_until(const Point& point);
bool is_reached(const Point& point);
// Tells whether a point is reached; if not, a lazy stream runs one operation behind the answer, so that
// polling ends.
bool poll(const Point& point);
// The point after all that was enqueued to a stream.
Point end_of(const std::shared_ptr<Stream>& stream);
// Runs all streams of a device.
void run_all(Device& device);
// Runs all streams of a device, and drops what does not end by itself.
void end_all(Device& device);
// Ends the work of all devices, so that the mode can change.
void end_mode();
// Whether this host thread runs a stream whose context ends.
bool is_ending();
// Whether the operation that this host thread runs shall end: its context ends, or its device has failed.
bool is_stopped();

// What scheduling shares. It is never destroyed: threads may run while the process ends.
struct Schedule {
    std::mutex mutex;              // guards queues, numbers and handles; held for short
    std::recursive_mutex running;  // held while an operation computes
    uint64_t last_number = 0;
    std::map<void*, std::shared_ptr<Stream>> streams;
    std::map<void*, std::shared_ptr<Event>> events;
};

Schedule& schedule();

// Whether streams have threads.
bool is_threaded();
// Whether a point is reached, with the lock of the schedule held.
bool is_reached_locked(const Point& point);
std::vector<std::shared_ptr<Stream>> streams_of(Device& device);
// Forgets a destroyed stream that has nothing left to run, with the lock of the schedule held.
void forget_if_over(const std::shared_ptr<Stream>& stream);
// Runs an operation once those are done that it waits for.
void run_operation(Stream& stream, const Operation& operation);
// Gives a stream its thread, or wakes it, with the lock of the schedule held.
void wake_thread(const std::shared_ptr<Stream>& stream);

}  // namespace cuda_stand_in
