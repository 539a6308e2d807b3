// Results of calls, with the text that `ncclGetLastError` returns.
#pragma once

#include "types.h"

#include <string>

namespace nccl_stand_in {

const char* description_of(int result);

// Keeps a text as the last error of this host thread, and returns the result.
Result fail(Result result, const std::string& problem);
// The same for a mistake of the program, which the driver keeps as its last failure too.
Result misuse(Result result, const std::string& problem);
// Stays valid until the next failure on this host thread.
const char* last_error();

}  // namespace nccl_stand_in
