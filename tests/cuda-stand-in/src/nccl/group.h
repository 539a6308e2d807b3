// Groups of calls, per host thread.
//
// The operations of a group begin together when the outermost group ends: those of one communicator as one
// piece of work, which waits for all streams that the group names and holds them up until it has ended.
// Communicators follow each other in the order of their first call in the group. Operations of one
// communicator run in the order of their calls, whatever their streams.
#pragma once

#include "communicator.h"

#include <functional>

namespace nccl_stand_in {

void start_group();
// Launches what the outermost group has collected, unless a call in it has failed.
Result end_group();

// Launches an operation, or adds it to the group of this host thread.
Result submit(const std::shared_ptr<Communicator>& communicator, const Task& task, void* stream);
// Runs work that waits for other ranks, or adds it to the group, whose works run side by side.
Result submit_blocking(std::function<Result()> work);
// Notes that a call in the group of this host thread has failed.
Result fail_group(Result result);

}  // namespace nccl_stand_in
