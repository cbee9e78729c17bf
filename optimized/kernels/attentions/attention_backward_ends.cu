// Before and after attention_backward.cu:
//
//   dots             what its tiles need of each query: 384 - m, 1 / l and D
//   attention_keep   the pairs that dropout keeps, a bit for each, so that no tile draws them; some heads at a time
//   attention_dq     dq = round(sum * scale)
//
// Definition and rounding points: reference/ops/attentions/attention_backward.py.
//
// Defines: FORMAT (BF16 | FP16), N_OUT, QUERIES, LENGTHS, PACKED and HEADS_APART, as attention_backward.cu and
// attention_backward_wide.cu, and of `attention_keep` PLACED (0 | 1 | 2), of the others AMAX (0 | 1; attention_amax.cuh),
// whose word `dots` clears.
#include "attention_backward_scheduler.cuh"
#include "attention_amax.cuh"
#include "ptx/grid.cuh"

#ifndef PLACED
#define PLACED 0
#endif

using namespace twin;

#ifdef AMAX
constexpr bool kAmax = true;
#define TWIN_AMAX , unsigned* amax_word
#define TWIN_AMAX_WORD amax_word
#else
constexpr bool kAmax = false;
#define TWIN_AMAX
#define TWIN_AMAX_WORD nullptr
#endif

struct Config : BackwardDefaults {
    using Format = FORMAT;
    static constexpr int kPlaced = PLACED;
    static constexpr bool kLengths = LENGTHS, kPacked = PACKED, kHeadsApart = HEADS_APART;
    static constexpr int kQueries = QUERIES, kChannels = N_OUT;
};
using Format = Config::Format;
using Tile = BackwardTile<Config>;
using Arguments = AttentionArguments<Config>;
using Limits = AttentionLimits<Config>;
using Scratch = BackwardScratch<Config>;

// What says which rows an entry's queries are: of lengths alone, nothing that `dots` needs.
template <class Config>
__device__ __forceinline__
    typename Choice<Config::kPacked, EntryLimits<Config>, const AttentionArguments<Config>&>::Type
    rows_of(const AttentionArguments<Config>& a, int batch) {
    if constexpr (Config::kPacked)
        return limits_of(a, batch);
    else
        return a;
}

// A query is a group of lanes, 8 channels each; a thread takes four queries. grad has the strides grad_*, out those of
// `a.out_*`, in elements. No turn has been taken yet.
extern "C" __global__ void __launch_bounds__(256)
    dots(const __grid_constant__ Arguments a, const unsigned short* grad, const unsigned short* out, long long grad_b,
         long long grad_h, long long grad_s, const float* m, const float* inv,
         const __grid_constant__ Scratch scratch TWIN_AMAX) {
    constexpr int kLanes = Config::kChannels / 8, kGroups = 256 / kLanes, kEach = 4;
    __shared__ float sums[kEach * kGroups];
    let_next_grid_start();
    const int padded = padded_queries(a), lane = threadIdx.x % kLanes;
    const int batch = blockIdx.x / a.heads, head = blockIdx.x % a.heads;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        *scratch.ticket = 0;
#ifdef AMAX
        *amax_word = 0;
#endif
    }
    clear_handed(a, scratch);
    const auto& limits = rows_of(a, batch);
    const int first = blockIdx.y * (kEach * kGroups) + threadIdx.x / kLanes;
    uint4 x[kEach] = {}, y[kEach] = {};
#pragma unroll
    for (int n = 0; n < kEach; n++) {
        const int query = first + n * kGroups;
        if (query >= q_written(a, limits) || 8 * lane >= a.d) continue;
        const int row = query + q_start(limits);
        x[n] = *reinterpret_cast<const uint4*>(grad + batch * grad_b + head * grad_h + row * grad_s + 8 * lane);
        y[n] = *reinterpret_cast<const uint4*>(out + batch * a.out_b + head * a.out_h + row * a.out_s + 8 * lane);
    }
#pragma unroll
    for (int n = 0; n < kEach; n++) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) dot = __fmaf_rn(element<Format>(x[n], i), element<Format>(y[n], i), dot);
        if constexpr (kLanes < 32) dot = dot + 0.0f;  // the lanes of 32 that a query does not have hold zeros
#pragma unroll
        for (int h = kLanes / 2; h > 0; h /= 2) dot = dot + __shfl_xor_sync(0xFFFFFFFF, dot, h);
        if (lane == 0) sums[threadIdx.x / kLanes + n * kGroups] = dot;
    }
    __syncthreads();
    const int query = blockIdx.y * (kEach * kGroups) + threadIdx.x;
    if (threadIdx.x >= kEach * kGroups || query >= padded) return;
    const long long of = static_cast<long long>(blockIdx.x) * a.sq + query;
    const long long at = static_cast<long long>(blockIdx.x) * padded + query;
    const bool exists = query < a.sq;
    scratch.base[at] = exists ? kGrid15 - m[of] : 0.0f;
    scratch.inv[at] = exists ? inv[of] : 0.0f;
    scratch.dots[at] = exists ? sums[threadIdx.x] : 0.0f;
    if (query % Config::kQueries == 0) {
        for (int half = 0; half < Tile::kHalves; half++)
            scratch.turns[at / Config::kQueries * Tile::kHalves + half] = 0;
    }
}

// Draw which pairs of `gridDim.z` heads dropout keeps, where a block of queries visits a block of keys. A warp takes 64
// queries and 16 keys at a time; a block 128 and 128. The works from `first` on are to be taken then.
extern "C" __global__ void __launch_bounds__(256)
    attention_keep(const __grid_constant__ Arguments a, const __grid_constant__ Scratch scratch, unsigned first) {
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) *scratch.ticket = first;
    const Range keys = visited(limits_of(a, (scratch.first_head + blockIdx.z) / a.heads), blockIdx.y * kTileRows);
    if (static_cast<int>(blockIdx.x) < keys.from || static_cast<int>(blockIdx.x) >= keys.to) return;
    const Generator generator = read_state_once(a.rng_state);
    const int head = scratch.first_head + blockIdx.z, key = blockIdx.x * kTileRows + threadIdx.x / 32 * 16;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int query = blockIdx.y * kTileRows + 64 * half;
        const unsigned long long tile = tile_counter<Config::kPlaced>(a, head, query / 16, key / 16);
        const unsigned long long apart = tile_counter<Config::kPlaced>(a, head, query / 16 + 1, key / 16) - tile;
        kept_words(a, scratch, head, query, key)[threadIdx.x % 32] = kept_bits(generator, tile, apart, a.threshold);
    }
}

// dq = round(sum * scale); a block takes a tile of queries and a half of the channels. Zeros where no key is visited.
extern "C" __global__ void __launch_bounds__(256)
    attention_dq(const __grid_constant__ Arguments a, const __grid_constant__ Scratch scratch,
                 unsigned short* dq TWIN_AMAX) {
    wait_for_grid_before();
    const int first = blockIdx.x * Config::kQueries, piece = threadIdx.x / 128;
    const int batch = blockIdx.y / a.heads, head = blockIdx.y % a.heads;
    const int row = first + (Tile::kWords > 1 ? 64 * piece : 0) + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int half = Tile::kHalves > 1 ? blockIdx.z : 0, column = Tile::kWords > 1 ? 0 : 128 * half + 64 * piece;
    const long long tile = (static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * Tile::kHalves + half;
    const float4* from = reinterpret_cast<const float4*>(scratch.dq + tile * (2 * kPiece) + piece * kPiece);
    const Limits& limits = limits_of(a, batch);
    const bool any = first < limits.sq && visited(limits, first & -kTileRows).any();
    float sum[32];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float4 four = any ? from[128 * j + threadIdx.x % 128] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        sum[4 * j] = four.x, sum[4 * j + 1] = four.y, sum[4 * j + 2] = four.z, sum[4 * j + 3] = four.w;
    }
    Amax<Format, kAmax> amax;
    store_rows<Format>(sum, a.scale, a.scale,
                       dq + batch * a.out_b + head * a.out_h + (row + q_start(limits)) * a.out_s + column, a.out_s,
                       q_written(a, limits) - row, a.d - column, amax.also());
    amax.leave_of_block<8>(TWIN_AMAX_WORD);
}
