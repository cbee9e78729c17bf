// The likeliest token of rows of logits and its loss. Definition: reference/ops/vocabulary/likeliest.py.
//
//     t = the first place of max x         loss = log S - (x[t] - m), S and m as cross_entropy.cu has them
//
// Each logit is read once. The order of S is a row's 256 lanes, each a chain of tiles, of which a rescaled sum needs the
// maxima of those before: so a block takes 32 lanes of a row and a warp of it one tile of each, finds their maxima, and
// then all exponentials at once. Only the sums of groups go along the chain. Eight blocks share a row, because a batch
// of one has few rows: all of its logits are on their way at once. A second kernel joins a row's lanes.
//
// Defines: WIDE (0 fp32, 1 bf16, 2 fp16), VECTOR (rows start at multiples of 16 bytes).
#include "common/elementary.cuh"
#include "common/log.cuh"
#include "common/row_sum.cuh"
#include "common/wide.cuh"
#include "vocabulary/row_lanes.cuh"

using namespace twin;

constexpr int kRowLanes = 256, kJoinWarps = kRowLanes / 32, kBlocks = 8;
constexpr int kElements = 8;  // of a group: neighbours that a lane takes at a time
constexpr int kGroups = 4;    // of a lane's tile
constexpr int kStride = kRowLanes * kElements;
constexpr int kTile = kGroups * kStride;
constexpr int kTiles = 16;  // of a lane at a time: a warp takes one
constexpr int kThreads = 32 * kTiles;

__device__ __forceinline__ Eight load_group(const wide_t* x, int left) {
#if VECTOR
    if (left >= kElements) return load8(x);
#endif
    return load_elements<kElements>(x, left);
}

// logits [rows, cols]; of each lane its maximum, that one's first place, and its sum: [rows, 256].
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    likeliest_lanes(const wide_t* logits, float* tops, int* places, float* sums, int cols) {
    __shared__ float tile_tops[kTiles][32], group_sums[kTiles][kGroups][32];
    __shared__ int tile_places[kTiles][32];
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int row_lane = static_cast<int>(blockIdx.x) % kBlocks * 32 + lane, first = row_lane * kElements;
    const long long row = blockIdx.x / kBlocks;
    const wide_t* const x = logits + row * cols;
    Top top{lowest(), 0};    // of the lane's tiles so far; the first warp's counts
    float sum = 0.0f;        // the first warp's
    float known = lowest();  // the same maximum, in every warp

    for (int begin = 0; begin < cols; begin += kTiles * kTile) {
        const int at = begin + warp * kTile + first, left = cols - at;
        Eight v[kGroups];
        Top mine{lowest(), 0};
#pragma unroll
        for (int i = 0; i < kGroups; i++) v[i] = load_group(x + at + kStride * i, left - kStride * i);
#pragma unroll
        for (int i = 0; i < kGroups; i++) {
#pragma unroll
            for (int j = 0; j < kElements; j++) {
                const float value = widen(v[i], j);
                if (j < left - kStride * i && value > mine.value) mine = {value, at + kStride * i + j};
            }
        }
        tile_tops[warp][lane] = mine.value, tile_places[warp][lane] = mine.place;
        __syncthreads();

        float upto = known;
#pragma unroll
        for (int t = 0; t < kTiles; t++) {
            known = fmaxf(known, tile_tops[t][lane]);
            if (t == warp) upto = known;
        }
        const float origin = origin_of(upto);
#pragma unroll
        for (int i = 0; i < kGroups; i++) {
            float e[kElements];
#pragma unroll
            for (int j = 0; j < kElements; j++)
                e[j] = j < left - kStride * i ? twin::exp(widen(v[i], j) - origin) : 0.0f;
            group_sums[warp][i][lane] = halving_sum(e);
        }
        __syncthreads();

        if (warp == 0) {
            for (int t = 0; t < kTiles; t++) {
                const int rest = cols - begin - t * kTile - first;
                if (rest <= 0) break;
                const float before = top.value;
                if (tile_tops[t][lane] > top.value) top = {tile_tops[t][lane], tile_places[t][lane]};
                sum = sum * twin::exp(before - origin_of(top.value));
#pragma unroll
                for (int i = 0; i < kGroups; i++)
                    if (rest > kStride * i) sum = sum + group_sums[t][i][lane];
            }
        }
        __syncthreads();
    }
    if (warp != 0) return;
    const long long to = row * kRowLanes + row_lane;
    tops[to] = top.value, places[to] = top.place, sums[to] = sum;
}

// token, loss [rows].
extern "C" __global__ void __launch_bounds__(kRowLanes)
    likeliest(const wide_t* logits, const float* tops, const int* places, const float* sums, long long* token,
              float* loss, int cols) {
    __shared__ float values[kJoinWarps], warp_sums[kJoinWarps];
    __shared__ int firsts[kJoinWarps];
    const long long row = blockIdx.x, from = row * kRowLanes + threadIdx.x;
    const float mine = tops[from], sum = sums[from];
    Top top{mine, places[from]};
    join_lanes(top);
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = top.value, firsts[threadIdx.x / 32] = top.place;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kJoinWarps; warp++) top.join(values[warp], firsts[warp]);
    const float m = origin_of(top.value) + 0.0f;  // never -0
    const float total = add_lanes<kJoinWarps>(sum * twin::exp(mine - m), warp_sums);
    if (threadIdx.x != 0) return;
    token[row] = top.place;
    loss[row] = twin::log(total) - (widen(logits[row * cols + top.place]) - m);
}
