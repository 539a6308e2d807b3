// What kernels call where the compiler's checks fail. The compiler passes a place in the source.
#include "errors.h"
#include "worker.h"

namespace {

// The first member of what the compiler passes, by the interface of its runtime library.
struct Place {
    const char* file;
    unsigned line, column;
};

[[noreturn]] void fail(int error, const char* problem, const void* check) {
    const auto* place = static_cast<const Place*>(check);
    cuda_stand_in::current_worker()->fail(
        error, std::string(problem) + " at " + cuda_stand_in::place_text(place->file, place->line));
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void __ubsan_handle_type_mismatch_v1_abort(const void* check, const void* pointer) {
    // Checks of other kinds than alignment are off, but for null.
    if (!pointer) fail(cuda_stand_in::ILLEGAL_ADDRESS, "null address", check);
    fail(cuda_stand_in::MISALIGNED_ADDRESS, "misaligned address", check);
}

EXPORT void __ubsan_handle_out_of_bounds_abort(const void* check, const void*) {
    fail(cuda_stand_in::ILLEGAL_ADDRESS, "index behind the end of an array", check);
}
