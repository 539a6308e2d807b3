// What operations need of the connections of their communicator.
#pragma once

#include "link.h"

#include <functional>
#include <string>

namespace nccl_stand_in {

class Wire {
public:
    virtual ~Wire() = default;
    virtual int rank() const = 0;
    virtual int ranks() const = 0;
    // `sent` is called once the payload has left its buffer.
    virtual void transmit(int peer, const Frame& frame, const void* payload, std::function<void()> sent) = 0;
    // Reports an asynchronous error. Operations that cannot go on stay as they are.
    virtual void fail(Result result, const std::string& problem) = 0;
};

// Called once when an operation has ended.
using Done = std::function<void()>;

}  // namespace nccl_stand_in
