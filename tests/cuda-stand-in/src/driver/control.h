// Functions of the driver library that the compiler and matrix libraries use.
#pragma once

#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {
int cuda_stand_in_get(const char* name, uint64_t* value);
// Enqueues work to a stream. `run` returns an error code of the driver; `destroy` frees the argument.
int cuda_stand_in_enqueue(void* stream, const char* name, int (*run)(void*), void (*destroy)(void*),
                          void* argument);
// Whether a buffer that lives now holds these bytes.
int cuda_stand_in_is_open(const void* address, size_t bytes);
int cuda_stand_in_count_matrix_product();
}
#pragma GCC visibility pop
