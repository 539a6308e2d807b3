#include "hardware_queue.h"

#include "device.h"
#include "schedule.h"
#include "settings.h"

namespace cuda_stand_in {

void join_queue(const Stream& stream, Operation& operation) {
    const uint64_t queues = settings().queues;
    if (queues == 0 || !is_threaded()) return;
    operation.queue = int(stream.created % queues);
    stream.device->queues[operation.queue].insert(operation.number);
}

void leave_queue(const Stream& stream, const Operation& operation) {
    if (operation.queue < 0) return;
    stream.device->queues[operation.queue].erase(operation.number);
    stream.device->queue_moved.notify_all();
}

void take_turn(const Stream& stream, const Operation& operation) {
    if (operation.queue < 0) return;
    constexpr auto PAUSE = std::chrono::milliseconds(50);
    std::unique_lock lock(schedule().mutex);
    const auto& queue = stream.device->queues[operation.queue];
    const auto is_first = [&] { return *queue.begin() >= operation.number; };
    while (!stream.is_stopped && !stream.device->queue_moved.wait_for(lock, PAUSE, is_first)) {
    }
    leave_queue(stream, operation);
}

}  // namespace cuda_stand_in
