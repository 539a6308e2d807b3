#include "error.h"

#include "../driver/control.h"

namespace nccl_stand_in {

namespace {
thread_local std::string last;
}

const char* description_of(int result) {
    switch (result) {
        case SUCCESS: return "no error";
        case UNHANDLED_CUDA_ERROR: return "a call of CUDA failed";
        case SYSTEM_ERROR: return "a call of the operating system failed";
        case INTERNAL_ERROR: return "internal error";
        case INVALID_ARGUMENT: return "invalid argument";
        case INVALID_USAGE: return "invalid usage";
        case REMOTE_ERROR: return "another rank failed or left";
        case IN_PROGRESS: return "in progress";
        default: return "unknown result";
    }
}

Result fail(Result result, const std::string& problem) {
    last = problem;
    return result;
}

Result misuse(Result result, const std::string& problem) {
    cuda_stand_in_report(problem.c_str());
    return fail(result, problem);
}

const char* last_error() { return last.c_str(); }

}  // namespace nccl_stand_in
