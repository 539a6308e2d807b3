#include "context_lock.h"

#include "device.h"
#include "errors.h"
#include "schedule.h"
#include "settings.h"

#include <algorithm>
#include <map>
#include <pthread.h>
#include <thread>

namespace cuda_stand_in {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto PAUSE = std::chrono::microseconds(200);

std::mutex calls_mutex;
auto& calls = *new std::map<std::string, uint64_t>;

std::string name_of_thread() {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    return name;
}

// Waits, in the list of waiters, until no call holds the context.
void wait_for_holder(ContextLock& own, std::unique_lock<std::mutex>& lock, const char* call) {
    if (own.holder.empty()) return;
    const auto at = own.waiters.insert(own.waiters.end(), {name_of_thread(), call});
    own.freed.wait(lock, [&] { return own.holder.empty(); });
    own.waiters.erase(at);
}

// What runs on the streams of a device, and whether all of it waits.
struct Look {
    bool is_done = true, waits = true;
    uint64_t position = 0;  // changes whenever an operation ends
    std::string running;
};

Look look_at(const std::vector<Point>& points) {
    Look look;
    std::lock_guard lock(schedule().mutex);
    for (const Point& point : points) {
        const Stream& stream = *point.stream;
        if (is_reached_locked(point)) continue;
        look.is_done = false;
        look.position += stream.running + stream.operations.size();
        if (stream.running == 0) continue;
        look.waits = look.waits && stream.running_waits;
        look.running += (look.running.empty() ? "" : ", ") + ("stream " + std::to_string(stream.created)) +
                        " runs " + stream.running_name;
    }
    return look;
}

std::string describe_hang(Device& device, const char* call, const std::string& running) {
    std::string text = "device " + std::to_string(device.ordinal) + " hangs: thread " + name_of_thread() +
                       " is in " + call + ", which waits for all work of the context: " + running;
    std::lock_guard lock(device.context_lock.mutex);
    for (const auto& waiter : device.context_lock.waiters)
        text += "; thread " + waiter.thread + " waits in " + waiter.call + " for that call";
    return text;
}

}  // namespace

void enter(Device& device, const char* call) {
    {
        std::lock_guard lock(calls_mutex);
        calls[call]++;
    }
    if (!is_threaded()) return;
    std::unique_lock lock(device.context_lock.mutex);
    wait_for_holder(device.context_lock, lock, call);
}

int synchronize_context(Device& device, const char* call) {
    if (!is_threaded()) return SUCCESS;
    ContextLock& own = device.context_lock;
    {
        std::unique_lock lock(own.mutex);
        wait_for_holder(own, lock, call);
        own.holder = call;
    }
    std::vector<Point> points;
    for (const auto& stream : streams_of(device)) points.push_back(end_of(stream));
    auto moved = Clock::now();
    uint64_t position = 0;
    for (;;) {
        const Look look = look_at(points);
        if (look.is_done) break;
        if (look.position != position || !look.waits) {
            position = look.position;
            moved = Clock::now();
        }
        if (Clock::now() - moved > std::chrono::milliseconds(settings().hang_ms)) {
            device.fail(LAUNCH_TIMEOUT, describe_hang(device, call, look.running));
            break;
        }
        std::this_thread::sleep_for(PAUSE);
    }
    {
        std::lock_guard lock(own.mutex);
        own.holder.clear();
    }
    own.freed.notify_all();
    return device.error;
}

std::string calls_so_far() {
    std::lock_guard lock(calls_mutex);
    std::string text;
    for (const auto& [name, count] : calls) text += name + " " + std::to_string(count) + "\n";
    return text;
}

void forget_calls() {
    std::lock_guard lock(calls_mutex);
    calls.clear();
}

}  // namespace cuda_stand_in
