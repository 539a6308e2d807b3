// How functions of the library are exported, and what they share.
#pragma once

#include "types.h"

#include <string>

#define NCCL extern "C" __attribute__((visibility("default"))) int

namespace nccl_stand_in {

// Whether streams have threads, without which operations of several ranks cannot wait for each other.
bool is_threaded();
// A text for a handle that is no communicator.
std::string problem_of_handle(const void* handle);

}  // namespace nccl_stand_in
