// Unique ids and communicators.
#include "api.h"
#include "bootstrap.h"
#include "communicator.h"
#include "handles.h"
#include "cuda.h"
#include "error.h"
#include "group.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <unistd.h>

using namespace nccl_stand_in;

namespace nccl_stand_in {

bool is_threaded() {
    uint64_t value = 0;
    cuda_stand_in_get("stream_threads", &value);
    return value != 0;
}

std::string problem_of_handle(const void* handle) {
    return handle ? "a communicator that has ended or never was" : "a null communicator";
}

}  // namespace nccl_stand_in

namespace {

constexpr int NO_COLOR = -1;

Deadline init_deadline() {
    return std::chrono::steady_clock::now() + std::chrono::milliseconds(settings().init_ms);
}

// A rank of a communicator to be made, and the socket at which it listens.
struct Newcomer {
    Communicator::Place place;
    Socket listener;
    Member member;
};

Result prepare(Newcomer* newcomer, int rank, int ranks, int device, void* context) {
    newcomer->place = {0, rank, ranks, rank, device, context};
    const std::string name = unused_name();
    newcomer->listener = listen_at(name);
    if (!newcomer->listener) return fail(SYSTEM_ERROR, "the system has no sockets left");
    newcomer->member = {};
    name.copy(newcomer->member.name, NAME_BYTES - 1);
    newcomer->member.process = getpid();
    newcomer->member.device = device;
    const char* host = getenv("NCCL_HOSTID");
    newcomer->member.host = host ? std::hash<std::string>{}(host) : 0;
    return SUCCESS;
}

// Connects a rank with the others and makes its communicator.
Result join(Newcomer& newcomer, const std::vector<Member>& members, Deadline deadline, void** handle) {
    auto sockets = connect_all(newcomer.listener, newcomer.place.rank, members, deadline);
    if (sockets.empty()) return fail(SYSTEM_ERROR, "a rank of the communicator is gone");
    const CurrentContext current(newcomer.place.context);
    *handle = add_communicator(std::make_shared<Communicator>(newcomer.place, std::move(sockets)));
    return SUCCESS;
}

// NCCL refuses two ranks of one communicator on one device of one machine, by threads or processes.
std::string problem_of_members(const std::vector<Member>& members) {
    for (size_t i = 0; i < members.size(); i++)
        for (size_t j = 0; j < i; j++)
            if (members[i].host == members[j].host && members[i].device == members[j].device)
                return "ranks " + std::to_string(j) + " and " + std::to_string(i) + " are both on device " +
                       std::to_string(members[i].device) + " of one machine";
    return {};
}

Result create(const UniqueId& id, int rank, int ranks, int device, void* context, void** handle) {
    Newcomer newcomer;
    if (const Result result = prepare(&newcomer, rank, ranks, device, context)) return result;
    const Deadline deadline = init_deadline();
    const Meeting meeting = meet(id, rank, ranks, newcomer.member, deadline);
    if (meeting.result != SUCCESS) return fail(meeting.result, meeting.problem);
    const std::string problem = problem_of_members(meeting.members);
    if (!problem.empty() && settings().shares_devices == 0) return misuse(INVALID_USAGE, problem);
    newcomer.place.id = digest_of(id);
    return join(newcomer, meeting.members, deadline, handle);
}

// Makes a communicator on a thread of its own, and returns at once.
Result create_later(const UniqueId& id, int rank, int ranks, int device, void* context, void** handle) {
    void* reserved = *handle = reserve_handle();
    std::thread([=] {
        void* made = nullptr;
        const Result result = create(id, rank, ranks, device, context, &made);
        if (result != SUCCESS) return fail_handle(reserved, {result, last_error()});
        const auto communicator = remove_communicator(made);
        communicator->is_blocking = false;
        complete_handle(reserved, communicator);
    }).detach();
    return IN_PROGRESS;
}

// Whether calls may block: all fields of a configuration but this one change nothing.
bool may_block(const void* configuration) {
    struct {
        size_t size;
        unsigned magic, version;
        int blocking;
    } fields{};
    constexpr unsigned MAGIC = 0xcafebeef;
    if (!configuration) return true;
    memcpy(&fields, configuration, sizeof fields);
    return fields.magic != MAGIC || fields.blocking != 0;
}

int init(void** handle, int ranks, const UniqueId& id, int rank, bool is_blocking) {
    if (!handle) return misuse(INVALID_ARGUMENT, "no place for the communicator");
    *handle = nullptr;
    if (ranks < 1 || rank < 0 || rank >= ranks)
        return misuse(INVALID_ARGUMENT, "rank " + std::to_string(rank) + " of " + std::to_string(ranks));
    if (ranks > 1 && !is_threaded())
        return misuse(INVALID_USAGE,
                      "a communicator of several ranks needs streams with threads: set "
                      "CUDA_STAND_IN_STREAM_THREADS=1 before the process starts, or call set_stream_threads");
    if (const Result result = next_init_fault(rank)) return fail(result, "a fault on request");
    int device = 0;
    void* context = nullptr;
    if (cuCtxGetDevice(&device) != CUDA_SUCCESS || cuCtxGetCurrent(&context) != CUDA_SUCCESS)
        return misuse(UNHANDLED_CUDA_ERROR, "no context is current on this host thread");
    // NCCL loads its kernels and allocates memory that the host and other devices see.
    if (cuda_stand_in_load("ncclCommInitRank") != CUDA_SUCCESS)
        return fail(UNHANDLED_CUDA_ERROR, "the device has failed");
    if (!is_blocking) return create_later(id, rank, ranks, device, context, handle);
    return submit_blocking([=] { return create(id, rank, ranks, device, context, handle); });
}

// The ranks of a split with this rank's color, in the order of their keys.
std::vector<int> ranks_of_color(const std::vector<Frame>& frames, int color) {
    std::vector<int> ranks;
    for (size_t rank = 0; rank < frames.size(); rank++)
        if (frames[rank].type == color) ranks.push_back(int(rank));
    const auto key = [&](int rank) { return frames[size_t(rank)].root; };
    std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) { return key(a) < key(b); });
    return ranks;
}

// Color and key travel in fields that a split has no other use for.
Frame split_frame(int color, int key, const Member& member) {
    Frame frame{};
    frame.kind = FrameKind::Split;
    frame.type = color;
    frame.root = key;
    std::copy(std::begin(member.name), std::end(member.name), frame.name);
    return frame;
}

Result split(Communicator& parent, int color, int key, void** handle) {
    const auto& place = parent.place;
    Newcomer newcomer;
    if (const Result result = prepare(&newcomer, 0, 0, place.device, place.context)) return result;
    const Deadline deadline = init_deadline();
    const uint64_t number = parent.next_split();
    const auto frames = parent.exchange_splits(split_frame(color, key, newcomer.member), deadline);
    if (frames.empty()) return fail(SYSTEM_ERROR, "not all ranks have called ncclCommSplit in time");
    if (color == NO_COLOR) return SUCCESS;
    const std::vector<int> ranks = ranks_of_color(frames, color);
    std::vector<Member> members;
    for (size_t i = 0; i < ranks.size(); i++) {
        Member member{};
        std::copy_n(frames[size_t(ranks[i])].name, NAME_BYTES, member.name);
        members.push_back(member);
        if (ranks[i] == place.rank) newcomer.place.rank = int(i);
    }
    newcomer.place.ranks = int(ranks.size());
    newcomer.place.first_rank = place.first_rank;
    newcomer.place.id = (place.id * 31 + number) * 0x9e3779b97f4a7c15u + uint64_t(color);
    return join(newcomer, members, deadline, handle);
}

// Splits on a thread of its own, and returns at once, with success and without a handle, as NCCL does: the
// state of the parent tells when the handle is in its place.
Result split_later(const std::shared_ptr<Communicator>& parent, int color, int key, bool is_blocking,
                   void** handle) {
    constexpr std::chrono::milliseconds PAUSE{2};
    parent->is_splitting = true;
    std::thread([=] {
        std::this_thread::sleep_for(PAUSE);
        void* made = nullptr;
        const Result result = split(*parent, color, key, &made);
        if (result != SUCCESS) parent->fail(result, last_error());
        if (const auto communicator = communicator_of(made)) communicator->is_blocking = is_blocking;
        __atomic_store_n(handle, made, __ATOMIC_RELEASE);
        parent->is_splitting = false;
    }).detach();
    return SUCCESS;
}

int find(void* handle, const char* call, std::shared_ptr<Communicator>* found) {
    *found = communicator_of(handle);
    return *found ? SUCCESS
                  : misuse(INVALID_ARGUMENT, std::string(call) + " of " + problem_of_handle(handle));
}

}  // namespace

NCCL ncclGetVersion(int* version) {
    if (!version) return misuse(INVALID_ARGUMENT, "no place for the version");
    *version = int(settings().version);
    return SUCCESS;
}

extern "C" __attribute__((visibility("default"))) const char* ncclGetErrorString(int result) {
    return description_of(result);
}

extern "C" __attribute__((visibility("default"))) const char* ncclGetLastError(void* handle) {
    const auto communicator = communicator_of(handle);
    if (communicator && communicator->error() != SUCCESS)
        fail(communicator->error(), communicator->problem());
    Making making;
    if (find_making(handle, &making)) fail(making.result, making.problem);
    return last_error();
}

NCCL ncclGetUniqueId(UniqueId* id) {
    if (!id) return misuse(INVALID_ARGUMENT, "no place for the unique id");
    return create_unique_id(id) ? SUCCESS : fail(SYSTEM_ERROR, "the system has no sockets left");
}

NCCL ncclCommInitRank(void** handle, int ranks, UniqueId id, int rank) {
    return init(handle, ranks, id, rank, true);
}

NCCL ncclCommInitRankConfig(void** handle, int ranks, UniqueId id, int rank, void* configuration) {
    return init(handle, ranks, id, rank, may_block(configuration));
}

NCCL ncclCommSplit(void* handle, int color, int key, void** split_handle, void* configuration) {
    std::shared_ptr<Communicator> parent;
    if (const int result = find(handle, "ncclCommSplit", &parent)) return result;
    if (!split_handle || color < NO_COLOR) return misuse(INVALID_ARGUMENT, "ncclCommSplit: no such color");
    *split_handle = nullptr;
    if (const Result error = parent->error()) return fail(error, parent->problem());
    if (!parent->is_blocking) return split_later(parent, color, key, may_block(configuration), split_handle);
    return submit_blocking([=] { return split(*parent, color, key, split_handle); });
}

// Ends what was launched; nothing more may be.
NCCL ncclCommFinalize(void* handle) {
    std::shared_ptr<Communicator> communicator;
    if (const int result = find(handle, "ncclCommFinalize", &communicator)) return result;
    if (communicator->is_finalized.exchange(true))
        return misuse(INVALID_USAGE, "ncclCommFinalize of a communicator that is finalized");
    communicator->finish();
    return SUCCESS;
}

NCCL ncclCommDestroy(void* handle) {
    if (give_up_handle(handle)) return SUCCESS;
    const auto communicator = remove_communicator(handle);
    if (!handle) return SUCCESS;
    if (!communicator) return misuse(INVALID_ARGUMENT, "ncclCommDestroy of " + problem_of_handle(handle));
    communicator->finish();
    communicator->close(true);
    return SUCCESS;
}

// Ends what was launched at once, whatever it waits for.
NCCL ncclCommAbort(void* handle) {
    if (give_up_handle(handle)) return SUCCESS;
    const auto communicator = remove_communicator(handle);
    if (!handle) return SUCCESS;
    if (!communicator) return misuse(INVALID_ARGUMENT, "ncclCommAbort of " + problem_of_handle(handle));
    communicator->close(false);
    return SUCCESS;
}

NCCL ncclCommGetAsyncError(void* handle, int* error) {
    Making making;
    if (find_making(handle, &making)) {
        *error = making.result;
        return SUCCESS;
    }
    std::shared_ptr<Communicator> communicator;
    if (const int result = find(handle, "ncclCommGetAsyncError", &communicator)) return result;
    *error = communicator->error();
    if (*error == SUCCESS && (communicator->is_splitting || communicator->is_answering())) *error = IN_PROGRESS;
    return SUCCESS;
}

NCCL ncclCommCount(void* handle, int* count) {
    std::shared_ptr<Communicator> communicator;
    if (const int result = find(handle, "ncclCommCount", &communicator)) return result;
    *count = communicator->place.ranks;
    return SUCCESS;
}

NCCL ncclCommUserRank(void* handle, int* rank) {
    std::shared_ptr<Communicator> communicator;
    if (const int result = find(handle, "ncclCommUserRank", &communicator)) return result;
    *rank = communicator->place.rank;
    return SUCCESS;
}

NCCL ncclCommCuDevice(void* handle, int* device) {
    std::shared_ptr<Communicator> communicator;
    if (const int result = find(handle, "ncclCommCuDevice", &communicator)) return result;
    *device = communicator->place.device;
    return SUCCESS;
}
