#include "exchange.h"

namespace nccl_stand_in {

namespace {

Frame frame_of(FrameKind kind, const Task& task) {
    Frame frame{};
    frame.kind = kind;
    frame.type = task.type;
    frame.count = task.count;
    return frame;
}

std::string mismatch(const Task& own, const Frame& other, int peer) {
    Task task{
        own.kind == Kind::Send ? Kind::Recv : Kind::Send, nullptr, nullptr, other.count, other.type, 0, -1};
    return own.text() + " meets " + task.text() + " of rank " + std::to_string(peer);
}

template <class Queue>
auto take_front(Queue& queue) {
    auto front = std::move(queue.front());
    queue.pop_front();
    return front;
}

}  // namespace

void Exchange::start(const Task& task, Done done) {
    Peer& peer = peers_[size_t(task.peer)];
    if (task.kind == Kind::Send) {
        peer.offered.push_back({task, std::move(done)});
        wire_.transmit(task.peer, frame_of(FrameKind::Offer, task), nullptr, nullptr);
        return;
    }
    peer.receives.push_back({task, std::move(done)});
    match(task.peer);
}

void* Exchange::on_frame(int peer, const Frame& frame) {
    return frame.kind == FrameKind::Message ? peers_[size_t(peer)].arriving.front().task.receive : nullptr;
}

void Exchange::on_payload(int peer, const Frame& frame) {
    Peer& at = peers_[size_t(peer)];
    switch (frame.kind) {
        case FrameKind::Offer: at.offers.push_back(frame); return match(peer);
        case FrameKind::Grant: return send_message(peer);
        case FrameKind::Refusal:
            return wire_.fail(INVALID_USAGE, mismatch(at.offered.front().task, frame, peer));
        case FrameKind::Message: return take_message(peer);
        case FrameKind::Taken: return take_front(at.granted).done();
        default: return;
    }
}

bool Exchange::needs(int peer) const {
    const Peer& at = peers_[size_t(peer)];
    return !at.offered.empty() || !at.granted.empty() || !at.receives.empty() || !at.arriving.empty();
}

void Exchange::match(int peer) {
    Peer& at = peers_[size_t(peer)];
    while (!at.offers.empty() && !at.receives.empty()) {
        const Task& own = at.receives.front().task;
        const Frame& offer = at.offers.front();
        if (own.type == offer.type && own.count == offer.count) {
            wire_.transmit(peer, frame_of(FrameKind::Grant, own), nullptr, nullptr);
            at.arriving.push_back(take_front(at.receives));
            at.offers.pop_front();
            continue;
        }
        // Both stay in front: nothing passes them.
        wire_.transmit(peer, frame_of(FrameKind::Refusal, own), nullptr, nullptr);
        return wire_.fail(INVALID_USAGE, mismatch(own, offer, peer));
    }
}

void Exchange::send_message(int peer) {
    Peer& at = peers_[size_t(peer)];
    at.granted.push_back(take_front(at.offered));
    const Task& task = at.granted.back().task;
    Frame frame = frame_of(FrameKind::Message, task);
    frame.payload_bytes = task.send_bytes(wire_.rank(), wire_.ranks());
    wire_.transmit(peer, frame, task.send, nullptr);
}

void Exchange::take_message(int peer) {
    Pending pending = take_front(peers_[size_t(peer)].arriving);
    wire_.transmit(peer, frame_of(FrameKind::Taken, pending.task), nullptr, nullptr);
    pending.done();
}

}  // namespace nccl_stand_in
