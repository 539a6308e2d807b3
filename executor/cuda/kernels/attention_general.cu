// Attention within segments, for heads of 1 to 256 elements, without tensor cores. Compile with
// -DX=float|bf16.
//
// A warp computes one row at a time; a lane has every 32nd element of a head. All sums are f32, in one order.
//   attention_forward_general: output = softmax(scale * Q K^T) V, and the natural log of the sum of
//     exp(scale * Q K^T). A warp has a query. Launch: grid (tile_count, heads), first list of tiles.
//   attention_backward_queries_general, launched first: dQ, and row sums of dO * O into `dots`. A warp has a
//     query. Launch: grid (tile_count, heads), first list of tiles.
//   attention_backward_keys_general, launched second: dK and dV; reads `dots`. A warp has a key and reads the
//     queries head by head of the group. Launch: grid (tile_count, kv_heads), second list of tiles.
//   256 threads, no shared memory. qkv and d_qkv [tokens, (heads + 2 * kv_heads) * head_dim], output and
//   d_output [tokens, heads * head_dim], log_sums and dots [tokens, heads], tiles [2][tile_count][3].
#include "attention.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int PIECES = 8;  // most elements of a head that a lane has

// Loads this lane's elements of a head; elements behind it are zeros.
__device__ __forceinline__ void load_head(float (&to)[PIECES], const X* head, int head_dim) {
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        const int element = piece * 32 + threadIdx.x % 32;
        to[piece] = element < head_dim ? load(head + element) : 0.f;
    }
}

__device__ __forceinline__ void store_head(X* head, const float (&from)[PIECES], float factor, int head_dim) {
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        const int element = piece * 32 + threadIdx.x % 32;
        if (element < head_dim) store(head + element, from[piece] * factor);
    }
}

__device__ __forceinline__ float dot_heads(const float (&a)[PIECES], const float (&b)[PIECES]) {
    float dot = 0.f;
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) dot += a[piece] * b[piece];
    return warp_sum(dot);
}

// Scales a sum and adds a multiple of a head.
__device__ __forceinline__ void add_head(
    float (&sum)[PIECES], float kept, float factor, const float (&head)[PIECES]) {
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) sum[piece] = sum[piece] * kept + factor * head[piece];
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_forward_general(
    const X* qkv, X* output, float* log_sums, const u32* tiles, int tile_count, int heads, int kv_heads,
    int head_dim, float scale, int is_causal) {
    const Tile tile = read_tile(tiles, blockIdx.x);
    const int head = blockIdx.y, end = min(tile.end, tile.first + TILE_ROWS);
    const Columns columns = columns_of(head, heads, kv_heads, head_dim);
    for (int query = tile.first + threadIdx.x / 32; query < end; query += WARPS) {
        float own[PIECES], other[PIECES], result[PIECES] = {};
        load_head(own, qkv + 1ll * query * columns.row + columns.query, head_dim);
        float largest = MINUS_INFINITY, sum = 0.f;
        const int last = last_key(tile, query, is_causal);
        for (int key = tile.begin; key <= last; key++) {
            const X* row = qkv + 1ll * key * columns.row;
            load_head(other, row + columns.key, head_dim);
            const float score = dot_heads(own, other) * scale, before = largest;
            largest = fmaxf(largest, score);
            const float kept = expf(before - largest), weight = expf(score - largest);
            sum = sum * kept + weight;
            load_head(other, row + columns.value, head_dim);
            add_head(result, kept, weight, other);
        }
        const long long at = 1ll * query * heads + head;
        store_head(output + at * head_dim, result, 1.f / sum, head_dim);
        if (threadIdx.x % 32 == 0) log_sums[at] = largest + logf(sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_backward_queries_general(
    const X* qkv, const X* output, const float* log_sums, const X* d_output, float* dots, X* d_qkv,
    const u32* tiles, int tile_count, int heads, int kv_heads, int head_dim, float scale, int is_causal) {
    const Tile tile = read_tile(tiles, blockIdx.x);
    const int head = blockIdx.y, end = min(tile.end, tile.first + TILE_ROWS);
    const Columns columns = columns_of(head, heads, kv_heads, head_dim);
    for (int query = tile.first + threadIdx.x / 32; query < end; query += WARPS) {
        const long long at = 1ll * query * heads + head;
        float own[PIECES], gradient[PIECES], other[PIECES], result[PIECES] = {};
        load_head(own, qkv + 1ll * query * columns.row + columns.query, head_dim);
        load_head(gradient, d_output + at * head_dim, head_dim);
        load_head(other, output + at * head_dim, head_dim);
        const float dot = dot_heads(gradient, other), log_sum = log_sums[at];
        if (threadIdx.x % 32 == 0) dots[at] = dot;
        const int last = last_key(tile, query, is_causal);
        for (int key = tile.begin; key <= last; key++) {
            const X* row = qkv + 1ll * key * columns.row;
            load_head(other, row + columns.value, head_dim);
            const float d_weight = dot_heads(gradient, other);
            load_head(other, row + columns.key, head_dim);
            const float weight = expf(dot_heads(own, other) * scale - log_sum);
            add_head(result, 1.f, weight * (d_weight - dot), other);
        }
        store_head(d_qkv + 1ll * query * columns.row + columns.query, result, scale, head_dim);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_backward_keys_general(
    const X* qkv, const float* log_sums, const X* d_output, const float* dots, X* d_qkv, const u32* tiles,
    int tile_count, int heads, int kv_heads, int head_dim, float scale, int is_causal) {
    const Tile tile = read_tile(tiles, tile_count + blockIdx.x);
    const int group = heads / kv_heads, end = min(tile.end, tile.first + TILE_ROWS);
    const Columns columns = columns_of(blockIdx.y * group, heads, kv_heads, head_dim);
    for (int key = tile.first + threadIdx.x / 32; key < end; key += WARPS) {
        X* d_row = d_qkv + 1ll * key * columns.row;
        float own_key[PIECES], own_value[PIECES], query_head[PIECES], gradient[PIECES];
        float d_key[PIECES] = {}, d_value[PIECES] = {};
        load_head(own_key, qkv + 1ll * key * columns.row + columns.key, head_dim);
        load_head(own_value, qkv + 1ll * key * columns.row + columns.value, head_dim);
        for (int head = blockIdx.y * group; head < static_cast<int>(blockIdx.y + 1) * group; head++)
            for (int query = is_causal ? key : tile.begin; query < tile.end; query++) {
                const long long at = 1ll * query * heads + head;
                load_head(query_head, qkv + 1ll * query * columns.row + head * head_dim, head_dim);
                load_head(gradient, d_output + at * head_dim, head_dim);
                const float weight = expf(dot_heads(own_key, query_head) * scale - log_sums[at]);
                const float d_score = weight * (dot_heads(own_value, gradient) - dots[at]);
                add_head(d_value, 1.f, weight, gradient);
                add_head(d_key, 1.f, d_score, query_head);
            }
        store_head(d_row + columns.key, d_key, scale, head_dim);
        store_head(d_row + columns.value, d_value, 1.f, head_dim);
    }
}
