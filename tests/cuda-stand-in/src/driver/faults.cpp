#include "faults.h"

#include "device.h"
#include "errors.h"
#include "worker.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace cuda_stand_in {

namespace {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr size_t FAULT_STACK_BYTES = 64 << 10;
struct sigaction earlier[4];

void pass_on(int signal, siginfo_t* info, void* context) {
    for (int i = 0; i < 4; i++) {
        if (SIGNALS[i] != signal) continue;
        if (earlier[i].sa_flags & SA_SIGINFO) return earlier[i].sa_sigaction(signal, info, context);
        if (earlier[i].sa_handler != SIG_DFL && earlier[i].sa_handler != SIG_IGN)
            return earlier[i].sa_handler(signal);
    }
    // The instruction faults again, now with the default action.
    ::signal(signal, SIG_DFL);
}

void handle(int signal, siginfo_t* info, void* context) {
    Worker* worker = current_worker();
    if (!worker || !worker->is_running()) return pass_on(signal, info, context);
    char text[80];
    switch (signal) {
        case SIGSEGV:
            // The processor gives no address if an operand is not aligned.
            if (info->si_code == SI_KERNEL) worker->fail(MISALIGNED_ADDRESS, "misaligned address");
            [[fallthrough]];
        case SIGBUS:
            snprintf(text, sizeof text, "illegal address %p", info->si_addr);
            worker->fail(ILLEGAL_ADDRESS, std::string(text) + ", " + describe_address(info->si_addr));
        case SIGFPE: worker->fail(LAUNCH_FAILED, "integer division by zero");
        default: worker->fail(ILLEGAL_INSTRUCTION, "illegal instruction");
    }
}

}  // namespace

void catch_faults() {
    static std::once_flag once;
    std::call_once(once, [] {
        for (int i = 0; i < 4; i++) {
            struct sigaction action{};
            action.sa_sigaction = handle;
            // The handler jumps out: the signal must not stay blocked.
            action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
            sigemptyset(&action.sa_mask);
            sigaction(SIGNALS[i], &action, &earlier[i]);
        }
    });
}

FaultStack::FaultStack() {
    stack_t present{};
    sigaltstack(nullptr, &present);
    if (!(present.ss_flags & SS_DISABLE)) return;
    memory_ = malloc(FAULT_STACK_BYTES);
    stack_t own{};
    own.ss_sp = memory_;
    own.ss_size = FAULT_STACK_BYTES;
    sigaltstack(&own, nullptr);
}

FaultStack::~FaultStack() {
    if (!memory_) return;
    stack_t none{};
    none.ss_flags = SS_DISABLE;
    sigaltstack(&none, nullptr);
    free(memory_);
}

}  // namespace cuda_stand_in
