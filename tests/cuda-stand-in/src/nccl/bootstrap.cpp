#include "bootstrap.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>

namespace nccl_stand_in {

namespace {

constexpr char MAGIC[8] = {'N', 'C', 'C', 'L', 'S', 'I', '0', '1'};
// A process that has connected sends its greeting at once.
constexpr auto GREETING_TIME = std::chrono::seconds(5);
constexpr auto FOREVER = std::chrono::hours(1000);

struct Greeting {
    int rank, ranks;
    Member member;
};

struct Reply {
    Result result;
    char problem[120];
};

Deadline after(std::chrono::steady_clock::duration time) { return std::chrono::steady_clock::now() + time; }

// The ranks of one id, as the thread of the id collects them.
class Gathering {
public:
    // Takes a greeting; returns what is wrong with it, or nothing.
    std::string take(const Greeting& greeting, Socket socket) {
        const std::string rank = "rank " + std::to_string(greeting.rank);
        const std::string ranks = std::to_string(greeting.ranks);
        if (members_.empty()) {
            members_.resize(size_t(greeting.ranks));
            sockets_.resize(size_t(greeting.ranks));
        }
        const std::string expected = std::to_string(members_.size());
        // Also one that fits nowhere gets an answer.
        const bool fits = members_.size() == size_t(greeting.ranks);
        const bool is_new = fits && !sockets_[size_t(greeting.rank)];
        Socket& place = is_new ? sockets_[size_t(greeting.rank)] : others_.emplace_back();
        place = std::move(socket);
        if (!fits) return rank + " expects " + ranks + " ranks, others expect " + expected;
        if (!is_new) return rank + " came twice";
        members_[size_t(greeting.rank)] = greeting.member;
        return {};
    }

    bool is_complete() const {
        const auto has_come = [](const Socket& socket) { return bool(socket); };
        return !sockets_.empty() && std::all_of(sockets_.begin(), sockets_.end(), has_come);
    }

    void answer(const std::string& problem) {
        Reply reply{problem.empty() ? SUCCESS : INVALID_USAGE, {}};
        problem.copy(reply.problem, sizeof reply.problem - 1);
        for (auto* sockets : {&sockets_, &others_})
            for (const Socket& socket : *sockets) {
                if (!socket || !send_all(socket, &reply, sizeof reply)) continue;
                if (problem.empty()) send_all(socket, members_.data(), members_.size() * sizeof(Member));
            }
    }

private:
    std::vector<Member> members_;
    std::vector<Socket> sockets_, others_;
};

void serve(const Socket& listener) {
    Gathering gathering;
    std::string problem;
    while (problem.empty() && !gathering.is_complete()) {
        Socket socket = accept_from(listener, after(FOREVER));
        Greeting greeting;
        if (!socket || !receive_all(socket, &greeting, sizeof greeting, after(GREETING_TIME))) continue;
        problem = gathering.take(greeting, std::move(socket));
    }
    gathering.answer(problem);
}

Meeting failed(Result result, const std::string& problem) { return {result, problem, {}}; }

}  // namespace

bool create_unique_id(UniqueId* id) {
    *id = {};
    const std::string name = unused_name();
    Socket listener = listen_at(name);
    if (!listener) return false;
    memcpy(id->bytes, MAGIC, sizeof MAGIC);
    name.copy(id->bytes + sizeof MAGIC, NAME_BYTES - 1);
    std::thread([listener = std::move(listener)] { serve(listener); }).detach();
    return true;
}

uint64_t digest_of(const UniqueId& id) {
    uint64_t digest = 0xcbf29ce484222325u;
    for (const char byte : id.bytes) digest = (digest ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
    return digest;
}

Meeting meet(const UniqueId& id, int rank, int ranks, const Member& own, Deadline deadline) {
    if (memcmp(id.bytes, MAGIC, sizeof MAGIC) != 0)
        return failed(INVALID_ARGUMENT, "the unique id is not one that ncclGetUniqueId has made");
    const char* name = id.bytes + sizeof MAGIC;
    const Socket socket = connect_to(std::string(name, strnlen(name, NAME_BYTES - 1)));
    const Greeting greeting{rank, ranks, own};
    if (!socket || !send_all(socket, &greeting, sizeof greeting))
        return failed(SYSTEM_ERROR,
                      "nothing serves the unique id: a communicator was made of it before, or "
                      "the process that made it has ended");
    Reply reply;
    Meeting meeting;
    meeting.members.resize(size_t(ranks));
    if (!receive_all(socket, &reply, sizeof reply, deadline))
        return failed(SYSTEM_ERROR, "not all of " + std::to_string(ranks) + " ranks have come in time");
    if (reply.result != SUCCESS) return failed(reply.result, reply.problem);
    if (!receive_all(socket, meeting.members.data(), meeting.members.size() * sizeof(Member), deadline))
        return failed(SYSTEM_ERROR, "the process that made the unique id has ended");
    return meeting;
}

std::vector<Socket> connect_all(const Socket& listener, int rank, const std::vector<Member>& members,
                                Deadline deadline) {
    std::vector<Socket> sockets(members.size());
    for (int peer = 0; peer < rank; peer++) {
        Socket& socket = sockets[size_t(peer)];
        socket = connect_to(members[size_t(peer)].name);
        if (!socket || !send_all(socket, &rank, sizeof rank)) return {};
    }
    for (size_t waiting = members.size() - size_t(rank) - 1; waiting > 0; waiting--) {
        Socket socket = accept_from(listener, deadline);
        int peer = 0;
        if (!socket || !receive_all(socket, &peer, sizeof peer, deadline)) return {};
        sockets[size_t(peer)] = std::move(socket);
    }
    return sockets;
}

}  // namespace nccl_stand_in
