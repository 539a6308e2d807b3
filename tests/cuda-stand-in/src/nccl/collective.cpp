#include "collective.h"

#include "arithmetic.h"

#include <cstring>

namespace nccl_stand_in {

Collective::Collective(Wire& wire, const Task& task, uint64_t sequence, Done done)
    : wire_(wire),
      task_(task),
      sequence_(sequence),
      done_(std::move(done)),
      has_called_(size_t(wire.ranks())),
      staged_(size_t(wire.ranks())) {
    for (int phase = 0; phase < (uses_both_phases() ? PHASES : 1); phase++)
        for (int peer = 0; peer < wire.ranks(); peer++)
            if (peer != wire.rank() && incoming(peer, phase).bytes > 0) unarrived_[phase]++;
}

void Collective::start() {
    for (int peer = 0; peer < wire_.ranks(); peer++)
        if (peer != wire_.rank()) wire_.transmit(peer, frame(FrameKind::Call), nullptr, nullptr);
    has_called_[size_t(wire_.rank())] = true;
    calls_++;
    advance();
}

void Collective::on_call(int peer, const Frame& call) {
    if (!is_same(call)) {
        const Task other{Kind(call.operation), nullptr, nullptr, call.count, call.type, 0, call.root};
        const bool is_reduction = other.text() == task_.text();
        wire_.fail(INVALID_USAGE, task_.text() + " meets " + other.text() + " of rank " +
                                      std::to_string(peer) + (is_reduction ? " with another reduction" : ""));
        return;
    }
    has_called_[size_t(peer)] = true;
    calls_++;
    send_part(peer, 0);
    advance();
}

void* Collective::place_of(int peer, const Frame& part) { return incoming(peer, int(part.phase)).start; }

void Collective::on_part(const Frame& part) {
    unarrived_[part.phase]--;
    advance();
}

Frame Collective::frame(FrameKind kind) const {
    Frame frame{};
    frame.kind = kind;
    frame.sequence = sequence_;
    frame.operation = int(task_.kind);
    frame.type = task_.type;
    frame.reduction = task_.reduction;
    frame.root = task_.peer;
    frame.count = task_.count;
    return frame;
}

bool Collective::is_same(const Frame& call) const {
    return call.operation == int(task_.kind) && call.type == task_.type &&
           call.reduction == task_.reduction && call.root == task_.peer && call.count == task_.count;
}

Collective::Span Collective::elements(const void* from, size_t begin, size_t end) const {
    const size_t element = bytes_of(task_.type);
    return {static_cast<char*>(const_cast<void*>(from)) + begin * element, (end - begin) * element};
}

Collective::Span Collective::outgoing(int peer, int phase) const {
    const size_t count = task_.count, at = size_t(peer) * count;
    const Span none{nullptr, 0};
    switch (task_.kind) {
        case Kind::AllReduce:
            if (phase == 0) return elements(task_.send, share(peer), share(peer + 1));
            return elements(task_.receive, share(wire_.rank()), share(wire_.rank() + 1));
        case Kind::Reduce: return peer == task_.peer ? elements(task_.send, 0, count) : none;
        case Kind::ReduceScatter: return elements(task_.send, at, at + count);
        case Kind::AllGather: return elements(task_.send, 0, count);
        default: return wire_.rank() == task_.peer ? elements(task_.send, 0, count) : none;
    }
}

Collective::Span Collective::incoming(int peer, int phase) {
    const size_t count = task_.count, at = size_t(peer) * count;
    const int rank = wire_.rank();
    const auto staged = [&](size_t elements) {
        auto& bytes = staged_[size_t(peer)];
        bytes.resize(elements * bytes_of(task_.type));
        return Span{bytes.data(), bytes.size()};
    };
    const Span none{nullptr, 0};
    switch (task_.kind) {
        case Kind::AllReduce:
            if (phase == 0) return staged(share(rank + 1) - share(rank));
            return elements(task_.receive, share(peer), share(peer + 1));
        case Kind::Reduce: return rank == task_.peer ? staged(count) : none;
        case Kind::ReduceScatter: return staged(count);
        case Kind::AllGather: return elements(task_.receive, at, at + count);
        default: return peer == task_.peer ? elements(task_.receive, 0, count) : none;
    }
}

bool Collective::sums() const {
    return task_.reduces() && (task_.kind != Kind::Reduce || wire_.rank() == task_.peer);
}

void Collective::send_part(int peer, int phase) {
    const Span span = outgoing(peer, phase);
    if (span.bytes == 0) return;
    Frame part = frame(FrameKind::Part);
    part.phase = uint32_t(phase);
    part.payload_bytes = span.bytes;
    unsent_++;
    wire_.transmit(peer, part, span.start, [this] {
        unsent_--;
        advance();
    });
}

void Collective::advance() {
    if (is_done_ || calls_ < wire_.ranks() || unarrived_[0] > 0) return;
    if (phase_ == 0) {
        phase_ = 1;
        finish_parts();
        if (uses_both_phases())
            for (int peer = 0; peer < wire_.ranks(); peer++)
                if (peer != wire_.rank()) send_part(peer, 1);
    }
    if (unarrived_[1] > 0 || unsent_ > 0) return;
    is_done_ = true;
    done_();
}

void Collective::finish_parts() {
    const int rank = wire_.rank();
    const Span own = outgoing(rank, 0);
    Span result = elements(task_.receive, 0, task_.count);
    if (task_.kind == Kind::AllReduce) result = elements(task_.receive, share(rank), share(rank + 1));
    if (task_.kind == Kind::AllGather) result = incoming(rank, 0);
    if (!sums()) {
        if (task_.kind != Kind::Reduce && own.bytes > 0 && own.start != result.start)
            memmove(result.start, own.start, own.bytes);
        return;
    }
    std::vector<const void*> vectors;
    for (int peer = 0; peer < wire_.ranks(); peer++)
        vectors.push_back(peer == rank ? own.start : staged_[size_t(peer)].data());
    reduce(vectors, result.bytes / bytes_of(task_.type), task_.type, task_.reduction, result.start);
}

}  // namespace nccl_stand_in
