// Switches between stacks of one host thread.
#pragma once

#include <cstddef>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_stand_in {

#if defined(__x86_64__)
using Context = void*;  // the stack pointer of a suspended fiber
#else
using Context = ucontext_t*;
#endif

// Suspends the running fiber as `from` and resumes `to`.
void switch_context(Context* from, Context to);

struct Stack {
    unsigned char* low = nullptr;
    unsigned char* high = nullptr;
};

// Prepares a fiber that calls `entry`, which must not return.
Context prepare_context(const Stack& stack, void (*entry)());

// Stacks that fibers borrow. A page below each is not accessible, so an overflow faults.
class Stacks {
public:
    Stacks() = default;
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;
    ~Stacks();

    Stack* take();
    void give_back(Stack* stack) { free_.push_back(stack); }
    // Takes back the stacks of all fibers, which are abandoned.
    void reset() { free_ = all_; }

private:
    void grow();

    std::vector<Stack*> all_, free_;
    std::vector<void*> mappings_;
};

}  // namespace cuda_stand_in
