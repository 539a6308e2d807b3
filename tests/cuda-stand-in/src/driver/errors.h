// Error codes of the driver, as documented for CUresult.
#pragma once

namespace cuda_stand_in {

enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    FILE_NOT_FOUND = 301,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
    LAUNCH_TIMEOUT = 702,
    MISALIGNED_ADDRESS = 716,
    ILLEGAL_INSTRUCTION = 715,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
};

// The name of a code, or null for a code that the stand-in never returns.
const char* name_of(int error);
const char* description_of(int error);

}  // namespace cuda_stand_in
