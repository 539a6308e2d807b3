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
    constexpr unsigned long long UNDEFINED = ~0ull;  // the value of a lane that takes no part
    unsigned long long values[32];
    memset(values, 0xff, sizeof values);
    static_assert(UNDEFINED == ~0ull);
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

// Lane l gives row l % 8 of matrix l / 8, and gets two neighbours of each matrix.
std::string load_matrix(void* const* operands, bool is_transposed, const Worker& worker, int* error) {
    unsigned short matrices[4][8][8];
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
        memcpy(matrices[lane / 8][lane % 8], row, 16);
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        unsigned* result = static_cast<const LoadMatrixOperands*>(operands[lane])->result;
        const unsigned i = lane / 4, j = lane % 4 * 2;
        for (unsigned m = 0; m < 4; m++) {
            const auto& matrix = matrices[m];
            result[m] = is_transposed ? matrix[j][i] | unsigned(matrix[j + 1][i]) << 16
                                      : matrix[i][j] | unsigned(matrix[i][j + 1]) << 16;
        }
    }
    return {};
}

typedef float Row __attribute__((vector_size(32)));

float low_of(unsigned pair) { return std::bit_cast<float>(pair << 16); }
float high_of(unsigned pair) { return std::bit_cast<float>(pair & 0xffff0000u); }

// c [16, 8] += a [16, 16] x b [16, 8], summed over k in ascending order.
void multiply(void* const* operands) {
    float a[16][16];
    alignas(32) float b[16][8], c[16][8];
    for (unsigned lane = 0; lane < 32; lane++) {
        const auto& own = *static_cast<const MultiplyOperands*>(operands[lane]);
        const unsigned i = lane / 4, j = lane % 4 * 2;
        for (unsigned part = 0; part < 4; part++) {
            float* pair = &a[i + part % 2 * 8][j + part / 2 * 8];
            pair[0] = low_of(own.a[part]);
            pair[1] = high_of(own.a[part]);
        }
        for (unsigned part = 0; part < 2; part++) {
            b[j + part * 8][i] = low_of(own.b[part]);
            b[j + part * 8 + 1][i] = high_of(own.b[part]);
            c[i + part * 8][j] = own.c[part * 2];
            c[i + part * 8][j + 1] = own.c[part * 2 + 1];
        }
    }
    for (unsigned i = 0; i < 16; i++) {
        Row sum;
        memcpy(&sum, c[i], sizeof sum);
        for (unsigned k = 0; k < 16; k++) {
            Row row;
            memcpy(&row, b[k], sizeof row);
            sum += a[i][k] * row;
        }
        memcpy(c[i], &sum, sizeof sum);
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        float* own = static_cast<const MultiplyOperands*>(operands[lane])->c;
        const unsigned i = lane / 4, j = lane % 4 * 2;
        own[0] = c[i][j];
        own[1] = c[i][j + 1];
        own[2] = c[i + 8][j];
        own[3] = c[i + 8][j + 1];
    }
}

}  // namespace

std::string run_warp_operation(WarpOperation operation, unsigned group, void* const* operands,
                               const Worker& worker, int* error) {
    const bool needs_all =
        operation != WarpOperation::Sync && operation != WarpOperation::Shuffle && operation != WarpOperation::Ballot;
    if (needs_all && group != ALL_LANES) return "a matrix operation needs all lanes of its warp";
    switch (operation) {
        case WarpOperation::Sync: break;
        case WarpOperation::Shuffle: shuffle(group, operands); break;
        case WarpOperation::Ballot: ballot(group, operands); break;
        case WarpOperation::LoadMatrix: return load_matrix(operands, false, worker, error);
        case WarpOperation::LoadMatrixTransposed: return load_matrix(operands, true, worker, error);
        case WarpOperation::Multiply: multiply(operands); break;
    }
    return {};
}

}  // namespace cuda_stand_in
