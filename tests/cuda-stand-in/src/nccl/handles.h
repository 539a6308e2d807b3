// Handles that programs hold: of communicators, and of those that are being made.
//
// A communicator whose calls do not block is made on a thread of its own, and its handle is there at once.
#pragma once

#include "communicator.h"

#include <memory>
#include <string>

namespace nccl_stand_in {

void* add_communicator(std::shared_ptr<Communicator> communicator);
// The communicator of a handle, or null.
std::shared_ptr<Communicator> communicator_of(void* handle);
std::shared_ptr<Communicator> remove_communicator(void* handle);

// Why a communicator is not there yet, or never will be.
struct Making {
    Result result = IN_PROGRESS;
    std::string problem;
};

// A handle whose communicator is being made.
void* reserve_handle();
// Gives the handle its communicator, which ends if the handle has been given up meanwhile.
void complete_handle(void* handle, std::shared_ptr<Communicator> communicator);
// Notes that the communicator of the handle cannot be made.
void fail_handle(void* handle, const Making& making);
// Finds a handle whose communicator is not there.
bool find_making(void* handle, Making* making);
// Gives up a handle whose communicator is not there; false if there is no such one.
bool give_up_handle(void* handle);

}  // namespace nccl_stand_in
