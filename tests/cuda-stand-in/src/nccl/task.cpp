#include "task.h"

namespace nccl_stand_in {

namespace {

std::string name_of_type(int type) {
    constexpr const char* NAMES[] = {"int8",    "uint8",    "int32",       "uint32",
                                     "int64",   "uint64",   "float16",     "float32",
                                     "float64", "bfloat16", "float8_e4m3", "float8_e5m2"};
    return bytes_of(type) > 0 ? NAMES[type] : "elements of no type";
}

}  // namespace

size_t Task::send_bytes(int rank, int ranks) const {
    const size_t bytes = count * bytes_of(type);
    switch (kind) {
        case Kind::ReduceScatter: return bytes * size_t(ranks);
        case Kind::Broadcast: return rank == peer ? bytes : 0;
        case Kind::Recv: return 0;
        default: return bytes;
    }
}

size_t Task::receive_bytes(int rank, int ranks) const {
    const size_t bytes = count * bytes_of(type);
    switch (kind) {
        case Kind::AllGather: return bytes * size_t(ranks);
        case Kind::Reduce: return rank == peer ? bytes : 0;
        case Kind::Send: return 0;
        default: return bytes;
    }
}

bool Task::has_overlap(int rank, int ranks) const {
    const size_t sent = send_bytes(rank, ranks), received = receive_bytes(rank, ranks);
    if (sent == 0 || received == 0) return false;
    const auto from = reinterpret_cast<uintptr_t>(send), to = reinterpret_cast<uintptr_t>(receive);
    if (from >= to + received || to >= from + sent) return false;
    const size_t own_part = size_t(rank) * count * bytes_of(type);
    switch (kind) {
        case Kind::AllGather: return from != to + own_part;
        case Kind::ReduceScatter: return to != from + own_part;
        default: return from != to;
    }
}

std::string Task::text() const {
    std::string text = std::string(name_of(kind)) + " of " + std::to_string(count) + " " + name_of_type(type);
    if (peer < 0) return text;
    switch (kind) {
        case Kind::Send: text += " to rank "; break;
        case Kind::Recv: text += " from rank "; break;
        default: text += " with root "; break;
    }
    return text + std::to_string(peer);
}

const char* name_of(Kind kind) {
    constexpr const char* NAMES[KINDS] = {"ncclAllReduce", "ncclReduce", "ncclReduceScatter", "ncclAllGather",
                                          "ncclBroadcast", "ncclSend",   "ncclRecv"};
    return NAMES[int(kind)];
}

}  // namespace nccl_stand_in
