#include "group.h"

#include "cuda.h"
#include "error.h"
#include "local.h"
#include "record.h"

#include <algorithm>
#include <utility>

namespace nccl_stand_in {

namespace {

// The operations of one communicator in a group.
struct Batch {
    std::shared_ptr<Communicator> communicator;
    std::vector<Task> tasks;
    std::vector<void*> streams;  // in the order of their first call
    ChosenFault fault;
    bool has_run = false;
};

struct Group {
    int depth = 0;
    Result result = SUCCESS;
    std::vector<std::unique_ptr<Batch>> batches;
    std::vector<std::function<Result()>> works;
};

Group& group() {
    static thread_local Group group;
    return group;
}

int run_batch(void* argument) {
    auto& batch = *static_cast<Batch*>(argument);
    batch.has_run = true;
    return batch.communicator->run(batch.tasks, batch.fault);
}

void destroy_batch(void* argument) {
    const std::unique_ptr<Batch> batch(static_cast<Batch*>(argument));
    if (!batch->has_run)
        batch->communicator->fail(UNHANDLED_CUDA_ERROR,
                                  "the device had failed, or its context had ended, before " +
                                      batch->tasks.front().text() + " began");
}

// Makes a stream wait for what another one has so far.
int wait_for_stream(void* stream, void* other) {
    void* event = nullptr;
    if (const int status = cuEventCreate(&event, EVENT_DISABLE_TIMING)) return status;
    int status = cuEventRecord(event, other);
    if (status == CUDA_SUCCESS) status = cuStreamWaitEvent(stream, event, 0);
    cuEventDestroy_v2(event);
    return status;
}

int enqueue(std::unique_ptr<Batch> batch) {
    const auto communicator = batch->communicator;
    const auto streams = batch->streams;
    const std::string name = batch->tasks.size() > 1 ? "a group of NCCL" : batch->tasks.front().text();
    for (size_t i = 1; i < streams.size(); i++)
        if (const int status = wait_for_stream(streams[0], streams[i])) return status;
    if (const int status = cuStreamWaitEvent(streams[0], communicator->last_event, 0)) return status;
    if (const int status = cuda_stand_in_enqueue_waiting(streams[0], name.c_str(), run_batch, destroy_batch,
                                                         batch.release()))
        return status;
    if (const int status = cuEventRecord(communicator->last_event, streams[0])) return status;
    if (const int status = cuStreamWaitEvent(communicator->device_stream, communicator->last_event, 0))
        return status;
    for (size_t i = 1; i < streams.size(); i++)
        if (const int status = cuStreamWaitEvent(streams[i], communicator->last_event, 0)) return status;
    return CUDA_SUCCESS;
}

Result launch(std::unique_ptr<Batch> batch) {
    const auto communicator = batch->communicator;
    const std::string problem = problem_of_own(batch->tasks, communicator->place.rank);
    if (!problem.empty()) return misuse(INVALID_USAGE, problem);
    for (const Task& task : batch->tasks) {
        const ChosenFault fault = next_fault(communicator->place.first_rank);
        if (fault.fault != Fault::None) batch->fault = fault;
        counts().operations[int(task.kind)]++;
        counts().bytes += task.send_bytes(communicator->place.rank, communicator->place.ranks);
    }
    const CurrentContext current(communicator->place.context);
    if (current.status() != CUDA_SUCCESS || enqueue(std::move(batch)) != CUDA_SUCCESS)
        return fail(UNHANDLED_CUDA_ERROR,
                    "the context of the communicator has ended, or its device has failed");
    return SUCCESS;
}

Result run_side_by_side(const std::vector<std::function<Result()>>& works) {
    std::vector<Result> results(works.size(), SUCCESS);
    std::vector<std::string> problems(works.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < works.size(); i++)
        threads.emplace_back([&, i] {
            results[i] = works[i]();
            problems[i] = last_error();
        });
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < works.size(); i++)
        if (results[i] != SUCCESS) return fail(results[i], problems[i]);
    return SUCCESS;
}

}  // namespace

void start_group() { group().depth++; }

Result end_group() {
    Group& own = group();
    if (own.depth == 0) return misuse(INVALID_USAGE, "ncclGroupEnd without ncclGroupStart");
    if (--own.depth > 0) return SUCCESS;
    auto batches = std::exchange(own.batches, {});
    const auto works = std::exchange(own.works, {});
    Result result = std::exchange(own.result, SUCCESS);
    if (result == SUCCESS) result = run_side_by_side(works);
    for (auto& batch : batches) {
        const auto communicator = batch->communicator;
        if (result == SUCCESS) result = launch(std::move(batch));
        communicator->give_up();
    }
    return result;
}

Result submit(const std::shared_ptr<Communicator>& communicator, const Task& task, void* stream) {
    Group& own = group();
    if (!communicator->claim())
        return misuse(INVALID_USAGE, task.text() + ": another host thread is in a call of the communicator");
    const auto is_same = [&](const auto& batch) { return batch->communicator == communicator; };
    auto found = std::find_if(own.batches.begin(), own.batches.end(), is_same);
    if (found == own.batches.end()) {
        own.batches.push_back(std::make_unique<Batch>());
        found = std::prev(own.batches.end());
        (*found)->communicator = communicator;
    }
    Batch& batch = **found;
    batch.tasks.push_back(task);
    if (std::find(batch.streams.begin(), batch.streams.end(), stream) == batch.streams.end())
        batch.streams.push_back(stream);
    const auto& place = communicator->place;
    record_launch({place.id, place.rank, int(task.kind), task.peer, task.type, task.count});
    return SUCCESS;
}

Result submit_blocking(std::function<Result()> work) {
    Group& own = group();
    if (own.depth == 0) return work();
    own.works.push_back(std::move(work));
    return SUCCESS;
}

Result fail_group(Result result) {
    if (result != SUCCESS && group().result == SUCCESS) group().result = result;
    return result;
}

}  // namespace nccl_stand_in
