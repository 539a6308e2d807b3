#include "launch.h"

#include "faults.h"
#include "settings.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <thread>

namespace cuda_stand_in {

namespace {

// Workers keep their stacks from launch to launch.
class Workers {
public:
    std::unique_ptr<Worker> take() {
        std::lock_guard lock(mutex_);
        if (idle_.empty()) return std::make_unique<Worker>();
        std::unique_ptr<Worker> worker = std::move(idle_.back());
        idle_.pop_back();
        return worker;
    }
    void give_back(std::unique_ptr<Worker> worker) {
        std::lock_guard lock(mutex_);
        idle_.push_back(std::move(worker));
    }

private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Worker>> idle_;
};

}  // namespace

Fault run_launch(const Launch& launch) {
    static auto& workers = *new Workers;
    catch_faults();
    std::atomic<size_t> next{0};
    Fault fault;
    std::mutex fault_mutex;
    const auto run = [&] {
        std::unique_ptr<Worker> worker = workers.take();
        Fault own = worker->run(launch, next);
        counts().bytes_loaded += worker->traffic().loaded();
        counts().bytes_stored += worker->traffic().stored();
        workers.give_back(std::move(worker));
        std::lock_guard lock(fault_mutex);
        if (own.error && !fault.error) fault = std::move(own);
    };
    const size_t count = std::clamp<size_t>(settings().workers, 1, launch.blocks());
    std::vector<std::thread> others;
    for (size_t i = 1; i < count; i++) others.emplace_back(run);
    run();
    for (std::thread& other : others) other.join();
    return fault;
}

}  // namespace cuda_stand_in
