#include "engine.h"

#include "../driver/control.h"

#include <algorithm>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace nccl_stand_in {

namespace {

// How often a waiting stream asks whether it shall end.
constexpr auto PAUSE = std::chrono::milliseconds(20);
// The time in which the last frames leave.
constexpr auto FLUSH = std::chrono::seconds(1);

std::vector<Link> links_of(std::vector<Socket> sockets) {
    std::vector<Link> links;
    for (size_t peer = 0; peer < sockets.size(); peer++)
        links.emplace_back(int(peer), std::move(sockets[peer]));
    return links;
}

}  // namespace

Engine::Engine(int rank, std::vector<Socket> sockets, Failed failed)
    : rank_(rank),
      links_(links_of(std::move(sockets))),
      failed_(std::move(failed)),
      exchange_(*this),
      calls_(links_.size()),
      has_left_(links_.size()),
      splits_(links_.size()),
      wake_(eventfd(0, EFD_CLOEXEC)),
      thread_([this] { run_thread(); }) {}

Engine::~Engine() {
    close(false);
    ::close(wake_);
}

Engine::End Engine::run(const std::vector<Task>& tasks) {
    const auto is_done = std::make_shared<bool>(false);
    post([this, tasks, is_done] { start(tasks, is_done); });
    std::unique_lock lock(mutex_);
    const auto is_over = [&] { return *is_done || has_ended_; };
    while (!changed_.wait_for(lock, PAUSE, is_over)) {
        if (!cuda_stand_in_is_stopped()) continue;
        lock.unlock();
        const auto is_halted = std::make_shared<bool>(false);
        post([this, is_halted] {
            is_halted_ = true;
            std::lock_guard halting(mutex_);
            *is_halted = true;
            changed_.notify_all();
        });
        lock.lock();
        changed_.wait(lock, [&] { return *is_halted || has_ended_; });
        return End::Stopped;
    }
    return *is_done ? End::Done : End::Closed;
}

std::vector<Frame> Engine::exchange_splits(const Frame& own, Deadline deadline) {
    post([this, own] {
        for (const Link& link : links_)
            if (link.peer() != rank_) transmit(link.peer(), own, nullptr, nullptr);
    });
    std::unique_lock lock(mutex_);
    const auto has_come = [&](const auto& frames) {
        return !frames.empty() || &frames == &splits_[size_t(rank_)];
    };
    const auto is_over = [&] { return has_ended_ || std::all_of(splits_.begin(), splits_.end(), has_come); };
    if (!changed_.wait_until(lock, deadline, is_over) || has_ended_) return {};
    std::vector<Frame> frames;
    for (auto& from : splits_) {
        frames.push_back(from.empty() ? own : from.front());
        if (!from.empty()) from.pop_front();
    }
    return frames;
}

void Engine::close(bool says_farewell) {
    std::lock_guard closing(closing_mutex_);
    if (!thread_.joinable()) return;
    post([this, says_farewell] {
        Frame farewell{};
        farewell.kind = FrameKind::Farewell;
        if (says_farewell)
            for (const Link& link : links_) transmit(link.peer(), farewell, nullptr, nullptr);
        is_closing_ = true;
        flushed_by_ = says_farewell ? std::chrono::steady_clock::now() + FLUSH : Deadline::min();
    });
    thread_.join();
}

void Engine::lose_connections() {
    post([this] {
        for (Link& link : links_) link.close();
        fail(REMOTE_ERROR, "this rank has lost its connections, as a fault on request");
    });
}

void Engine::transmit(int peer, const Frame& frame, const void* payload, std::function<void()> sent) {
    links_[size_t(peer)].transmit(frame, payload, std::move(sent));
}

void* Engine::on_frame(int peer, const Frame& frame) {
    if (frame.kind != FrameKind::Part) return exchange_.on_frame(peer, frame);
    Collective* found = collective(frame.sequence);
    return found ? found->place_of(peer, frame) : nullptr;
}

void Engine::on_payload(int peer, const Frame& frame) {
    Collective* found = nullptr;
    switch (frame.kind) {
        case FrameKind::Call:
            found = collective(frame.sequence);
            if (found) found->on_call(peer, frame);
            else calls_[size_t(peer)].push_back(frame);
            return;
        case FrameKind::Part:
            found = collective(frame.sequence);
            if (found) found->on_part(frame);
            return;
        case FrameKind::Split: {
            std::lock_guard lock(mutex_);
            splits_[size_t(peer)].push_back(frame);
            changed_.notify_all();
            return;
        }
        case FrameKind::Farewell:
            has_left_[size_t(peer)] = true;
            if (needs(peer))
                fail(REMOTE_ERROR, "rank " + std::to_string(peer) + " has destroyed its communicator");
            return;
        default: return exchange_.on_payload(peer, frame);
    }
}

void Engine::run_thread() {
    for (;;) {
        run_jobs();
        for (const uint64_t sequence : ended_collectives_) collectives_.erase(sequence);
        ended_collectives_.clear();
        if (!is_halted_)
            for (Link& link : links_) handle(link, link.flush());
        if (is_closing_ && may_end()) break;
        wait_for_events();
    }
    for (Link& link : links_) link.close();
    std::lock_guard lock(mutex_);
    has_ended_ = true;
    changed_.notify_all();
}

void Engine::run_jobs() {
    std::vector<Job> jobs;
    {
        std::lock_guard lock(mutex_);
        jobs.swap(jobs_);
    }
    for (const Job& job : jobs) job();
}

bool Engine::may_end() const {
    const auto is_flushed = [](const Link& link) { return !link.is_open() || link.is_flushed(); };
    return is_halted_ || std::chrono::steady_clock::now() >= flushed_by_ ||
           std::all_of(links_.begin(), links_.end(), is_flushed);
}

void Engine::wait_for_events() {
    std::vector<pollfd> files{{wake_, POLLIN, 0}};
    std::vector<Link*> polled;
    for (Link& link : links_) {
        if (!link.is_open() || is_halted_) continue;
        files.push_back({link.file(), short(link.is_flushed() ? POLLIN : POLLIN | POLLOUT), 0});
        polled.push_back(&link);
    }
    const int time = is_closing_ ? int(PAUSE.count()) : -1;
    if (poll(files.data(), files.size(), time) <= 0) return;
    if (files[0].revents) {
        uint64_t wakes;
        (void)!read(wake_, &wakes, sizeof wakes);
    }
    for (size_t i = 0; i < polled.size(); i++)
        if (files[i + 1].revents & ~POLLOUT) handle(*polled[i], polled[i]->receive(*this));
}

void Engine::handle(Link& link, LinkState state) {
    if (state == LinkState::Open) return;
    const std::string rank = "rank " + std::to_string(link.peer());
    link.close();
    if (state == LinkState::BadMemory) {
        is_halted_ = true;
        fail(UNHANDLED_CUDA_ERROR, "a buffer was freed while its bytes were on their way to or from " + rank);
    } else if (!has_left_[size_t(link.peer())] && !is_closing_) {
        fail(REMOTE_ERROR, rank + " has closed its connection without a farewell: it has aborted or died");
    }
}

void Engine::start(const std::vector<Task>& tasks, const std::shared_ptr<bool>& is_done) {
    const auto left = std::make_shared<size_t>(tasks.size());
    const Done done = [this, left, is_done] {
        if (--*left > 0) return;
        std::lock_guard lock(mutex_);
        *is_done = true;
        changed_.notify_all();
    };
    for (const Task& task : tasks) {
        if (task.is_collective()) start_collective(task, done);
        else exchange_.start(task, done);
    }
    for (int peer = 0; peer < ranks(); peer++)
        if (has_left_[size_t(peer)] && needs(peer))
            fail(REMOTE_ERROR, "rank " + std::to_string(peer) + " has destroyed its communicator");
}

void Engine::start_collective(const Task& task, Done done) {
    const uint64_t sequence = collectives_begun_++;
    auto& started = collectives_[sequence];
    started = std::make_unique<Collective>(*this, task, sequence, [this, sequence, done] {
        ended_collectives_.push_back(sequence);
        done();
    });
    Collective& begun = *started;
    begun.start();
    for (int peer = 0; peer < ranks(); peer++) {
        auto& calls = calls_[size_t(peer)];
        if (calls.empty() || calls.front().sequence != sequence) continue;
        const Frame call = calls.front();
        calls.pop_front();
        begun.on_call(peer, call);
    }
}

Collective* Engine::collective(uint64_t sequence) {
    const auto found = collectives_.find(sequence);
    return found == collectives_.end() ? nullptr : found->second.get();
}

bool Engine::needs(int peer) const {
    if (peer == rank_) return false;
    if (exchange_.needs(peer)) return true;
    const auto has_need = [&](const auto& entry) { return entry.second->needs(peer); };
    return std::any_of(collectives_.begin(), collectives_.end(), has_need);
}

void Engine::post(Job job) {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    const uint64_t one = 1;
    (void)!write(wake_, &one, sizeof one);
}

}  // namespace nccl_stand_in
