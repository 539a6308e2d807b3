// One collective operation of one rank.
//
// Every rank sends its call to all others and begins to send parts to a rank once it has seen the call of
// that rank, so that no part arrives before its place is known. The operation ends after the calls of all
// ranks have come: a rank that lacks holds up all. A sum is computed where it is wanted first, in the order
// of the ranks, and an all-reduce gives each rank a share of the elements to sum, which all gather in a
// second phase.
#pragma once

#include "task.h"
#include "wire.h"

#include <vector>

namespace nccl_stand_in {

class Collective {
public:
    Collective(Wire& wire, const Task& task, uint64_t sequence, Done done);
    Collective(const Collective&) = delete;
    Collective& operator=(const Collective&) = delete;

    void start();
    // Takes the call of a rank.
    void on_call(int peer, const Frame& call);
    // Returns where a part goes.
    void* place_of(int peer, const Frame& part);
    void on_part(const Frame& part);
    // Whether the operation waits for the call of this rank.
    bool needs(int peer) const { return !has_called_[size_t(peer)]; }
    uint64_t sequence() const { return sequence_; }

private:
    static constexpr int PHASES = 2;
    struct Span {
        char* start;
        size_t bytes;
    };

    Frame frame(FrameKind kind) const;
    bool is_same(const Frame& call) const;
    Span elements(const void* from, size_t begin, size_t end) const;
    // What goes to a rank in a phase, and what comes from it.
    Span outgoing(int peer, int phase) const;
    Span incoming(int peer, int phase);
    size_t share(int rank) const { return task_.count * size_t(rank) / size_t(wire_.ranks()); }
    bool uses_both_phases() const { return task_.kind == Kind::AllReduce; }
    bool sums() const;
    void send_part(int peer, int phase);
    void advance();
    // Does the own part of the first phase, after those of the others have come.
    void finish_parts();

    Wire& wire_;
    const Task task_;
    const uint64_t sequence_;
    Done done_;
    std::vector<bool> has_called_;
    int calls_ = 0;
    size_t unsent_ = 0;              // parts under way
    size_t unarrived_[PHASES] = {};  // parts that have not come
    int phase_ = 0;
    bool is_done_ = false;
    std::vector<std::vector<char>> staged_;  // what a sum is made of, by rank
};

}  // namespace nccl_stand_in
