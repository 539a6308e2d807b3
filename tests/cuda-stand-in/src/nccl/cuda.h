// The functions of the CUDA driver that the library calls.
#pragma once

#include "../driver/control.h"

extern "C" {
int cuCtxGetCurrent(void** context);
int cuCtxSetCurrent(void* context);
int cuCtxGetDevice(int* ordinal);
int cuEventCreate(void** event, unsigned flags);
int cuEventRecord(void* event, void* stream);
int cuEventDestroy_v2(void* event);
int cuStreamCreate(void** stream, unsigned flags);
int cuStreamDestroy_v2(void* stream);
int cuStreamWaitEvent(void* stream, void* event, unsigned flags);
}

namespace nccl_stand_in {

constexpr int CUDA_SUCCESS = 0, CUDA_ILLEGAL_ADDRESS = 700;
constexpr unsigned EVENT_DISABLE_TIMING = 2, STREAM_NON_BLOCKING = 1;

// Makes a context current on this host thread while it lives.
class CurrentContext {
public:
    explicit CurrentContext(void* context) {
        cuCtxGetCurrent(&earlier_);
        status_ = cuCtxSetCurrent(context);
    }
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;
    ~CurrentContext() { cuCtxSetCurrent(earlier_); }

    int status() const { return status_; }

private:
    void* earlier_ = nullptr;
    int status_;
};

}  // namespace nccl_stand_in
