// Types and codes of NCCL, as its documentation lists them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nccl_stand_in {

enum Result : int {
    SUCCESS = 0,
    UNHANDLED_CUDA_ERROR = 1,
    SYSTEM_ERROR = 2,
    INTERNAL_ERROR = 3,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE_ERROR = 6,
    IN_PROGRESS = 7,
};

enum DataType : int {
    INT8 = 0,
    UINT8 = 1,
    INT32 = 2,
    UINT32 = 3,
    INT64 = 4,
    UINT64 = 5,
    FLOAT16 = 6,
    FLOAT32 = 7,
    FLOAT64 = 8,
    BFLOAT16 = 9,
    FLOAT8_E4M3 = 10,
    FLOAT8_E5M2 = 11,
};

enum Reduction : int { SUM = 0, PRODUCT = 1, MAX = 2, MIN = 3, AVERAGE = 4 };

struct UniqueId {
    char bytes[128];
};

// The bytes of an element, or 0 for a code that is no type.
constexpr size_t bytes_of(int type) {
    switch (type) {
        case INT8:
        case UINT8:
        case FLOAT8_E4M3:
        case FLOAT8_E5M2: return 1;
        case FLOAT16:
        case BFLOAT16: return 2;
        case INT32:
        case UINT32:
        case FLOAT32: return 4;
        case INT64:
        case UINT64:
        case FLOAT64: return 8;
        default: return 0;
    }
}

}  // namespace nccl_stand_in
