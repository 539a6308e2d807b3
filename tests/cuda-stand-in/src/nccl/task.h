// One operation of a rank: a collective, a send or a receive.
#pragma once

#include "types.h"

#include <string>

namespace nccl_stand_in {

// The numbers are those of the launch record.
enum class Kind : int { AllReduce, Reduce, ReduceScatter, AllGather, Broadcast, Send, Recv };

constexpr int KINDS = 7;

struct Task {
    Kind kind;
    const void* send;
    void* receive;
    size_t count;  // elements, as the call gives them
    int type;
    int reduction;
    int peer;  // of a send or receive, the root of a rooted collective, -1 otherwise

    bool is_collective() const { return kind != Kind::Send && kind != Kind::Recv; }
    bool reduces() const {
        return kind == Kind::AllReduce || kind == Kind::Reduce || kind == Kind::ReduceScatter;
    }
    // Bytes that the operation reads and writes on this rank.
    size_t send_bytes(int rank, int ranks) const;
    size_t receive_bytes(int rank, int ranks) const;
    // Whether both buffers share bytes in a way that NCCL does not define.
    bool has_overlap(int rank, int ranks) const;
    // Such as "ncclSend of 16 float32 to rank 1".
    std::string text() const;
};

const char* name_of(Kind kind);

}  // namespace nccl_stand_in
