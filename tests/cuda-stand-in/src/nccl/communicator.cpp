#include "communicator.h"

#include "cuda.h"
#include "local.h"
#include "record.h"

#include <cstdio>

namespace nccl_stand_in {

namespace {

constexpr auto PAUSE = std::chrono::milliseconds(20);

// Counts operations as in flight while it lives.
class InFlight {
public:
    explicit InFlight(size_t operations) : operations_(operations) { counts().begin(operations_); }
    InFlight(const InFlight&) = delete;
    InFlight& operator=(const InFlight&) = delete;
    ~InFlight() { counts().end(operations_); }

private:
    size_t operations_;
};

}  // namespace

Communicator::Communicator(const Place& its_place, std::vector<Socket> sockets) : place(its_place) {
    if (place.ranks > 1)
        engine_ = std::make_unique<Engine>(
            place.rank, std::move(sockets),
            [this](Result result, const std::string& problem) { fail(result, problem); });
    cuEventCreate(&last_event, EVENT_DISABLE_TIMING);
    cuStreamCreate(&device_stream, STREAM_NON_BLOCKING);
    counts().communicators++;
}

Communicator::~Communicator() {
    if (last_event) cuEventDestroy_v2(last_event);
    if (device_stream) cuStreamDestroy_v2(device_stream);
}

int Communicator::run(const std::vector<Task>& tasks, const ChosenFault& fault) {
    if (is_closed()) return CUDA_SUCCESS;
    const InFlight in_flight(tasks.size());
    wait(std::chrono::microseconds(settings().delay_us.load()));
    if (fault.fault == Fault::Lost && engine_) engine_->lose_connections();
    if (fault.fault == Fault::Error) fail(fault.result, "a fault on request");
    if (fault.fault != Fault::None || error_ != SUCCESS) {
        hang();
        return CUDA_SUCCESS;
    }
    for (const Task& task : tasks) {
        if (are_buffers_open(task, place.rank, place.ranks)) continue;
        const std::string problem = task.text() + ": a buffer does not live when the stream runs it";
        fail(UNHANDLED_CUDA_ERROR, problem);
        cuda_stand_in_fail_device(place.device, CUDA_ILLEGAL_ADDRESS, problem.c_str());
        return CUDA_ILLEGAL_ADDRESS;
    }
    poison_receives(tasks, place.rank, place.ranks);
    const std::vector<Task> others = run_own_part(tasks, place.rank, place.ranks);
    if (others.empty()) return CUDA_SUCCESS;
    if (engine_->run(others) == Engine::End::Stopped)
        fail(UNHANDLED_CUDA_ERROR, "the device of this rank has failed, or its context has ended");
    return CUDA_SUCCESS;
}

void Communicator::finish() {
    if (last_event) cuda_stand_in_finish_event(last_event);
}

void Communicator::close(bool says_farewell) {
    {
        std::lock_guard lock(mutex_);
        if (!is_closed_) counts().communicators--;
        is_closed_ = true;
        closed_.notify_all();
    }
    if (engine_) engine_->close(says_farewell);
}

std::vector<Frame> Communicator::exchange_splits(const Frame& own, Deadline deadline) {
    return engine_ ? engine_->exchange_splits(own, deadline) : std::vector<Frame>{own};
}

void Communicator::fail(Result result, const std::string& problem) {
    std::lock_guard lock(mutex_);
    if (error_ != SUCCESS) return;
    problem_ = problem;
    error_ = result;
    fprintf(stderr, "nccl stand-in: rank %d: %s\n", place.rank, problem.c_str());
}

bool Communicator::is_closed() const {
    std::lock_guard lock(mutex_);
    return is_closed_;
}

std::string Communicator::problem() const {
    std::lock_guard lock(mutex_);
    return problem_;
}

bool Communicator::claim() {
    std::thread::id none{};
    const auto own = std::this_thread::get_id();
    return caller_.compare_exchange_strong(none, own) || none == own;
}

void Communicator::hang() {
    std::unique_lock lock(mutex_);
    while (!closed_.wait_for(lock, PAUSE, [this] { return is_closed_; }))
        if (cuda_stand_in_is_stopped()) return;
}

void Communicator::wait(std::chrono::microseconds time) {
    std::unique_lock lock(mutex_);
    if (time.count() > 0) closed_.wait_for(lock, time, [this] { return is_closed_; });
}

bool Communicator::answers_later() {
    constexpr uint64_t EVERY = 3;
    if (is_blocking || calls_++ % EVERY != 0) return false;
    looks_ = 2;
    return true;
}

bool Communicator::is_answering() {
    int looks = looks_;
    while (looks > 0 && !looks_.compare_exchange_weak(looks, looks - 1)) {
    }
    return looks > 0;
}

}  // namespace nccl_stand_in
