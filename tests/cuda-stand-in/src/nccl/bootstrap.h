// Brings the ranks of a unique id together.
//
// A unique id names a socket of the process that made it, where a thread collects all ranks, checks that they
// fit together, and sends each one the list of all. An id serves one communicator.
#pragma once

#include "socket.h"
#include "types.h"

#include <string>
#include <vector>

namespace nccl_stand_in {

// A rank, as the others see it.
struct Member {
    char name[NAME_BYTES];  // of the socket at which it listens
    int process;
    int device;
    uint64_t host;  // the machine, by the digest of NCCL_HOSTID
};

struct Meeting {
    Result result = SUCCESS;
    std::string problem;
    std::vector<Member> members;  // by rank
};

// Makes an id and starts the thread that serves it. False if the system has no sockets left.
bool create_unique_id(UniqueId* id);
// A number that all ranks of an id compute from it.
uint64_t digest_of(const UniqueId& id);
// Waits until all ranks of an id have come.
Meeting meet(const UniqueId& id, int rank, int ranks, const Member& own, Deadline deadline);
// Connects a rank with all others, which do the same. Sockets are by rank, with none for the own one; an
// empty list if the time is over.
std::vector<Socket> connect_all(const Socket& listener, int rank, const std::vector<Member>& members,
                                Deadline deadline);

}  // namespace nccl_stand_in
