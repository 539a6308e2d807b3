// Operations and groups.
#include "api.h"
#include "arithmetic.h"
#include "cuda.h"
#include "error.h"
#include "group.h"
#include "handles.h"
#include "local.h"

using namespace nccl_stand_in;

namespace {

Result check(const Communicator& communicator, const Task& task, void* stream) {
    const auto& place = communicator.place;
    if (bytes_of(task.type) == 0) return misuse(INVALID_ARGUMENT, task.text() + ": no such type");
    if (task.reduces() && !can_reduce(task.type, task.reduction))
        return misuse(INVALID_ARGUMENT, task.text() + ": the stand-in has no such reduction of this type");
    const bool has_peer = task.kind == Kind::Send || task.kind == Kind::Recv || task.kind == Kind::Reduce ||
                          task.kind == Kind::Broadcast;
    if (has_peer && (task.peer < 0 || task.peer >= place.ranks))
        return misuse(INVALID_ARGUMENT,
                      task.text() + ": there are " + std::to_string(place.ranks) + " ranks");
    if (communicator.is_finalized)
        return misuse(INVALID_USAGE, task.text() + ": the communicator is finalized");
    if (const Result error = communicator.error()) return fail(error, communicator.problem());
    if (place.ranks > 1 && !is_threaded())
        return misuse(INVALID_USAGE, task.text() + ": streams of the stand-in have no threads any more");
    const CurrentContext current(place.context);
    const int device = cuda_stand_in_device_of_stream(stream);
    if (device != place.device)
        return misuse(INVALID_USAGE, task.text() + (device < 0 ? ": there is no such stream"
                                                               : ": the stream is one of another device"));
    const std::string problem = problem_of_buffers(task, place.rank, place.ranks, place.device);
    return problem.empty() ? SUCCESS : misuse(INVALID_ARGUMENT, problem);
}

// An operation by itself is a group of one.
int issue(void* handle, const Task& task, void* stream) {
    start_group();
    const auto communicator = communicator_of(handle);
    Result result = SUCCESS;
    if (!communicator) result = misuse(INVALID_ARGUMENT, task.text() + " on " + problem_of_handle(handle));
    else result = check(*communicator, task, stream);
    if (result == SUCCESS) result = submit(communicator, task, stream);
    fail_group(result);
    const Result launched = end_group();
    if (result == SUCCESS) result = launched;
    return result == SUCCESS && communicator->answers_later() ? IN_PROGRESS : result;
}

constexpr int NO_PEER = -1;

}  // namespace

NCCL ncclAllReduce(const void* send, void* receive, size_t count, int type, int reduction, void* handle,
                   void* stream) {
    return issue(handle, {Kind::AllReduce, send, receive, count, type, reduction, NO_PEER}, stream);
}

NCCL ncclReduce(const void* send, void* receive, size_t count, int type, int reduction, int root,
                void* handle, void* stream) {
    return issue(handle, {Kind::Reduce, send, receive, count, type, reduction, root}, stream);
}

NCCL ncclReduceScatter(const void* send, void* receive, size_t count, int type, int reduction, void* handle,
                       void* stream) {
    return issue(handle, {Kind::ReduceScatter, send, receive, count, type, reduction, NO_PEER}, stream);
}

NCCL ncclAllGather(const void* send, void* receive, size_t count, int type, void* handle, void* stream) {
    return issue(handle, {Kind::AllGather, send, receive, count, type, SUM, NO_PEER}, stream);
}

NCCL ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, void* handle,
                   void* stream) {
    return issue(handle, {Kind::Broadcast, send, receive, count, type, SUM, root}, stream);
}

NCCL ncclSend(const void* send, size_t count, int type, int peer, void* handle, void* stream) {
    return issue(handle, {Kind::Send, send, nullptr, count, type, SUM, peer}, stream);
}

NCCL ncclRecv(void* receive, size_t count, int type, int peer, void* handle, void* stream) {
    return issue(handle, {Kind::Recv, nullptr, receive, count, type, SUM, peer}, stream);
}

NCCL ncclGroupStart() {
    start_group();
    return SUCCESS;
}

NCCL ncclGroupEnd() { return end_group(); }
