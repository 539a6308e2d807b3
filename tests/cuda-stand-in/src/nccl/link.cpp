#include "link.h"

#include <cerrno>
#include <sys/socket.h>

namespace nccl_stand_in {

namespace {

// The state after a call that has moved no bytes, or `Open` if it shall be made again later.
LinkState state_of(ssize_t moved) {
    if (moved == 0) return LinkState::Closed;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return LinkState::Open;
    return errno == EFAULT ? LinkState::BadMemory : LinkState::Closed;
}

}  // namespace

void Link::transmit(const Frame& frame, const void* payload, std::function<void()> sent) {
    if (is_open()) outgoing_.push_back({frame, static_cast<const char*>(payload), std::move(sent)});
}

LinkState Link::flush() {
    while (is_open() && !outgoing_.empty()) {
        Outgoing& next = outgoing_.front();
        const size_t all = sizeof(Frame) + next.frame.payload_bytes;
        while (next.done < all) {
            const bool is_head = next.done < sizeof(Frame);
            const char* from = is_head ? reinterpret_cast<const char*>(&next.frame) + next.done
                                       : next.payload + (next.done - sizeof(Frame));
            const size_t bytes = (is_head ? sizeof(Frame) : all) - next.done;
            const ssize_t moved = send(socket_.file(), from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (moved <= 0) return state_of(moved);
            next.done += size_t(moved);
        }
        const auto sent = std::move(next.sent);
        outgoing_.pop_front();
        if (sent) sent();
    }
    return LinkState::Open;
}

LinkState Link::receive(Receiver& receiver) {
    while (is_open()) {
        const bool is_head = arrived_ < sizeof(Frame);
        char* to =
            is_head ? reinterpret_cast<char*>(&incoming_) + arrived_ : target_ + (arrived_ - sizeof(Frame));
        const size_t all = sizeof(Frame) + (is_head ? 0 : incoming_.payload_bytes);
        const ssize_t moved = recv(socket_.file(), to, all - arrived_, MSG_DONTWAIT);
        if (moved <= 0) return state_of(moved);
        arrived_ += size_t(moved);
        if (is_head && arrived_ == sizeof(Frame))
            target_ = static_cast<char*>(receiver.on_frame(peer_, incoming_));
        if (arrived_ < sizeof(Frame) || arrived_ < sizeof(Frame) + incoming_.payload_bytes) continue;
        arrived_ = 0;
        receiver.on_payload(peer_, incoming_);
    }
    return LinkState::Open;
}

void Link::close() {
    socket_.close();
    outgoing_.clear();
}

}  // namespace nccl_stand_in
