// Streams and events.
#include "api.h"
#include "device.h"
#include "errors.h"
#include "schedule.h"
#include "settings.h"

using namespace cuda_stand_in;

namespace {
constexpr unsigned STREAM_NON_BLOCKING = 1, EVENT_DISABLE_TIMING = 2;
}

API cuStreamCreateWithPriority(void** handle, unsigned flags, int priority) {
    if (const int status = status_of_context()) return status;
    if (!handle || flags > STREAM_NON_BLOCKING) return INVALID_VALUE;
    *handle = create_stream(*current_device(), flags != STREAM_NON_BLOCKING, priority).get();
    return SUCCESS;
}

API cuStreamCreate(void** handle, unsigned flags) { return cuStreamCreateWithPriority(handle, flags, 0); }

API cuStreamGetPriority(void* handle, int* priority) {
    const auto stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    *priority = stream->priority;
    return SUCCESS;
}

// What was enqueued still runs, as late as it may.
API cuStreamDestroy_v2(void* handle) {
    enter_current("cuStreamDestroy_v2");
    return destroy_stream(handle) ? SUCCESS : INVALID_HANDLE;
}

API cuStreamSynchronize(void* handle) {
    if (const int status = status_of_context()) return status;
    const auto stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    counts().stream_synchronizations++;
    run_until(end_of(stream));
    return stream->device->error;
}

API cuStreamQuery(void* handle) {
    if (const int status = status_of_context()) return status;
    const auto stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    return poll(end_of(stream)) ? int(stream->device->error) : NOT_READY;
}

API cuStreamWaitEvent(void* handle, void* event_handle, unsigned) {
    if (const int status = status_of_context()) return status;
    const auto stream = stream_of(handle);
    const auto event = event_of(event_handle);
    if (!stream || !event) return INVALID_HANDLE;
    Operation operation;
    operation.name = "event wait";
    operation.runs_alone = false;
    operation.waits_for = point_of(*event);
    operation.runs_after_errors = true;
    enqueue(stream, std::move(operation));
    return SUCCESS;
}

API cuLaunchHostFunc(void* handle, void (*function)(void*), void* argument) {
    if (const int status = status_of_context()) return status;
    const auto stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    Operation operation;
    operation.name = "host function";
    operation.runs_alone = false;
    operation.run = [=] {
        function(argument);
        return SUCCESS;
    };
    enqueue(stream, std::move(operation));
    return SUCCESS;
}

API cuEventCreate(void** handle, unsigned flags) {
    if (const int status = status_of_context()) return status;
    if (!handle) return INVALID_VALUE;
    *handle = create_event(!(flags & EVENT_DISABLE_TIMING));
    return SUCCESS;
}

API cuEventDestroy_v2(void* handle) {
    enter_current("cuEventDestroy_v2");
    return destroy_event(handle) ? SUCCESS : INVALID_HANDLE;
}

API cuEventRecord(void* event_handle, void* stream_handle) {
    if (const int status = status_of_context()) return status;
    const auto event = event_of(event_handle);
    const auto stream = stream_of(stream_handle);
    if (!event || !stream) return INVALID_HANDLE;
    record(event, stream);
    return SUCCESS;
}

API cuEventQuery(void* handle) {
    if (const int status = status_of_context()) return status;
    const auto event = event_of(handle);
    if (!event) return INVALID_HANDLE;
    return poll(point_of(*event)) ? SUCCESS : NOT_READY;
}

API cuEventSynchronize(void* handle) {
    if (const int status = status_of_context()) return status;
    const auto event = event_of(handle);
    if (!event) return INVALID_HANDLE;
    counts().event_synchronizations++;
    const Point point = point_of(*event);
    run_until(point);
    return point.stream ? int(point.stream->device->error) : SUCCESS;
}

API cuEventElapsedTime_v2(float* milliseconds, void* start_handle, void* end_handle) {
    if (const int status = status_of_context()) return status;
    const auto start = event_of(start_handle), end = event_of(end_handle);
    if (!start || !end || !start->has_time || !end->has_time) return INVALID_HANDLE;
    const Point first = point_of(*start), last = point_of(*end);
    if (!first.stream || !last.stream) return INVALID_HANDLE;
    if (!is_reached(first) || !is_reached(last)) return NOT_READY;
    *milliseconds = elapsed_milliseconds(*start, *end);
    return SUCCESS;
}

API cuEventElapsedTime(float* milliseconds, void* start, void* end) {
    return cuEventElapsedTime_v2(milliseconds, start, end);
}
