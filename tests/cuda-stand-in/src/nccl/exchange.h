// Sends and receives of one communicator.
//
// A send offers its type and count, and moves nothing before a receive has begun that fits. It ends when the
// receive has all bytes. The sends to a rank match the receives of that rank in their order.
#pragma once

#include "task.h"
#include "wire.h"

#include <deque>
#include <vector>

namespace nccl_stand_in {

class Exchange {
public:
    explicit Exchange(Wire& wire) : wire_(wire), peers_(size_t(wire.ranks())) {}

    void start(const Task& task, Done done);
    // Returns where the payload of a frame goes.
    void* on_frame(int peer, const Frame& frame);
    void on_payload(int peer, const Frame& frame);
    // Whether an operation waits for this rank.
    bool needs(int peer) const;

private:
    struct Pending {
        Task task;
        Done done;
    };
    struct Peer {
        std::deque<Pending> offered, granted;    // sends
        std::deque<Pending> receives, arriving;  // before and after the grant
        std::deque<Frame> offers;                // without a receive
    };

    void match(int peer);
    void grant(int peer, const Frame& offer);
    void send_message(int peer);
    void take_message(int peer);

    Wire& wire_;
    std::vector<Peer> peers_;
};

}  // namespace nccl_stand_in
