// Communicators, as one rank sees them.
#pragma once

#include "engine.h"
#include "settings.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace nccl_stand_in {

class Communicator {
public:
    struct Place {
        uint64_t id;  // that all ranks have in common
        int rank, ranks;
        int first_rank;  // in the communicator that was made of a unique id
        int device;
        void* context;
    };

    // Takes a socket for each other rank; none if there is none.
    Communicator(const Place& place, std::vector<Socket> sockets);
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;
    ~Communicator();

    const Place place;

    // Runs operations on the thread of a stream. Returns an error code of the driver.
    int run(const std::vector<Task>& tasks, const ChosenFault& fault);
    // Waits until all that was launched has ended.
    void finish();
    // Ends the communicator, after or without a farewell to the other ranks.
    void close(bool says_farewell);
    // Exchanges what ranks bring to a split; an empty list if that fails.
    std::vector<Frame> exchange_splits(const Frame& own, Deadline deadline);
    uint64_t next_split() { return splits_++; }

    // Keeps the first asynchronous error.
    void fail(Result result, const std::string& problem);
    Result error() const { return error_; }
    std::string problem() const;

    // Claims the communicator for calls of this host thread; false while another one has it.
    bool claim();
    void give_up() { caller_ = std::thread::id(); }

    // Whether a call of this communicator, which must not block, answers that it is in progress: every third.
    bool answers_later();
    // Whether the last such call is still in progress, which a few looks end.
    bool is_answering();

    std::atomic<bool> is_finalized{false};
    std::atomic<bool> is_blocking{true};
    std::atomic<bool> is_splitting{false};  // a split that must not block goes on
    void* last_event = nullptr;  // recorded after the operations launched last
    // A stream that waits for every operation, as NCCL has one: it takes a hardware queue of its own.
    void* device_stream = nullptr;

private:
    bool is_closed() const;
    // Waits until the communicator closes, as an operation that cannot go on.
    void hang();
    void wait(std::chrono::microseconds time);

    std::unique_ptr<Engine> engine_;  // null if there is no other rank
    mutable std::mutex mutex_;
    std::condition_variable closed_;
    bool is_closed_ = false;
    std::atomic<Result> error_{SUCCESS};
    std::string problem_;
    std::atomic<uint64_t> splits_{0};
    std::atomic<uint64_t> calls_{0};
    std::atomic<int> looks_{0};
    std::atomic<std::thread::id> caller_{};
};

}  // namespace nccl_stand_in
