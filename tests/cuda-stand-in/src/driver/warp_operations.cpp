// The operations that the lanes of a warp do together, computed once per warp.
#include "errors.h"
#include "worker.h"

#include <bit>
#include <cstring>

namespace cuda_stand_in {

namespace {

constexpr unsigned ALL_LANES = ~0u;

template <class Run>
void for_lanes(unsigned group, Run run) {
    for (; group; group &= group - 1) run(unsigned(std::countr_zero(group)));
}

void shuffle(unsigned group, void* const* operands) {
    unsigned long long values[32];
    memset(values, 0xff, sizeof values);  // of lanes that take no part: undefined, so NaN
    for_lanes(group, [&](unsigned lane) {
        values[lane] = static_cast<const ShuffleOperands*>(operands[lane])->value;
    });
    for_lanes(group, [&](unsigned lane) {
        auto* own = static_cast<ShuffleOperands*>(operands[lane]);
        own->value = values[own->source % 32];
    });
}

void ballot(unsigned group, void* const* operands) {
    unsigned votes = 0;
    for_lanes(group, [&](unsigned lane) {
        votes |= static_cast<const BallotOperands*>(operands[lane])->is_set << lane;
    });
    for_lanes(group, [&](unsigned lane) { static_cast<BallotOperands*>(operands[lane])->result = votes; });
}

// Lane l gives row l % 8 of matrix l / 8, and gets two neighbors of each matrix.
template <bool is_transposed>
const char* load_matrix(void* const* operands, const Worker& worker, int* error) {
    unsigned words[4][8][4];  // pairs of elements
    for (unsigned lane = 0; lane < 32; lane++) {
        const void* row = static_cast<const LoadMatrixOperands*>(operands[lane])->row;
        if (reinterpret_cast<uintptr_t>(row) % 16) {
            *error = MISALIGNED_ADDRESS;
            return "a row of a matrix is not aligned to 16 bytes";
        }
        if (!worker.is_shared(row, 16)) {
            *error = ILLEGAL_ADDRESS;
            return "a row of a matrix lies outside of shared memory";
        }
        memcpy(words[lane / 8][lane % 8], row, 16);
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        unsigned* result = static_cast<const LoadMatrixOperands*>(operands[lane])->result;
        const unsigned i = lane / 4, j = lane % 4;
        for (unsigned m = 0; m < 4; m++) {
            if constexpr (is_transposed) {
                const unsigned shift = i % 2 * 16, low = words[m][j * 2][i / 2] >> shift,
                               high = words[m][j * 2 + 1][i / 2] >> shift;
                result[m] = (low & 0xffffu) | high << 16;
            } else {
                result[m] = words[m][i][j];
            }
        }
    }
    return nullptr;
}

// The rows of the result, or of the first factor, with one k: a column of 16.
typedef float Column __attribute__((vector_size(64)));
typedef unsigned Words __attribute__((vector_size(64)));

// c [16, 8] += a [16, 16] x b [16, 8], summed over k in ascending order. Works on the columns of c and a.
void multiply(void* const* operands) {
    // Words are pairs of bf16 that follow each other along k.
    alignas(64) unsigned a[8][16];
    alignas(64) unsigned b[8][8];
    alignas(64) float c[8][16];
    for (unsigned lane = 0; lane < 32; lane++) {
        const auto& own = *static_cast<const MultiplyOperands*>(operands[lane]);
        const unsigned i = lane / 4, j = lane % 4;
        a[j][i] = own.a[0];
        a[j][i + 8] = own.a[1];
        a[j + 4][i] = own.a[2];
        a[j + 4][i + 8] = own.a[3];
        b[i][j] = own.b[0];
        b[i][j + 4] = own.b[1];
        c[j * 2][i] = own.c[0];
        c[j * 2 + 1][i] = own.c[1];
        c[j * 2][i + 8] = own.c[2];
        c[j * 2 + 1][i + 8] = own.c[3];
    }
    Column sums[8];
    memcpy(sums, c, sizeof sums);
    for (unsigned pair = 0; pair < 8; pair++) {
        Words words;
        memcpy(&words, a[pair], sizeof words);
        const Column low = std::bit_cast<Column>(words << 16),
                     high = std::bit_cast<Column>(words & 0xffff0000u);
#pragma GCC unroll 8
        for (unsigned n = 0; n < 8; n++) {
            sums[n] += low * std::bit_cast<float>(b[n][pair] << 16);
            sums[n] += high * std::bit_cast<float>(b[n][pair] & 0xffff0000u);
        }
    }
    memcpy(c, sums, sizeof sums);
    for (unsigned lane = 0; lane < 32; lane++) {
        float* own = static_cast<const MultiplyOperands*>(operands[lane])->c;
        const unsigned i = lane / 4, j = lane % 4 * 2;
        own[0] = c[j][i];
        own[1] = c[j + 1][i];
        own[2] = c[j][i + 8];
        own[3] = c[j + 1][i + 8];
    }
}

}  // namespace

const char* run_warp_operation(WarpOperation operation, unsigned group, void* const* operands,
                               const Worker& worker, int* error) {
    const bool needs_all = operation != WarpOperation::Sync && operation != WarpOperation::Shuffle &&
                           operation != WarpOperation::Ballot;
    if (needs_all && group != ALL_LANES) return "a matrix operation needs all lanes of its warp";
    switch (operation) {
        case WarpOperation::Sync: break;
        case WarpOperation::Shuffle: shuffle(group, operands); break;
        case WarpOperation::Ballot: ballot(group, operands); break;
        case WarpOperation::LoadMatrix: return load_matrix<false>(operands, worker, error);
        case WarpOperation::LoadMatrixTransposed: return load_matrix<true>(operands, worker, error);
        case WarpOperation::Multiply: multiply(operands); break;
    }
    return nullptr;
}

}  // namespace cuda_stand_in
