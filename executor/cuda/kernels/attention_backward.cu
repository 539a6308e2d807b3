// Attention within segments, backward, by tensor cores. Compile with -DHEAD=64|72|80|96|128, and -DRANGES=1
// for ranges of keys.
//
// A block sums the gradients of its own rows in registers and writes each once: sums have one order, without
// atomics. Scores are computed twice, by the owners of queries and by the owners of keys.
// With P = exp(scale * Q K^T - log_sums), dP = dO V^T, D = row sums of dO * O and dS = P * (dP - D):
//   attention_backward_queries, launched first: dQ = scale * dS K, and D into `dots`.
//     A block owns a tile of the first list, up to 64 queries, of one head; a warp has 16 queries. Keys and
//     values are copied 64 at a time, while those before are multiplied.
//     Launch: grid (tile_count, heads), 128 threads, 512 * (PADDED + 8) bytes of dynamic shared memory.
//   attention_backward_keys, launched second: dK = scale * dS^T Q and dV = P^T dO; reads D from `dots`.
//     A block owns a tile of the second list, up to 64 keys, of one key head, for one of `splits` equal parts
//     of its query heads; a warp has 16 keys. Queries and output gradients are copied 32 at a time, head by
//     head. With one part it writes the gradients, with several their sums without the scale, to
//     `parts` [tokens, kv_heads, splits, 2, HEAD].
//     Launch: grid (tile_count, kv_heads * splits), 128 threads, 512 * (PADDED + 9) bytes of dynamic shared
//     memory.
//   attention_backward_parts, launched third if there are several parts: adds them in their order.
//     Launch: a thread for every 8 elements of the gradients of keys and values.
//   qkv and d_qkv [tokens, (heads + 2 * kv_heads) * HEAD], output and d_output [tokens, heads * HEAD],
//   log_sums and dots [tokens, heads], all aligned to 16 bytes; tiles [2][tile_count][3]; ranges
//   [tokens][2] of the owners' other side; PADDED is HEAD rounded up to a multiple of 16. P and dS are
//   rounded to bf16 as operands; all sums are f32.
#include "attention.cuh"

constexpr int KEYS = 64;                           // keys of a step of the owners of queries
constexpr int KEYS_MATRIX = KEYS * STRIDE;         // elements of the keys, or the values, of a step
constexpr int KEYS_STAGE = 2 * KEYS_MATRIX;        // keys, then values
constexpr int QUERIES = 32;                        // queries of a step of the owners of keys
constexpr int QUERIES_MATRIX = QUERIES * STRIDE;   // elements of the queries, or the gradients, of a step
constexpr int QUERIES_STAGE = 2 * QUERIES_MATRIX;  // queries, then output gradients
constexpr int TILE_MATRIX = TILE_ROWS * STRIDE;    // elements of one head of the rows of a tile

// Starts to copy the keys and values of a step.
__device__ __forceinline__ void start_keys(
    bf16* stage, const bf16* qkv, Columns columns, int first, int end) {
    start_rows<KEYS>(stage, qkv + columns.key, columns.row, first, end);
    start_rows<KEYS>(stage + KEYS_MATRIX, qkv + columns.value, columns.row, first, end);
}

// Loads the left operands of a product over a head.
__device__ __forceinline__ void load_lefts(u32 (&lefts)[DEPTH][4], const bf16* rows) {
#pragma unroll
    for (int step = 0; step < DEPTH; step++) load_left(lefts[step], rows, step * 16);
}

// Multiplies an output row by its gradient, which is in the registers of four lanes.
__device__ __forceinline__ float dot_row(const u32 (&d_output)[DEPTH][4], const bf16* output, int half) {
    const u32* pairs = reinterpret_cast<const u32*>(output) + threadIdx.x % 4;
    float dot = 0.f;
#pragma unroll
    for (int part = 0; part < HEAD / 8; part++) {
        const u32 left = d_output[part / 2][part % 2 * 2 + half], right = pairs[part * 4];
        dot += low_of(left) * low_of(right) + high_of(left) * high_of(right);
    }
    return row_sum(dot);
}

extern "C" __global__ void __launch_bounds__(THREADS, PADDED == 64 ? 3 : 2) attention_backward_queries(
    const bf16* qkv, const bf16* output, const float* log_sums, const bf16* d_output, float* dots,
    bf16* d_qkv, const u32* tiles, int tile_count, int heads, int kv_heads, float scale, int is_causal,
    const u32* ranges) {
    DYNAMIC_SHARED(memory);
    bf16* stages = reinterpret_cast<bf16*>(memory);
    const Tile tile = read_tile(tiles, blockIdx.x);
    const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Columns columns = columns_of(head, heads, kv_heads, HEAD);
    const int row = tile.first + warp * 16 + lane / 4;
    const int begin = keys_of(tile, ranges, tile.first, is_causal).first;
    const int end = keys_of(tile, ranges, min(tile.end, tile.first + TILE_ROWS) - 1, is_causal).last + 1;
    const int steps = (end - begin + KEYS - 1) / KEYS;
    const Range of_warp = {keys_of(tile, ranges, tile.first + warp * 16, is_causal).first,
                           keys_of(tile, ranges, tile.first + warp * 16 + 15, is_causal).last};
    const float scale_log2 = scale * LOG2_E;

    // queries and output gradients wait in the stage of the second step
    bf16* own = stages + KEYS_STAGE;
    start_rows<TILE_ROWS>(own, qkv + columns.query, columns.row, tile.first, tile.end);
    start_rows<TILE_ROWS>(own + TILE_MATRIX, d_output + columns.query, heads * HEAD, tile.first, tile.end);
    start_keys(stages, qkv, columns, begin, end);
    copy_commit();
    copy_wait<0>();
    __syncthreads();  // queries and output gradients are there
    u32 queries[DEPTH][4], d_outputs[DEPTH][4];
    load_lefts(queries, own + warp * 16 * STRIDE);
    load_lefts(d_outputs, own + TILE_MATRIX + warp * 16 * STRIDE);

    Range visible[2];
    float log2_sum[2], dot[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const long long query = min(row + half * 8, tile.end - 1), at = query * heads + head;
        visible[half] = keys_of(tile, ranges, row + half * 8, is_causal);
        log2_sum[half] = log_sums[at] * LOG2_E;
        dot[half] = dot_row(d_outputs, output + at * HEAD, half);
        if (lane % 4 == 0 && row + half * 8 < tile.end) dots[at] = dot[half];
    }

    float d_queries[PARTS][4];
    clear(d_queries);
    for (int step = 0; step < steps; step++) {
        const int first = begin + step * KEYS;
        copy_wait<0>();
        __syncthreads();  // this step is there, and nobody reads the other stage
        if (step + 1 < steps) {
            start_keys(stages + (step + 1) % 2 * KEYS_STAGE, qkv, columns, first + KEYS, end);
            copy_commit();
        }
        const bf16 *keys = stages + step % 2 * KEYS_STAGE, *values = keys + KEYS_MATRIX;
        // half of the keys at a time, which saves registers; none outside of the keys of the warp
#pragma unroll 1
        for (int at = 0; at < min(KEYS, of_warp.last + 1 - first); at += KEYS / 2) {
#ifdef RANGES
            if (first + at + KEYS / 2 <= of_warp.first) continue;
#endif
            float scores[KEYS / 16][4], d_weights[KEYS / 16][4];
            compute_scores(scores, queries, keys + at * STRIDE);
            compute_scores(d_weights, d_outputs, values + at * STRIDE);
#pragma unroll
            for (int part = 0; part < KEYS / 16; part++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int key = first + at + part * 8 + lane % 4 * 2 + i % 2;
                    const float weight = exp2_fast(scores[part][i] * scale_log2 - log2_sum[i / 2]);
                    scores[part][i] = has_key(visible[i / 2], key) ? weight * (d_weights[part][i] - dot[i / 2]) : 0.f;
                }
            add_product(d_queries, scores, keys + at * STRIDE);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const long long query = row + half * 8;
        if (query < tile.end) write_row(d_qkv + query * columns.row + columns.query, d_queries, half, scale);
    }
}

// Queries of a step of the owners of keys.
struct Step {
    int head, first;
};

// Starts to copy the queries and output gradients of a step.
__device__ __forceinline__ void start_queries(
    bf16* stage, const bf16* qkv, const bf16* d_output, Step step, int row_elements, int heads, int end) {
    start_rows<QUERIES>(stage, qkv + step.head * HEAD, row_elements, step.first, end);
    start_rows<QUERIES>(stage + QUERIES_MATRIX, d_output + step.head * HEAD, heads * HEAD, step.first, end);
}

// Reads a number of a query of a step: threads 0..32 its log-sum-exp, threads 32..64 its dot product. Queries
// behind the segment get zeros; they add nothing, because their copies are zeros.
__device__ __forceinline__ float read_sum(
    const float* log_sums, const float* dots, Step step, int heads, int end) {
    const int thread = threadIdx.x, query = step.first + thread % QUERIES;
    if (thread >= 2 * QUERIES || query >= end) return 0.f;
    const long long at = 1ll * query * heads + step.head;
    return thread < QUERIES ? log_sums[at] * LOG2_E : dots[at];
}

// Computes P^T and dS^T of 16 keys and the queries of a step.
__device__ __forceinline__ void compute_weights(
    float (&weights)[QUERIES / 8][4], float (&d_scores)[QUERIES / 8][4], const bf16* own, const bf16* stage,
    const float* sums, float scale_log2, int first, const Range (&visible)[2]) {
    compute_scores(weights, own, stage);
    compute_scores(d_scores, own + TILE_MATRIX, stage + QUERIES_MATRIX);
#pragma unroll
    for (int part = 0; part < QUERIES / 8; part++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int query = part * 8 + threadIdx.x % 4 * 2 + i % 2;
            const float weight = exp2_fast(weights[part][i] * scale_log2 - sums[query]);
            weights[part][i] = has_query(visible[i / 2], first + query) ? weight : 0.f;
            d_scores[part][i] = weights[part][i] * (d_scores[part][i] - sums[QUERIES + query]);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, PADDED <= 80 ? 3 : 2) attention_backward_keys(
    const bf16* qkv, const float* log_sums, const bf16* d_output, const float* dots, bf16* d_qkv,
    float* parts, int splits, const u32* tiles, int tile_count, int heads, int kv_heads, float scale,
    int is_causal, const u32* ranges) {
    DYNAMIC_SHARED(memory);
    bf16* own = reinterpret_cast<bf16*>(memory);  // keys of the tile, then values
    bf16* stages = own + 2 * TILE_MATRIX;
    float* sums = reinterpret_cast<float*>(stages + 2 * QUERIES_STAGE);  // [2][log sums, dots][QUERIES]
    const Tile tile = read_tile(tiles, tile_count + blockIdx.x);
    const int group = heads / kv_heads / splits, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Columns columns = columns_of(blockIdx.y * group, heads, kv_heads, HEAD);
    const int begin = queries_of(tile, ranges, tile.first, is_causal).first;
    const int end = queries_of(tile, ranges, min(tile.end, tile.first + TILE_ROWS) - 1, is_causal).last + 1;
    const Range of_warp = {queries_of(tile, ranges, tile.first + warp * 16, is_causal).first,
                           queries_of(tile, ranges, tile.first + warp * 16 + 15, is_causal).last};
    const int key = tile.first + warp * 16 + lane / 4;
    const Range visible[2] = {queries_of(tile, ranges, key, is_causal), queries_of(tile, ranges, key + 8, is_causal)};
    const float scale_log2 = scale * LOG2_E;

    Step step = {static_cast<int>(blockIdx.y) * group, begin};
    const int heads_end = step.head + group;
    start_rows<TILE_ROWS>(own, qkv + columns.key, columns.row, tile.first, tile.end);
    start_rows<TILE_ROWS>(own + TILE_MATRIX, qkv + columns.value, columns.row, tile.first, tile.end);
    start_queries(stages, qkv, d_output, step, columns.row, heads, end);
    copy_commit();
    if (threadIdx.x < 2 * QUERIES) sums[threadIdx.x] = read_sum(log_sums, dots, step, heads, end);

    float d_keys[PARTS][4], d_values[PARTS][4];
    clear(d_keys);
    clear(d_values);
    for (int stage = 0; step.head < heads_end; stage ^= 1) {
        Step next = {step.head, step.first + QUERIES};
        if (next.first >= end) next = {step.head + 1, begin};
        float next_sum = 0.f;
        copy_wait<0>();
        __syncthreads();  // this step is there, and nobody reads the other stage
        if (next.head < heads_end) {
            bf16* next_stage = stages + (stage ^ 1) * QUERIES_STAGE;
            start_queries(next_stage, qkv, d_output, next, columns.row, heads, end);
            copy_commit();
            next_sum = read_sum(log_sums, dots, next, heads, end);
        }
        const bf16* present = stages + stage * QUERIES_STAGE;
        // a warp whose keys no query of the step attends to has nothing to add
        if (step.first + QUERIES > of_warp.first && step.first <= of_warp.last) {
            float weights[QUERIES / 8][4], d_scores[QUERIES / 8][4];
            compute_weights(weights, d_scores, own + warp * 16 * STRIDE, present, sums + stage * 2 * QUERIES,
                            scale_log2, step.first, visible);
            add_product(d_values, weights, present + QUERIES_MATRIX);
            add_product(d_keys, d_scores, present);
        }
        if (threadIdx.x < 2 * QUERIES) sums[(stage ^ 1) * 2 * QUERIES + threadIdx.x] = next_sum;
        step = next;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const long long row = key + half * 8;
        if (row >= tile.end) continue;
        if (splits == 1) {
            write_row(d_qkv + row * columns.row + columns.key, d_keys, half, scale);
            write_row(d_qkv + row * columns.row + columns.value, d_values, half, 1.f);
        } else {
            float* part = parts + (row * kv_heads * splits + blockIdx.y) * 2 * HEAD;
            write_part(part, d_keys, half);
            write_part(part + HEAD, d_values, half);
        }
    }
}

// `elements`: those of the gradients of keys and values.
extern "C" __global__ void attention_backward_parts(
    const float* parts, bf16* d_qkv, long long elements, int splits, int heads, int kv_heads, float scale) {
    const long long first = first_element<8>();
    if (first >= elements) return;
    const int column = static_cast<int>(first % (2 * HEAD));
    const long long owner = first / (2 * HEAD), token = owner / kv_heads;
    const int kv_head = static_cast<int>(owner % kv_heads);
    float sums[8], part[8];
    Wide<8>::load(parts + owner * splits * 2 * HEAD + column, sums);
    for (int split = 1; split < splits; split++) {
        Wide<8>::load(parts + (owner * splits + split) * 2 * HEAD + column, part);
        for (int k = 0; k < 8; k++) sums[k] += part[k];
    }
    const bool is_key = column < HEAD;
    for (int k = 0; k < 8; k++) sums[k] *= is_key ? scale : 1.f;
    const Columns columns = columns_of(kv_head * (heads / kv_heads), heads, kv_heads, HEAD);
    const int to = is_key ? columns.key + column : columns.value + column - HEAD;
    Wide<8>::store(d_qkv + token * columns.row + to, sums);
}
