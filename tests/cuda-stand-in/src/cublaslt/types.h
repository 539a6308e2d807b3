// Codes of cuBLASLt, as documented, and the objects behind its handles.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_stand_in {

enum Status : int {
    SUCCESS = 0,
    NOT_INITIALIZED = 1,
    INVALID_VALUE = 7,
    EXECUTION_FAILED = 13,
    NOT_SUPPORTED = 15,
};

enum Type : int { F32 = 0, BF16 = 14 };

enum ComputeType : int {
    COMPUTE_32F = 68,
    COMPUTE_32F_PEDANTIC = 69,
    COMPUTE_32F_FAST_16BF = 75,
    COMPUTE_32F_FAST_TF32 = 77,
};

enum Order : int { COLUMN = 0, ROW = 1 };
enum Transpose : int { NO_TRANSPOSE = 0, TRANSPOSE = 1, CONJUGATE_TRANSPOSE = 2 };
enum PointerMode : int { HOST = 0 };

// Bits of epilogues; documented epilogues are sums of them.
enum EpilogueBit : unsigned {
    RELU_BIT = 2,
    BIAS_BIT = 4,
    BGRAD_BIT = 16,
    GELU_BIT = 32,
    DGELU_BIT = 64,
    AUX_BIT = 128,
    BGRADA_BIT = 256,
    BGRADB_BIT = 512,
};

enum Epilogue : unsigned {
    EPILOGUE_DEFAULT = 1,
    EPILOGUE_RELU = 2,
    EPILOGUE_BIAS = 4,
    EPILOGUE_RELU_BIAS = 6,
    EPILOGUE_GELU = 32,
    EPILOGUE_GELU_BIAS = 36,
    EPILOGUE_GELU_AUX = 160,
    EPILOGUE_GELU_AUX_BIAS = 164,
    EPILOGUE_DGELU = 192,
    EPILOGUE_DGELU_BGRAD = 208,
    EPILOGUE_BGRADA = 256,
    EPILOGUE_BGRADB = 512,
};

struct Layout {
    int type = F32;
    int order = COLUMN;
    uint64_t rows = 0, columns = 0;
    int64_t leading = 0;
    int batches = 1;
    int64_t batch_stride = 0;
    int64_t plane_offset = 0;

    size_t element_bytes() const { return type == BF16 ? 2 : 4; }
    // Elements from the first to behind the last, of one matrix.
    size_t span() const {
        const uint64_t lines = order == COLUMN ? columns : rows, length = order == COLUMN ? rows : columns;
        return lines == 0 ? 0 : (lines - 1) * uint64_t(leading) + length;
    }
    // Bytes of all matrices of the batch.
    size_t bytes() const { return (size_t(batches - 1) * size_t(batch_stride) + span()) * element_bytes(); }
};

struct Product {
    int compute_type = COMPUTE_32F;
    int scale_type = F32;
    int pointer_mode = HOST;
    int transpose_a = NO_TRANSPOSE, transpose_b = NO_TRANSPOSE, transpose_c = NO_TRANSPOSE;
    int fill_mode = 2;  // full
    unsigned epilogue = EPILOGUE_DEFAULT;
    void* bias = nullptr;
    int64_t bias_batch_stride = 0;
    void* aux = nullptr;
    int64_t aux_leading = 0;
    int64_t aux_batch_stride = 0;
    int multiprocessors = 0;
    int bias_type = -1, aux_type = -1;  // -1: that of D
    int8_t fast_accumulation = 0;
};

struct Preference {
    unsigned search_mode = 0;
    uint64_t workspace_bytes_max = 0;
    unsigned reduction_schemes = 7;
    unsigned alignment_a = 256, alignment_b = 256, alignment_c = 256, alignment_d = 256;
    float waves_max = 0;
    uint64_t implementations = ~0ull;
};

// An algorithm, as programs may copy and keep it.
struct Algorithm {
    uint64_t magic;
    uint64_t workspace_bytes;
    uint16_t alignment_a, alignment_b, alignment_c, alignment_d;  // that pointers must have, bytes
    uint64_t unused[5];
};
static_assert(sizeof(Algorithm) == 64);

struct HeuristicResult {
    Algorithm algorithm;
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

}  // namespace cuda_stand_in
