// Attention within segments, forward, by tensor cores. Compile with -DHEAD=64|72|80|96|128, and -DRANGES=1
// for ranges of keys.
//
// attention_forward: output = softmax(scale * Q K^T) V, and the natural log of the sum of exp(scale * Q K^T).
//   qkv [tokens, (heads + 2 * kv_heads) * HEAD], output [tokens, heads * HEAD], log_sums [tokens, heads],
//   aligned to 16 bytes; tiles [2][tile_count][3]: first row of the segment, row behind its last, first row
//   of the tile; ranges [2][tokens][2]: first key of every query, and key behind the last.
//   A block owns a tile of the first list, up to 64 queries, of one head; a warp has 16 queries. Keys and
//   values are copied 64 at a time, while those before are multiplied. The softmax is computed online
//   (Milakov and Gimelshein 2018, arXiv:1805.02867).
//   Launch: grid (tile_count, heads), 128 threads, 512 * (PADDED + 8) bytes of dynamic shared memory, where
//   PADDED is HEAD rounded up to a multiple of 16.
#include "attention.cuh"

constexpr int KEYS = 64;               // keys of a step
constexpr int MATRIX = KEYS * STRIDE;  // elements of the keys, or the values, of a step
constexpr int STAGE = 2 * MATRIX;      // keys, then values

// Running softmax of the two rows of which a thread has parts.
struct Softmax {
    float largest[2] = {MINUS_INFINITY, MINUS_INFINITY};  // largest score
    float sum[2] = {0.f, 0.f};                            // this thread's part of the sum of weights
};

// Starts to copy the keys and values of a step.
__device__ __forceinline__ void start_step(
    bf16* stage, const bf16* qkv, Columns columns, int first, int end) {
    start_rows<KEYS>(stage, qkv + columns.key, columns.row, first, end);
    start_rows<KEYS>(stage + MATRIX, qkv + columns.value, columns.row, first, end);
}

// Loads the 16 queries of a warp. A scale below zero is moved to their signs, and a scale of zero clears
// them, so that the largest product always has the largest score.
__device__ __forceinline__ void load_queries(u32 (&queries)[DEPTH][4], const bf16* rows, float scale) {
    const u32 sign = scale < 0.f ? 0x80008000u : 0u, kept = scale == 0.f ? 0u : ~0u;
#pragma unroll
    for (int step = 0; step < DEPTH; step++) {
        load_left(queries[step], rows, step * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) queries[step][i] = (queries[step][i] & kept) ^ sign;
    }
}

// Removes the scores of keys that the query of a row does not attend to.
__device__ __forceinline__ void mask_scores(float (&scores)[KEYS / 8][4], int first, const Range (&keys)[2]) {
    const int own = first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int part = 0; part < KEYS / 8; part++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!has_key(keys[i / 2], own + part * 8 + i % 2)) scores[part][i] = MINUS_INFINITY;
}

// Turns scores into weights relative to the largest score so far, and rescales the sums of earlier steps.
__device__ __forceinline__ void soften(
    float (&scores)[KEYS / 8][4], float (&sums)[PARTS][4], Softmax& softmax, float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = softmax.largest[half];
#pragma unroll
        for (int part = 0; part < KEYS / 8; part++)
            largest = fmaxf(largest, fmaxf(scores[part][2 * half], scores[part][2 * half + 1]));
        largest = row_max(largest);
#ifdef RANGES
        // a query may attend to no key of the first steps
        const float base = largest == MINUS_INFINITY ? 0.f : largest * scale_log2;
#else
        const float base = largest * scale_log2;
#endif
        const float kept = exp2_fast(softmax.largest[half] * scale_log2 - base);
        softmax.largest[half] = largest;
        float sum = 0.f;
#pragma unroll
        for (int part = 0; part < KEYS / 8; part++)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                scores[part][i] = exp2_fast(scores[part][i] * scale_log2 - base);
                sum += scores[part][i];
            }
        softmax.sum[half] = softmax.sum[half] * kept + sum;
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++) sums[part][i] *= kept;
    }
}

// Blocks of a processor at a time, which bounds the registers of a thread. From Blackwell on, three of heads
// wider than 64 columns would spill.
#if __CUDA_ARCH__ >= 1000
constexpr int BLOCKS = HEAD == 64 ? 3 : 2;
#else
constexpr int BLOCKS = HEAD <= 80 ? 3 : 2;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_forward(
    const bf16* qkv, bf16* output, float* log_sums, const u32* tiles, int tile_count, int heads, int kv_heads,
    float scale, int is_causal, const u32* ranges) {
    DYNAMIC_SHARED(memory);
    bf16* stages = reinterpret_cast<bf16*>(memory);
    const Tile tile = read_tile(tiles, blockIdx.x);
    const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Columns columns = columns_of(head, heads, kv_heads, HEAD);
    const int row = tile.first + warp * 16 + lane / 4;
    const Range visible[2] = {keys_of(tile, ranges, row, is_causal), keys_of(tile, ranges, row + 8, is_causal)};
    const int begin = keys_of(tile, ranges, tile.first, is_causal).first;
    const int end = keys_of(tile, ranges, min(tile.end, tile.first + TILE_ROWS) - 1, is_causal).last + 1;
    const int steps = (end - begin + KEYS - 1) / KEYS;
    const float scale_log2 = scale == 0.f ? 1.f : fabsf(scale) * LOG2_E;

    // the queries wait in the stage of the second step
    start_rows<TILE_ROWS>(stages + STAGE, qkv + columns.query, columns.row, tile.first, tile.end);
    start_step(stages, qkv, columns, begin, end);
    copy_commit();
    copy_wait<0>();
    __syncthreads();  // the queries are there
    u32 queries[DEPTH][4];
    load_queries(queries, stages + STAGE + warp * 16 * STRIDE, scale);

    Softmax softmax;
    float sums[PARTS][4];
    clear(sums);
    for (int step = 0; step < steps; step++) {
        const int first = begin + step * KEYS;
        copy_wait<0>();
        __syncthreads();  // this step is there, and nobody reads the other stage
        if (step + 1 < steps) {
            start_step(stages + (step + 1) % 2 * STAGE, qkv, columns, first + KEYS, end);
            copy_commit();
        }
        const bf16 *keys = stages + step % 2 * STAGE, *values = keys + MATRIX;
        float scores[KEYS / 8][4];
        compute_scores(scores, queries, keys);
#ifdef RANGES
        mask_scores(scores, first, visible);
#else
        if (first + KEYS > end || (is_causal && first + KEYS > tile.first)) mask_scores(scores, first, visible);
#endif
        soften(scores, sums, softmax, scale_log2);
        add_product(sums, scores, values);
    }

#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float sum = row_sum(softmax.sum[half]);
        const long long query = row + half * 8;
        if (query >= tile.end) continue;
        write_row(output + (query * heads + head) * HEAD, sums, half, 1.f / sum);
        if (lane % 4 == 0)
            log_sums[query * heads + head] = (softmax.largest[half] * scale_log2 + log2_fast(sum)) * LN_2;
    }
}
