// Turns the signals of a faulting kernel into an error of its launch.
#pragma once

#include <csignal>

namespace cuda_stand_in {

// Installs the handlers, once per process. Signals of other code go to the handlers that were there before.
void catch_faults();

// Gives this host thread a stack for signal handlers while it lives, unless the thread has one: the stack of
// a fiber may be what overflowed.
class FaultStack {
public:
    FaultStack();
    FaultStack(const FaultStack&) = delete;
    FaultStack& operator=(const FaultStack&) = delete;
    ~FaultStack();

private:
    void* memory_ = nullptr;
};

}  // namespace cuda_stand_in
