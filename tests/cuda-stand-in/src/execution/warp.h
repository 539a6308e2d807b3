// Operations of the lanes of a warp.
#pragma once

#include "thread.h"

inline void __syncwarp(unsigned mask = 0xffffffffu) {
    cuda_stand_in_warp(cuda_stand_in::WarpOperation::Sync, mask, nullptr);
}

inline unsigned __activemask() { return cuda_stand_in_active_lanes(); }

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    cuda_stand_in::BallotOperands operands{predicate != 0, 0};
    cuda_stand_in_warp(cuda_stand_in::WarpOperation::Ballot, mask, &operands);
    return operands.result;
}

inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

namespace cuda_stand_in {

template <class T>
T shuffle(unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    ShuffleOperands operands{0, source};
    memcpy(&operands.value, &value, sizeof value);
    cuda_stand_in_warp(WarpOperation::Shuffle, mask, &operands);
    memcpy(&value, &operands.value, sizeof value);
    return value;
}

}  // namespace cuda_stand_in

// `width` divides the warp into segments; a lane whose source lies outside of its segment keeps its own
// value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const unsigned lane = cuda_stand_in_lane(), first = lane & ~unsigned(width - 1);
    return cuda_stand_in::shuffle(mask, value, first + (unsigned(source) & unsigned(width - 1)));
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const unsigned lane = cuda_stand_in_lane(), source = lane ^ unsigned(bits);
    const unsigned end = (lane & ~unsigned(width - 1)) + unsigned(width);
    return cuda_stand_in::shuffle(mask, value, source < end ? source : lane);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned offset, int width = 32) {
    const unsigned lane = cuda_stand_in_lane(), end = (lane & ~unsigned(width - 1)) + unsigned(width);
    return cuda_stand_in::shuffle(mask, value, lane + offset < end ? lane + offset : lane);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned offset, int width = 32) {
    const unsigned lane = cuda_stand_in_lane(), first = lane & ~unsigned(width - 1);
    return cuda_stand_in::shuffle(mask, value, lane >= first + offset ? lane - offset : lane);
}
