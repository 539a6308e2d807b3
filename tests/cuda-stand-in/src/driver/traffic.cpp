#include "traffic.h"

#include "worker.h"

#include <algorithm>

namespace cuda_stand_in {

bool Traffic::in_buffer(const void* address) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    const auto holds = [at](const AddressRange& range) { return range.begin <= at && at < range.end; };
    if (last_ < buffers_.size() && holds(buffers_[last_])) return true;
    const auto is_before = [](const AddressRange& range, uintptr_t value) { return range.end <= value; };
    const auto found = std::lower_bound(buffers_.begin(), buffers_.end(), at, is_before);
    if (found == buffers_.end() || !holds(*found)) return false;
    last_ = size_t(found - buffers_.begin());
    return true;
}

}  // namespace cuda_stand_in

// What kernels call, by the interface of the compiler's runtime library for data races.
#define EXPORT extern "C" __attribute__((visibility("default")))
using cuda_stand_in::current_worker;

#define ACCESSES(bytes)                                                                                   \
    EXPORT void __tsan_read##bytes(void* address) { current_worker()->traffic().load(address, bytes); }   \
    EXPORT void __tsan_write##bytes(void* address) { current_worker()->traffic().store(address, bytes); } \
    EXPORT void __tsan_volatile_read##bytes(void* address) { __tsan_read##bytes(address); }               \
    EXPORT void __tsan_volatile_write##bytes(void* address) { __tsan_write##bytes(address); }

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

EXPORT void __tsan_read_range(void* address, unsigned long bytes) {
    current_worker()->traffic().load(address, bytes);
}
EXPORT void __tsan_write_range(void* address, unsigned long bytes) {
    current_worker()->traffic().store(address, bytes);
}
// Atomic operations are such functions themselves; each loads and stores.
EXPORT int __tsan_atomic32_fetch_add(volatile int* x, int value, int) {
    __tsan_read4(const_cast<int*>(x));
    __tsan_write4(const_cast<int*>(x));
    return __atomic_fetch_add(x, value, __ATOMIC_RELAXED);
}
EXPORT int __tsan_atomic32_load(const volatile int* x, int) { return __atomic_load_n(x, __ATOMIC_RELAXED); }
EXPORT bool __tsan_atomic32_compare_exchange_weak(volatile int* x, int* before, int after, int, int) {
    __tsan_read4(const_cast<int*>(x));
    __tsan_write4(const_cast<int*>(x));
    return __atomic_compare_exchange_n(x, before, after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
EXPORT void __tsan_init() {}
EXPORT void __tsan_func_entry(void*) {}
EXPORT void __tsan_func_exit() {}
EXPORT void __tsan_vptr_update(void**, void*) {}
