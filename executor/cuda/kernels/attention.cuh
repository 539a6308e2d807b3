// Pieces that the attention kernels share.
//
// A row of `qkv` has `heads` query heads, then `kv_heads` key heads, then `kv_heads` value heads. Tokens
// attend within their segment, and within ranges of its keys if there are any. A tile is up to 64
// consecutive rows of a segment; the first is a multiple of 64 rows behind the start of the segment.
//
// Results do not depend on the order of threads and blocks, and a segment has the same bits alone and beside
// others: sums are in registers, in the order of the rows of the segment.
#pragma once

#include "device.cuh"

constexpr int TILE_ROWS = 64;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

struct Tile {
    int begin, end;  // first row of the segment, and the row behind its last
    int first;       // first row of the tile
};

__device__ __forceinline__ Tile read_tile(const u32* tiles, int index) {
    const u32* at = tiles + 3ll * index;
    return {static_cast<int>(at[0]), static_cast<int>(at[1]), static_cast<int>(at[2])};
}

// Columns of `qkv` that one query head reads.
struct Columns {
    int query, key, value;
    int row;  // elements of a row
};

__device__ __forceinline__ Columns columns_of(int head, int heads, int kv_heads, int head_dim) {
    const int kv_head = head / (heads / kv_heads);
    return {head * head_dim, (heads + kv_head) * head_dim, (heads + kv_heads + kv_head) * head_dim,
            (heads + 2 * kv_heads) * head_dim};
}

// Rows of the other side that a row attends to, or that attend to it: the first, and the last.
struct Range {
    int first, last;
};

// With -DRANGES=1, `ranges` has the first row of the other side and the row behind the last, for every row.
// Both ascend. Rows behind the segment, which nobody writes, have the range of its last row.
__device__ __forceinline__ Range read_range(const Tile& tile, const u32* ranges, int row) {
    const u32* at = ranges + 2ll * min(row, tile.end - 1);
    return {static_cast<int>(at[0]), static_cast<int>(at[1]) - 1};
}

// Keys that a query attends to. Without ranges, queries behind the segment see all of its keys.
__device__ __forceinline__ Range keys_of(const Tile& tile, const u32* ranges, int query, int is_causal) {
#ifdef RANGES
    return read_range(tile, ranges, query);
#else
    return {tile.begin, is_causal ? min(query, tile.end - 1) : tile.end - 1};
#endif
}

// Queries that attend to a key.
__device__ __forceinline__ Range queries_of(const Tile& tile, const u32* ranges, int key, int is_causal) {
#ifdef RANGES
    return read_range(tile, ranges, key);
#else
    return {is_causal ? key : tile.begin, tile.end - 1};
#endif
}

// Without ranges, steps over keys begin with the range of every query, and those over queries end with the
// range of every key.
__device__ __forceinline__ bool has_key(const Range& range, int key) {
#ifdef RANGES
    return key >= range.first && key <= range.last;
#else
    return key <= range.last;
#endif
}

__device__ __forceinline__ bool has_query(const Range& range, int query) {
#ifdef RANGES
    return query >= range.first && query <= range.last;
#else
    return query >= range.first;
#endif
}

#ifdef HEAD

constexpr int THREADS = 128;
// Columns of a head in shared memory and registers; those from HEAD on are zeros.
constexpr int PADDED = (HEAD + 15) / 16 * 16;
// Columns of a row in shared memory: an odd number of 16 bytes, so that no two of eight rows share a bank.
constexpr int STRIDE = PADDED + 8;
constexpr int DEPTH = PADDED / 16;  // steps of a product over a head
constexpr int PARTS = PADDED / 8;   // parts of 8 columns of a head

// Starts to copy rows `first..first + ROWS` of one head; rows from `end` on and the padding become zeros.
template <int ROWS>
__device__ __forceinline__ void start_rows(bf16* to, const bf16* from, int row_elements, int first, int end) {
#pragma unroll
    for (int at = threadIdx.x; at < ROWS * PARTS; at += THREADS) {
        const int row = at / PARTS, column = at % PARTS * 8;
        const bool is_there = first + row < end && column < HEAD;
        const bf16* source = is_there ? from + 1ll * (first + row) * row_elements + column : from;
        copy_async_16(to + row * STRIDE + column, source, is_there);
    }
}

// Loads a left operand [16, 16] whose rows are rows of shared memory.
__device__ __forceinline__ void load_left(u32 (&left)[4], const bf16* rows, int column) {
    const int lane = threadIdx.x % 32;
    load_matrix_x4(left, rows + lane % 16 * STRIDE + column + lane / 16 * 8);
}

// Loads a right operand [16, 16] whose columns are rows of shared memory.
__device__ __forceinline__ void load_right(u32 (&right)[4], const bf16* rows, int column) {
    const int lane = threadIdx.x % 32;
    load_matrix_x4(right, rows + (lane % 8 + lane / 16 * 8) * STRIDE + column + lane / 8 % 2 * 8);
}

// Loads a right operand [16, 16] whose rows are rows of shared memory.
__device__ __forceinline__ void load_right_trans(u32 (&right)[4], const bf16* rows, int column) {
    const int lane = threadIdx.x % 32;
    load_matrix_x4_trans(right, rows + lane % 16 * STRIDE + column + lane / 16 * 8);
}

template <int PARTS_OF_SUMS>
__device__ __forceinline__ void clear(float (&sums)[PARTS_OF_SUMS][4]) {
#pragma unroll
    for (int part = 0; part < PARTS_OF_SUMS; part++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[part][i] = 0.f;
}

// Adds one step of `left` x `rows`^T: 16 columns of a head, from `column` on.
template <int PARTS_OF_SUMS>
__device__ __forceinline__ void add_scores_step(
    float (&sums)[PARTS_OF_SUMS][4], const u32 (&left)[4], const bf16* rows, int column) {
#pragma unroll
    for (int part = 0; part < PARTS_OF_SUMS; part += 2) {
        u32 right[4];
        load_right(right, rows + part * 8 * STRIDE, column);
        mma_16816(sums[part], left, right[0], right[1]);
        mma_16816(sums[part + 1], left, right[2], right[3]);
    }
}

// Computes `left` x `rows`^T; the left operand is in registers.
template <int PARTS_OF_SUMS>
__device__ __forceinline__ void compute_scores(
    float (&sums)[PARTS_OF_SUMS][4], const u32 (&left)[DEPTH][4], const bf16* rows) {
    clear(sums);
#pragma unroll
    for (int step = 0; step < DEPTH; step++) add_scores_step(sums, left[step], rows, step * 16);
}

// Computes `left` x `rows`^T; the left operand is 16 rows of shared memory.
template <int PARTS_OF_SUMS>
__device__ __forceinline__ void compute_scores(
    float (&sums)[PARTS_OF_SUMS][4], const bf16* left_rows, const bf16* rows) {
    clear(sums);
#pragma unroll
    for (int step = 0; step < DEPTH; step++) {
        u32 left[4];
        load_left(left, left_rows, step * 16);
        add_scores_step(sums, left, rows, step * 16);
    }
}

// Adds `weights` x `rows`; the weights are rounded to bf16.
template <int PARTS_OF_WEIGHTS>
__device__ __forceinline__ void add_product(
    float (&sums)[PARTS][4], const float (&weights)[PARTS_OF_WEIGHTS][4], const bf16* rows) {
#pragma unroll
    for (int step = 0; step < PARTS_OF_WEIGHTS / 2; step++) {
        const float(&low)[4] = weights[2 * step], (&high)[4] = weights[2 * step + 1];
        const u32 left[4] = {pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]),
                             pack_bf16(high[0], high[1]), pack_bf16(high[2], high[3])};
#pragma unroll
        for (int part = 0; part < PARTS; part += 2) {
            u32 right[4];
            load_right_trans(right, rows + step * 16 * STRIDE, part * 8);
            mma_16816(sums[part], left, right[0], right[1]);
            mma_16816(sums[part + 1], left, right[2], right[3]);
        }
    }
}

// Writes this thread's part of a row of sums. A warp has 16 rows: `half` 0 is row lane / 4, 1 is the eighth
// row behind it.
__device__ __forceinline__ void write_row(bf16* to, const float (&sums)[PARTS][4], int half, float factor) {
    u32* pairs = reinterpret_cast<u32*>(to) + threadIdx.x % 4;
#pragma unroll
    for (int part = 0; part < HEAD / 8; part++)
        pairs[part * 4] = pack_bf16(sums[part][2 * half] * factor, sums[part][2 * half + 1] * factor);
}

// Writes the same part of a row as it is.
__device__ __forceinline__ void write_part(float* to, const float (&sums)[PARTS][4], int half) {
    float2* pairs = reinterpret_cast<float2*>(to) + threadIdx.x % 4;
#pragma unroll
    for (int part = 0; part < HEAD / 8; part++)
        pairs[part * 4] = make_float2(sums[part][2 * half], sums[part][2 * half + 1]);
}

// Sum and maximum over the four lanes that share a row of sums.
__device__ __forceinline__ float row_sum(float value) {
    value += __shfl_xor_sync(ALL_LANES, value, 1);
    return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

__device__ __forceinline__ float row_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
    return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

#endif
