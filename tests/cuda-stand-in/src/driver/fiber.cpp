#include "fiber.h"

#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

namespace cuda_stand_in {

#if defined(__x86_64__)

extern "C" void cuda_stand_in_switch_context(void** from, void* to);

// Saves the registers that a callee must keep, and changes stacks. It jumps where it could return: the
// processor predicts a return by the calls of the other stack, always wrong.
asm(R"(
.text
.globl cuda_stand_in_switch_context
.hidden cuda_stand_in_switch_context
.type cuda_stand_in_switch_context, @function
cuda_stand_in_switch_context:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
.size cuda_stand_in_switch_context, . - cuda_stand_in_switch_context
)");

void switch_context(Context* from, Context to) { cuda_stand_in_switch_context(from, to); }

Context prepare_context(const Stack& stack, void (*entry)()) {
    constexpr int SAVED_REGISTERS = 6;
    void** top = reinterpret_cast<void**>(stack.high);
    *--top = nullptr;  // return address of `entry`; keeps its stack aligned
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < SAVED_REGISTERS; i++) *--top = nullptr;
    return top;
}

#else

void switch_context(Context* from, Context to) {
    ucontext_t here;
    *from = &here;
    swapcontext(&here, to);
}

Context prepare_context(const Stack& stack, void (*entry)()) {
    auto* context = reinterpret_cast<ucontext_t*>(stack.low);
    getcontext(context);
    context->uc_stack.ss_sp = stack.low + sizeof(ucontext_t);
    context->uc_stack.ss_size = size_t(stack.high - stack.low) - sizeof(ucontext_t);
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    return context;
}

#endif

namespace {
constexpr size_t PAGE = 4096, STACK_BYTES = 64 << 10, STACKS_PER_MAPPING = 32;
}

Stacks::~Stacks() {
    for (void* mapping : mappings_) munmap(mapping, (STACK_BYTES + PAGE) * STACKS_PER_MAPPING);
    for (Stack* stack : all_) delete stack;
}

Stack* Stacks::take() {
    if (free_.empty()) grow();
    Stack* stack = free_.back();
    free_.pop_back();
    return stack;
}

void Stacks::grow() {
    const size_t bytes = (STACK_BYTES + PAGE) * STACKS_PER_MAPPING;
    void* mapping =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
        perror("cuda stand-in: stacks of threads");
        abort();
    }
    mappings_.push_back(mapping);
    for (size_t i = 0; i < STACKS_PER_MAPPING; i++) {
        auto* low = static_cast<unsigned char*>(mapping) + i * (STACK_BYTES + PAGE);
        mprotect(low, PAGE, PROT_NONE);
        // Tops at different offsets within a page spread the stacks over the sets of the cache.
        const size_t stagger = (all_.size() * 832) % PAGE & ~size_t(63);
        all_.push_back(new Stack{low + PAGE, low + PAGE + STACK_BYTES - stagger});
        free_.push_back(all_.back());
    }
}

}  // namespace cuda_stand_in
