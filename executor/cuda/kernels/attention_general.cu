// Attention within segments, for heads of 1 to 256 elements, without tensor cores. Compile with
// -DX=float|bf16, and -DRANGES=1 for ranges of keys.
//
// A warp computes one row at a time, with 32 rows of the other side: a lane computes the scores of one of
// them, and then has every 32nd element of the sum over all of them. All sums are f32, in one order.
// attention_forward_general: output = softmax(scale * Q K^T) V, and the natural log of the sum of exp(scale *
// Q K^T). A warp has a query. Launch: grid (tile_count, heads), first list of tiles.
// attention_backward_queries_general, launched first: dQ, and row sums of dO * O into `dots`. A warp has a
// query. Launch: grid (tile_count, heads), first list of tiles. attention_backward_keys_general, launched
// second: dK and dV; reads `dots`. A warp has a key and reads the queries head by head of the group. Launch:
// grid (tile_count, kv_heads), second list of tiles. 256 threads, no dynamic shared memory. qkv and d_qkv
// [tokens, (heads + 2 * kv_heads) * head_dim], output and d_output [tokens, heads * head_dim], log_sums and
// dots [tokens, heads], tiles [2][tile_count][3], ranges [tokens][2] of the owners' other side.
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

__device__ __forceinline__ float dot_heads(const X* a, const X* b, int head_dim) {
    float dot = 0.f;
    for (int element = 0; element < head_dim; element++) dot += load(a + element) * load(b + element);
    return dot;
}

// Adds a multiple of a head.
__device__ __forceinline__ void add_head(float (&sum)[PIECES], float factor, const X* head, int head_dim) {
    float elements[PIECES];
    load_head(elements, head, head_dim);
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) sum[piece] += factor * elements[piece];
}

// Gives the factors of all lanes to the warp, once the warp is done with those before.
__device__ __forceinline__ const float* share(float (&factors)[32], float own) {
    __syncwarp();
    factors[threadIdx.x % 32] = own;
    __syncwarp();  // all factors are there
    return factors;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_forward_general(
    const X* qkv, X* output, float* log_sums, const u32* tiles, int tile_count, int heads, int kv_heads,
    int head_dim, float scale, int is_causal, const u32* ranges) {
    __shared__ float weights[WARPS][32];
    const Tile tile = read_tile(tiles, blockIdx.x);
    const int head = blockIdx.y, end = min(tile.end, tile.first + TILE_ROWS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Columns columns = columns_of(head, heads, kv_heads, head_dim);
    for (int query = tile.first + warp; query < end; query += WARPS) {
        const X* own = qkv + 1ll * query * columns.row + columns.query;
        float result[PIECES] = {}, largest = MINUS_INFINITY, sum = 0.f;
        const Range keys = keys_of(tile, ranges, query, is_causal);
        const int last = keys.last;
        for (int first = keys.first; first <= last; first += 32) {
            const bool is_seen = first + lane <= last;
            const X* rows = qkv + 1ll * first * columns.row;
            const X* key = rows + 1ll * lane * columns.row + columns.key;
            const float score = is_seen ? dot_heads(own, key, head_dim) * scale : MINUS_INFINITY;
            const float before = largest;
            largest = fmaxf(largest, warp_max(score));
            const float kept = expf(before - largest), weight = is_seen ? expf(score - largest) : 0.f;
            sum = sum * kept + warp_sum(weight);
            const float* shared = share(weights[warp], weight);
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) result[piece] *= kept;
            for (int key = 0; key < min(32, last + 1 - first); key++)
                add_head(result, shared[key], rows + 1ll * key * columns.row + columns.value, head_dim);
        }
        const long long at = 1ll * query * heads + head;
        store_head(output + at * head_dim, result, 1.f / sum, head_dim);
        if (lane == 0) log_sums[at] = largest + logf(sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_backward_queries_general(
    const X* qkv, const X* output, const float* log_sums, const X* d_output, float* dots, X* d_qkv,
    const u32* tiles, int tile_count, int heads, int kv_heads, int head_dim, float scale, int is_causal,
    const u32* ranges) {
    __shared__ float d_scores[WARPS][32];
    const Tile tile = read_tile(tiles, blockIdx.x);
    const int head = blockIdx.y, end = min(tile.end, tile.first + TILE_ROWS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Columns columns = columns_of(head, heads, kv_heads, head_dim);
    for (int query = tile.first + warp; query < end; query += WARPS) {
        const long long at = 1ll * query * heads + head;
        const X *own = qkv + 1ll * query * columns.row + columns.query, *gradient = d_output + at * head_dim;
        float dot = 0.f, result[PIECES] = {};
        for (int element = lane; element < head_dim; element += 32)
            dot += load(gradient + element) * load(output + at * head_dim + element);
        dot = warp_sum(dot);
        if (lane == 0) dots[at] = dot;
        const float log_sum = log_sums[at];
        const Range keys = keys_of(tile, ranges, query, is_causal);
        const int last = keys.last;
        for (int first = keys.first; first <= last; first += 32) {
            const X* rows = qkv + 1ll * first * columns.row;
            float d_score = 0.f;
            if (first + lane <= last) {
                const X* row = rows + 1ll * lane * columns.row;
                const float weight = expf(dot_heads(own, row + columns.key, head_dim) * scale - log_sum);
                d_score = weight * (dot_heads(gradient, row + columns.value, head_dim) - dot);
            }
            const float* shared = share(d_scores[warp], d_score);
            for (int key = 0; key < min(32, last + 1 - first); key++)
                add_head(result, shared[key], rows + 1ll * key * columns.row + columns.key, head_dim);
        }
        store_head(d_qkv + 1ll * query * columns.row + columns.query, result, scale, head_dim);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_backward_keys_general(
    const X* qkv, const float* log_sums, const X* d_output, const float* dots, X* d_qkv, const u32* tiles,
    int tile_count, int heads, int kv_heads, int head_dim, float scale, int is_causal, const u32* ranges) {
    __shared__ float weights[WARPS][32], d_scores[WARPS][32];
    const Tile tile = read_tile(tiles, tile_count + blockIdx.x);
    const int group = heads / kv_heads, end = min(tile.end, tile.first + TILE_ROWS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Columns columns = columns_of(blockIdx.y * group, heads, kv_heads, head_dim);
    for (int key = tile.first + warp; key < end; key += WARPS) {
        const X* own = qkv + 1ll * key * columns.row;
        X* d_row = d_qkv + 1ll * key * columns.row;
        const Range visible = queries_of(tile, ranges, key, is_causal);
        float d_key[PIECES] = {}, d_value[PIECES] = {};
        for (int head = blockIdx.y * group; head < static_cast<int>(blockIdx.y + 1) * group; head++)
            for (int first = visible.first; first <= visible.last; first += 32) {
                const X* queries = qkv + 1ll * first * columns.row + head * head_dim;
                const X* gradients = d_output + (1ll * first * heads + head) * head_dim;
                const long long to_next = 1ll * heads * head_dim;
                float weight = 0.f, d_score = 0.f;
                if (first + lane <= visible.last) {
                    const long long at = 1ll * (first + lane) * heads + head;
                    const X* query = queries + 1ll * lane * columns.row;
                    const X* gradient = gradients + lane * to_next;
                    weight = expf(dot_heads(own + columns.key, query, head_dim) * scale - log_sums[at]);
                    d_score = weight * (dot_heads(own + columns.value, gradient, head_dim) - dots[at]);
                }
                const float* shared_weights = share(weights[warp], weight);
                const float* shared_scores = share(d_scores[warp], d_score);
                for (int query = 0; query < min(32, visible.last + 1 - first); query++) {
                    add_head(d_value, shared_weights[query], gradients + query * to_next, head_dim);
                    add_head(d_key, shared_scores[query], queries + 1ll * query * columns.row, head_dim);
                }
            }
        store_head(d_row + columns.key, d_key, scale, head_dim);
        store_head(d_row + columns.value, d_value, 1.f, head_dim);
    }
}
