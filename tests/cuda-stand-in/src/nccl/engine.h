// Runs the operations of one communicator, on a thread that owns its connections.
//
// Operations that begin together wait for each other nowhere. An operation that cannot go on stays as it is
// until the engine closes.
#pragma once

#include "collective.h"
#include "exchange.h"
#include "link.h"
#include "task.h"
#include "wire.h"

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace nccl_stand_in {

class Engine final : public Wire, private Receiver {
public:
    using Failed = std::function<void(Result, const std::string&)>;
    enum class End {
        Done,
        Closed,   // the engine has closed first
        Stopped,  // the driver has ended the work of the stream
    };

    // Takes a socket for each other rank. `failed` is called on the thread of the engine.
    Engine(int rank, std::vector<Socket> sockets, Failed failed);
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;
    ~Engine() override;

    // Runs operations to their end. Buffers are not touched any more when this returns.
    End run(const std::vector<Task>& tasks);
    // Sends a frame to all other ranks and returns theirs, by rank; an empty list if a rank does not send one
    // in time.
    std::vector<Frame> exchange_splits(const Frame& own, Deadline deadline);
    // Ends the thread and the connections. Without a farewell the other ranks take that for a failure.
    void close(bool says_farewell);
    // Closes the connections, as a rank that dies.
    void lose_connections();

private:
    using Job = std::function<void()>;

    int rank() const override { return rank_; }
    int ranks() const override { return int(links_.size()); }
    void transmit(int peer, const Frame& frame, const void* payload, std::function<void()> sent) override;
    void fail(Result result, const std::string& problem) override { failed_(result, problem); }
    void* on_frame(int peer, const Frame& frame) override;
    void on_payload(int peer, const Frame& frame) override;

    // On the thread.
    void run_thread();
    void run_jobs();
    void wait_for_events();
    void handle(Link& link, LinkState state);
    void start(const std::vector<Task>& tasks, const std::shared_ptr<bool>& is_done);
    void start_collective(const Task& task, Done done);
    Collective* collective(uint64_t sequence);
    bool needs(int peer) const;
    bool may_end() const;

    void post(Job job);

    const int rank_;
    std::vector<Link> links_;  // by rank; the own one is closed
    const Failed failed_;
    Exchange exchange_;

    // Of the thread.
    std::map<uint64_t, std::unique_ptr<Collective>> collectives_;
    std::vector<uint64_t> ended_collectives_;
    std::vector<std::deque<Frame>> calls_;  // of collectives that this rank has not begun, by rank
    std::vector<bool> has_left_;            // ranks that have said farewell
    uint64_t collectives_begun_ = 0;
    bool is_halted_ = false;
    bool is_closing_ = false;
    Deadline flushed_by_;

    std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    std::vector<Job> jobs_;
    std::vector<std::deque<Frame>> splits_;  // by rank
    bool has_ended_ = false;

    int wake_;  // an eventfd
    std::mutex closing_mutex_;
    std::thread thread_;
};

}  // namespace nccl_stand_in
