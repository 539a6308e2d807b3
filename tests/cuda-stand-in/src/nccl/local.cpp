#include "local.h"

#include "../driver/control.h"

#include <algorithm>
#include <cstring>

namespace nccl_stand_in {

namespace {

constexpr int POISON = 0xff;

std::string problem_of_buffer(const Task& task, const char* name, const void* buffer, size_t bytes,
                              int device) {
    if (bytes == 0) return {};
    const std::string what = task.text() + ": " + std::to_string(bytes) + " bytes of " + name;
    const int owner = cuda_stand_in_device_of_buffer(buffer, bytes);
    if (owner == device) return {};
    if (owner >= 0)
        return what + " are on device " + std::to_string(owner) + ", the communicator is on device " +
               std::to_string(device);
    char where[200];
    cuda_stand_in_describe(buffer, where, sizeof where);
    return what + " are not all in a buffer of the device: their start is " + where;
}

std::vector<Task> with_self(const std::vector<Task>& tasks, Kind kind, int rank) {
    std::vector<Task> found;
    const auto is_own = [&](const Task& task) { return task.kind == kind && task.peer == rank; };
    std::copy_if(tasks.begin(), tasks.end(), std::back_inserter(found), is_own);
    return found;
}

bool overlaps(const Task& receive, const Task& other, int rank, int ranks) {
    const auto* to = static_cast<const char*>(receive.receive);
    const auto* from = static_cast<const char*>(other.send);
    return from < to + receive.receive_bytes(rank, ranks) && to < from + other.send_bytes(rank, ranks);
}

}  // namespace

std::string problem_of_buffers(const Task& task, int rank, int ranks, int device) {
    const size_t sent = task.send_bytes(rank, ranks), received = task.receive_bytes(rank, ranks);
    std::string problem = problem_of_buffer(task, "the send buffer", task.send, sent, device);
    if (problem.empty())
        problem = problem_of_buffer(task, "the receive buffer", task.receive, received, device);
    if (problem.empty() && task.has_overlap(rank, ranks))
        problem = task.text() + ": the buffers overlap, and not as an operation in place";
    return problem;
}

bool are_buffers_open(const Task& task, int rank, int ranks) {
    const size_t sent = task.send_bytes(rank, ranks), received = task.receive_bytes(rank, ranks);
    return (sent == 0 || cuda_stand_in_is_open(task.send, sent)) &&
           (received == 0 || cuda_stand_in_is_open(task.receive, received));
}

void poison_receives(const std::vector<Task>& tasks, int rank, int ranks) {
    for (const Task& task : tasks) {
        const size_t bytes = task.receive_bytes(rank, ranks);
        const auto reads = [&](const Task& other) { return overlaps(task, other, rank, ranks); };
        if (bytes > 0 && std::none_of(tasks.begin(), tasks.end(), reads)) memset(task.receive, POISON, bytes);
    }
}

std::string problem_of_own(const std::vector<Task>& tasks, int rank) {
    const auto sends = with_self(tasks, Kind::Send, rank), receives = with_self(tasks, Kind::Recv, rank);
    if (sends.size() != receives.size())
        return "a send of a rank to itself needs its receive in the same group, and the other way round";
    for (size_t i = 0; i < sends.size(); i++)
        if (sends[i].type != receives[i].type || sends[i].count != receives[i].count)
            return sends[i].text() + " meets " + receives[i].text();
    return {};
}

std::vector<Task> run_own_part(const std::vector<Task>& tasks, int rank, int ranks) {
    const auto sends = with_self(tasks, Kind::Send, rank), receives = with_self(tasks, Kind::Recv, rank);
    for (size_t i = 0; i < sends.size(); i++)
        memmove(receives[i].receive, sends[i].send, sends[i].send_bytes(rank, ranks));
    std::vector<Task> others;
    for (const Task& task : tasks) {
        if (!task.is_collective() && task.peer == rank) continue;
        if (ranks > 1) others.push_back(task);
        else if (task.send != task.receive && task.count > 0)
            memmove(task.receive, task.send, task.send_bytes(rank, ranks));
    }
    return others;
}

}  // namespace nccl_stand_in
