// A connection to another rank of a communicator, which carries frames with payloads.
#pragma once

#include "socket.h"
#include "types.h"

#include <deque>
#include <functional>

namespace nccl_stand_in {

enum class FrameKind : uint32_t {
    Call,      // a rank has begun a collective and takes its parts
    Part,      // a part of a collective
    Offer,     // a send has begun
    Grant,     // its receive has begun
    Refusal,   // its receive is of another type or count
    Message,   // what is sent
    Taken,     // it has arrived
    Split,     // a rank takes part in a split
    Farewell,  // a rank has destroyed its communicator
};

struct Frame {
    FrameKind kind;
    uint32_t phase;     // of a part
    uint64_t sequence;  // of a collective
    int32_t operation, type, reduction, root;
    uint64_t count;
    uint64_t payload_bytes;
    char name[NAME_BYTES];  // of a split
};

// Takes what a link receives.
class Receiver {
public:
    virtual ~Receiver() = default;
    // Returns where the payload goes.
    virtual void* on_frame(int peer, const Frame& frame) = 0;
    // Called once the payload has arrived, also if it has no bytes.
    virtual void on_payload(int peer, const Frame& frame) = 0;
};

enum class LinkState { Open, Closed, BadMemory };

class Link {
public:
    Link(int peer, Socket socket) : peer_(peer), socket_(std::move(socket)) {}

    // Enqueues a frame; `sent` is called once the payload has left its buffer.
    void transmit(const Frame& frame, const void* payload, std::function<void()> sent);
    // Sends and receives as much as the socket takes and has.
    LinkState flush();
    LinkState receive(Receiver& receiver);

    int peer() const { return peer_; }
    int file() const { return socket_.file(); }
    bool is_open() const { return bool(socket_); }
    bool is_flushed() const { return outgoing_.empty(); }
    void close();

private:
    struct Outgoing {
        Frame frame;
        const char* payload;
        std::function<void()> sent;
        size_t done = 0;  // bytes of the frame and its payload that the socket has taken
    };

    int peer_;
    Socket socket_;
    std::deque<Outgoing> outgoing_;
    Frame incoming_{};
    size_t arrived_ = 0;  // bytes of the incoming frame and its payload
    char* target_ = nullptr;
};

}  // namespace nccl_stand_in
