#include "worker.h"

#include "errors.h"
#include "faults.h"
#include "launch.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <sys/mman.h>

extern "C" {
__attribute__((visibility("default"))) __thread cuda_stand_in::Place cuda_stand_in_place
    __attribute__((tls_model("initial-exec")));

// Where the thread-local storage of a module begins, for this host thread.
struct TlsIndex {
    unsigned long module, offset;
};
void* __tls_get_addr(TlsIndex* index);
}

namespace cuda_stand_in {

namespace {
constexpr size_t PAGE = 4096, LANE_ORDERS = 64;
constexpr size_t DYNAMIC_MAPPED = (DYNAMIC_BYTES_MAX + PAGE - 1) / PAGE * PAGE;
constexpr int POISON = 0xff;  // NaN in every format of numbers
constexpr uint64_t ASCENDING = 0, DESCENDING = 1;
}  // namespace

std::string place_text(const char* file, unsigned line) {
    const char* slash = strrchr(file, '/');
    return std::string(slash ? slash + 1 : file) + ":" + std::to_string(line);
}

Worker*& current_worker() {
    static __thread Worker* worker __attribute__((tls_model("initial-exec")));
    return worker;
}

Worker::Worker() {
    void* mapping =
        mmap(nullptr, DYNAMIC_MAPPED + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    dynamic_mapping_ = static_cast<unsigned char*>(mapping);
    dynamic_end_ = dynamic_mapping_ + DYNAMIC_MAPPED;
    mprotect(dynamic_end_, PAGE, PROT_NONE);
}

Worker::~Worker() { munmap(dynamic_mapping_, DYNAMIC_MAPPED + PAGE); }

Fault Worker::run(const Launch& launch, std::atomic<size_t>& next) {
    prepare(launch);
    traffic_ = Traffic(launch.buffers);
    Worker* const outer = current_worker();
    const Place outer_place = cuda_stand_in_place;
    FaultStack fault_stack;
    current_worker() = this;
    is_running_ = true;
    fault_ = {};
    if (_setjmp(escape_) == 0) {
        run_blocks(launch, next);
    } else {
        stacks_.reset();
        for (Thread& thread : threads_) thread.copies.clear(), thread.ends.clear();
        next = launch.blocks();
    }
    is_running_ = false;
    current_worker() = outer;
    cuda_stand_in_place = outer_place;
    return fault_;
}

void Worker::prepare(const Launch& launch) {
    launch_ = &launch;
    const size_t threads = launch.threads(), warps = (threads + 31) / 32;
    if (threads_.size() < threads) threads_.resize(threads);
    warps_.resize(warps);
    warp_order_.resize(warps);
    for (size_t i = 0; i < threads; i++) {
        const unsigned x = launch.block.x, y = launch.block.y;
        threads_[i].number = unsigned(i);
        threads_[i].index = {unsigned(i % x), unsigned(i / x % y), unsigned(i / x / y)};
    }
    std::iota(warp_order_.begin(), warp_order_.end(), 0u);
    if (launch.order == DESCENDING) std::reverse(warp_order_.begin(), warp_order_.end());
    random_state_ = launch.order * 0x9e3779b97f4a7c15u + 1;
    const size_t orders = launch.order > DESCENDING ? LANE_ORDERS : 1;
    lane_orders_.resize(orders * 32);
    for (size_t i = 0; i < orders; i++) {
        unsigned char* lanes = &lane_orders_[i * 32];
        std::iota(lanes, lanes + 32, static_cast<unsigned char>(0));
        if (launch.order == DESCENDING) std::reverse(lanes, lanes + 32);
        if (launch.order > DESCENDING)
            for (unsigned j = 31; j > 0; j--) std::swap(lanes[j], lanes[random() % (j + 1)]);
    }
    lane_order_ = lane_orders_.data();
}

void Worker::run_blocks(const Launch& launch, std::atomic<size_t>& next) {
    static_shared_ = nullptr;
    if (launch.shared_module_bytes > 0) {
        TlsIndex index{launch.shared_module, 0};
        static_shared_ = static_cast<unsigned char*>(__tls_get_addr(&index));
    }
    Place& place = cuda_stand_in_place;
    place.dynamic_shared = dynamic_end_ - (launch.dynamic_bytes + 15) / 16 * 16;
    place.grid_dim = launch.grid;
    place.block_dim = launch.block;
    const size_t blocks = launch.blocks();
    // A step coprime to the number of blocks visits each block once.
    size_t step = 1, start = 0;
    if (launch.order > DESCENDING) {
        step = launch.order * 0x9e3779b1u % blocks | 1;
        while (std::gcd(step, blocks) != 1) step += 2;
        start = launch.order % blocks;
    }
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < blocks;) {
        const size_t at = launch.order == DESCENDING ? blocks - 1 - i : (start + i % blocks * step) % blocks;
        place.block_index = {unsigned(at % launch.grid.x), unsigned(at / launch.grid.x % launch.grid.y),
                             unsigned(at / launch.grid.x / launch.grid.y)};
        run_block();
    }
}

void Worker::poison_shared() {
    if (launch_->dynamic_bytes > 0)
        memset(cuda_stand_in_place.dynamic_shared, POISON,
               size_t(dynamic_end_ - cuda_stand_in_place.dynamic_shared));
    if (static_shared_) memset(static_shared_, POISON, launch_->shared_module_bytes);
}

void Worker::run_block() {
    poison_shared();
    const size_t threads = launch_->threads();
    for (size_t i = 0; i < warps_.size(); i++) {
        const size_t lanes = std::min<size_t>(32, threads - i * 32);
        Warp& warp = warps_[i];
        warp.fresh = lanes == 32 ? ~0u : (1u << lanes) - 1;
        warp.ready = warp.waiting = warp.at_barrier = 0;
    }
    barrier_file_ = nullptr;
    for (;;) {
        if (launch_->order > DESCENDING)
            for (size_t i = warp_order_.size() - 1; i > 0; i--)
                std::swap(warp_order_[i], warp_order_[random() % (i + 1)]);
        for (unsigned warp : warp_order_)
            if (warps_[warp].fresh | warps_[warp].ready) run_warp(warp);
        if (!barrier_file_) break;
        release_barrier();
    }
    for (const Warp& warp : warps_)
        if (warp.waiting) fail(LAUNCH_FAILED, "lanes wait for lanes of their warp that never come");
}

void Worker::release_barrier() {
    for (Warp& warp : warps_) {
        if (warp.waiting)
            fail(LAUNCH_FAILED, "threads of a block wait at different barriers: some lanes at " +
                                    place_text(barrier_file_, barrier_line_) +
                                    ", others at an operation of their warp");
        warp.ready = warp.at_barrier;
        warp.at_barrier = 0;
    }
    barrier_file_ = nullptr;
}

void Worker::run_warp(size_t warp_index) {
    warp_ = warp_index;
    Warp& warp = warps_[warp_index];
    do {
        turn_ = warp.fresh | warp.ready;
        position_ = 0;
        if (launch_->order > DESCENDING) lane_order_ = &lane_orders_[random() % LANE_ORDERS * 32];
        if (Thread* first = next_in_turn()) resume(&scheduler_, first);
    } while (warp.waiting && complete_operations(warp));
}

// The next lane of the warp that can run in this turn.
inline Worker::Thread* Worker::next_in_turn() {
    while (position_ < 32) {
        const unsigned lane = lane_order_[position_++];
        if (turn_ >> lane & 1) return &threads_[warp_ * 32 + lane];
    }
    return nullptr;
}

inline void Worker::resume(Context* from, Thread* next) {
    Warp& warp = warps_[warp_];
    const unsigned bit = 1u << next->number % 32;
    thread_ = next;
    cuda_stand_in_place.thread_index = &next->index;
    if (warp.fresh & bit) {
        warp.fresh &= ~bit;
        next->stack = stacks_.take();
        next->context = prepare_context(*next->stack, run_threads);
    } else {
        warp.ready &= ~bit;
    }
    switch_context(from, next->context);
}

// Leaves the running thread, which has entered one of the sets that wait.
inline void Worker::suspend() {
    Thread* self = thread_;
    if (Thread* next = next_in_turn()) resume(&self->context, next);
    else switch_context(&self->context, scheduler_);
}

void Worker::run_threads() { current_worker()->run_threads_here(); }

// Runs threads on this stack: the first, and while threads end and the next one is fresh, that one too.
void Worker::run_threads_here() {
    for (;;) {
        launch_->kernel->run(launch_->parameters);
        Thread* ended = thread_;
        if (!ended->copies.empty()) fail(LAUNCH_FAILED, "a copy to shared memory was never waited for");
        Thread* next = next_in_turn();
        const unsigned bit = next ? 1u << next->number % 32 : 0;
        if (next && (warps_[warp_].fresh & bit)) {
            warps_[warp_].fresh &= ~bit;
            next->stack = ended->stack;
            thread_ = next;
            cuda_stand_in_place.thread_index = &next->index;
            continue;
        }
        stacks_.give_back(ended->stack);
        if (next) resume(&ended->context, next);
        else switch_context(&ended->context, scheduler_);
    }
}

void Worker::wait_at_barrier(const char* file, int line) {
    if (!barrier_file_) {
        barrier_file_ = file;
        barrier_line_ = line;
    } else if (line != barrier_line_ || (file != barrier_file_ && strcmp(file, barrier_file_) != 0)) {
        fail(LAUNCH_FAILED, "threads of a block wait at different barriers: " +
                                place_text(barrier_file_, barrier_line_) + " and " + place_text(file, line));
    }
    warps_[warp_].at_barrier |= 1u << lane();
    suspend();
}

void Worker::wait_for_warp(WarpOperation operation, unsigned mask, void* operands) {
    Warp& warp = warps_[warp_];
    const unsigned at = lane();
    if (!(mask >> at & 1)) fail(LAUNCH_FAILED, "a lane is not in the mask that it gives");
    if (warp.waiting) {
        const int first = std::countr_zero(warp.waiting);
        warp.is_uniform &= warp.masks[first] == mask && warp.operations[first] == operation;
    } else {
        warp.is_uniform = true;
    }
    warp.waiting |= 1u << at;
    warp.masks[at] = mask;
    warp.operands[at] = operands;
    warp.operations[at] = operation;
    suspend();
}

unsigned Worker::active_lanes() const { return warps_[warp_].live() | 1u << lane(); }

// Runs the operations whose lanes have all come; returns whether there was one. Lanes that ended are not
// missed.
bool Worker::complete_operations(Warp& warp) {
    const unsigned live = warp.live();
    if (warp.is_uniform && (warp.masks[std::countr_zero(warp.waiting)] & live) == warp.waiting) {
        complete_operation(warp, warp.waiting);
        return true;
    }
    bool has_completed = false;
    for (unsigned left = warp.waiting; left;) {
        const unsigned first = unsigned(std::countr_zero(left)), mask = warp.masks[first];
        unsigned arrived = 0;
        bool is_one_operation = true;
        for (unsigned lanes = warp.waiting & mask; lanes; lanes &= lanes - 1) {
            const unsigned lane = unsigned(std::countr_zero(lanes));
            if (warp.masks[lane] != mask) continue;
            arrived |= 1u << lane;
            is_one_operation &= warp.operations[lane] == warp.operations[first];
        }
        left &= ~arrived;
        if ((mask & live) != arrived) continue;
        if (!is_one_operation) fail(LAUNCH_FAILED, "lanes of a warp are at different operations of the warp");
        complete_operation(warp, arrived);
        has_completed = true;
    }
    return has_completed;
}

void Worker::complete_operation(Warp& warp, unsigned group) {
    int error = LAUNCH_FAILED;
    const WarpOperation operation = warp.operations[std::countr_zero(group)];
    if (const char* problem = run_warp_operation(operation, group, warp.operands, *this, &error))
        fail(error, problem);
    warp.waiting &= ~group;
    warp.ready |= group;
}

// A copy reads and lands as late as it may: at the wait. Until then its destination holds poison.
void Worker::copy_async(void* shared, const void* global, bool is_there) {
    if (reinterpret_cast<uintptr_t>(shared) % 16 || (is_there && reinterpret_cast<uintptr_t>(global) % 16))
        fail(MISALIGNED_ADDRESS, "an asynchronous copy is not aligned to 16 bytes");
    if (!is_shared(shared, 16)) fail(ILLEGAL_ADDRESS, "an asynchronous copy writes outside of shared memory");
    memset(shared, POISON, 16);
    thread_->copies.push_back({shared, global, is_there});
}

void Worker::copy_commit() { thread_->ends.push_back(thread_->copies.size()); }

void Worker::copy_wait(size_t groups_left) {
    std::vector<size_t>& ends = thread_->ends;
    if (ends.size() <= groups_left) return;
    std::vector<Copy>& copies = thread_->copies;
    const size_t groups = ends.size() - groups_left, landed = ends[groups - 1];
    for (size_t i = 0; i < landed; i++) {
        traffic_.load(copies[i].global, copies[i].is_there ? 16 : 0);
        if (copies[i].is_there) memcpy(copies[i].shared, copies[i].global, 16);
        else memset(copies[i].shared, 0, 16);
    }
    copies.erase(copies.begin(), copies.begin() + ptrdiff_t(landed));
    ends.erase(ends.begin(), ends.begin() + ptrdiff_t(groups));
    for (size_t& end : ends) end -= landed;
}

bool Worker::is_shared(const void* address, size_t bytes) const {
    const auto* at = static_cast<const unsigned char*>(address);
    if (at >= cuda_stand_in_place.dynamic_shared && at + bytes <= dynamic_end_) return true;
    return static_shared_ && at >= static_shared_ &&
           at + bytes <= static_shared_ + launch_->shared_module_bytes;
}

void Worker::fail(int error, const std::string& message) {
    const Dim thread = thread_ ? thread_->index : Dim{}, block = cuda_stand_in_place.block_index;
    const auto text = [](const Dim& at) {
        return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
    };
    fault_ = {error, std::string(launch_->kernel->name) + ": " + message + ", block " + text(block) +
                         ", thread " + text(thread)};
    is_running_ = false;
    _longjmp(escape_, 1);
}

unsigned Worker::random() {
    random_state_ ^= random_state_ << 13;
    random_state_ ^= random_state_ >> 7;
    random_state_ ^= random_state_ << 17;
    return unsigned(random_state_ >> 32);
}

}  // namespace cuda_stand_in

#define EXPORT extern "C" __attribute__((visibility("default")))
using cuda_stand_in::current_worker;

EXPORT void cuda_stand_in_barrier(const char* file, int line) {
    current_worker()->wait_at_barrier(file, line);
}
EXPORT void cuda_stand_in_warp(cuda_stand_in::WarpOperation operation, unsigned mask, void* operands) {
    current_worker()->wait_for_warp(operation, mask, operands);
}
EXPORT unsigned cuda_stand_in_lane() { return current_worker()->lane(); }
EXPORT unsigned cuda_stand_in_active_lanes() { return current_worker()->active_lanes(); }
EXPORT void cuda_stand_in_copy_async(void* shared, const void* global, bool is_there) {
    current_worker()->copy_async(shared, global, is_there);
}
EXPORT void cuda_stand_in_copy_commit() { current_worker()->copy_commit(); }
EXPORT void cuda_stand_in_copy_wait(unsigned groups_left) { current_worker()->copy_wait(groups_left); }
EXPORT void cuda_stand_in_trap(const char* reason) {
    current_worker()->fail(cuda_stand_in::ILLEGAL_INSTRUCTION, reason);
}
