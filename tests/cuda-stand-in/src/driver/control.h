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
// The same for work that waits for work of other streams: it runs beside what computes.
int cuda_stand_in_enqueue_waiting(void* stream, const char* name, int (*run)(void*), void (*destroy)(void*),
                                  void* argument);
// Whether the work that this host thread runs shall end at once.
int cuda_stand_in_is_stopped();
// Runs what an event stands for, or waits for it, without a count.
int cuda_stand_in_finish_event(void* event);
// The ordinal of the device of a stream, or -1.
int cuda_stand_in_device_of_stream(void* stream);
// The ordinal of the device that has a buffer in use with these bytes, or -1.
int cuda_stand_in_device_of_buffer(const void* address, size_t bytes);
// Where an address lies, for messages; returns the length of the text.
int cuda_stand_in_describe(const void* address, char* text, size_t length);
// Makes a device fail with an error code of the driver.
int cuda_stand_in_fail_device(int ordinal, int code, const char* cause);
// Keeps a mistake of the program as the last failure, without an error of a device.
int cuda_stand_in_report(const char* cause);
// Whether a buffer that lives now holds these bytes.
int cuda_stand_in_is_open(const void* address, size_t bytes);
int cuda_stand_in_count_matrix_product();
// Loads kernels of a library, in a call of this name: waits for all work of the context of this thread.
int cuda_stand_in_load(const char* call);
}
#pragma GCC visibility pop
