// What both kernels of a norm's backward share: fetching a row, its arithmetic, and the columns' sums.
//
// ROW_WARPS warps hold a row, 256 * VECTORS neighbouring columns each, 8 * VECTORS to a lane; a block takes CHAINS rows
// at a time. WHOLE 1: rows of exactly as many elements as the warps hold, a constant.
#pragma once
#include "norm_row.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid.cuh"

namespace twin {

constexpr int kThreads = 32 * ROW_WARPS * CHAINS;
constexpr int kWidth = kStripe * VECTORS * ROW_WARPS;  // columns that the threads of a row hold
static_assert(VECTORS == 1 || VECTORS == 2 || VECTORS == 4, "a warp's columns are a subtree of the row's sum");
constexpr int kPieces = sizeof(Eight) / 16;
constexpr int kTensor = VECTORS * kPieces * kThreads;  // 16-byte pieces of the rows of one tensor

// `mine`: the thread's first piece of a tensor at a stage.
__device__ __forceinline__ Eight arrived(const uint4* mine, int vector) {
    Eight v;
#pragma unroll
    for (int p = 0; p < kPieces; p++) {
        const uint4 piece = mine[(vector * kPieces + p) * kThreads];
        v.words[4 * p] = piece.x, v.words[4 * p + 1] = piece.y;
        v.words[4 * p + 2] = piece.z, v.words[4 * p + 3] = piece.w;
    }
    return v;
}

// Whether the thread's vector lies in the row, which has `left` elements from the thread's first on.
__device__ __forceinline__ bool inside(int vector, int left) { return WHOLE || vector * kStripe < left; }

// `from`: the thread's first element of the row; `left`: elements from there to the row's end.
template <bool kThroughL1 = false>
__device__ __forceinline__ void fetch(uint4* mine, const wide_t* from, int left) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (inside(i, left))
#pragma unroll
            for (int p = 0; p < kPieces; p++)
                cp_async_16<kThroughL1>(mine + (i * kPieces + p) * kThreads, from + i * kStripe + p * kLanes);
}

// The sums of a thread's columns over the rows so far.
struct Columns {
    float weight[VECTORS][8], bias[VECTORS][8];
};

// Vector i of the row at `mine`: the gradient, xhat, and g.
__device__ __forceinline__ void normalize(
    const uint4* mine, int i, float mean, float rstd, const float (&gamma)[8], float (&grad)[8], float (&xhat)[8],
    float (&g)[8]) {
    const Eight incoming = arrived(mine, i), x = arrived(mine + kTensor, i);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        grad[j] = widen(incoming, j);
        xhat[j] = centered(widen(x, j), mean) * rstd;
        g[j] = grad[j] * gamma[j];
    }
}

// A thread's part of a row's sums: those of g of each vector, then those of g * xhat.
using Sums = float[2 * VECTORS];

// What vector i adds to the row's sums and to the columns'.
__device__ __forceinline__ void add_vector(
    int i, int left, const float (&grad)[8], const float (&xhat)[8], const float (&g)[8], Sums& sums,
    Columns& columns) {
    float gx[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        gx[j] = g[j] * xhat[j];
        columns.weight[i][j] = columns.weight[i][j] + grad[j] * xhat[j];
        if (KIND == 0) columns.bias[i][j] = columns.bias[i][j] + grad[j];
    }
    sums[i] = inside(i, left) ? tree8(g) : 0.0f;
    sums[VECTORS + i] = inside(i, left) ? tree8(gx) : 0.0f;
}

// Two sums of a row from its warps.
using Slots = Leaves<ROW_WARPS>[2];

// The warp's part of both; whether this lane wrote one of them.
__device__ __forceinline__ bool write_sums(const Sums& sums, Slots& slots) {
    const int lane = threadIdx.x % 32;
    float v = lane_sum(sums);
#pragma unroll
    for (int bit = 1; bit < VECTORS; bit *= 2) v = v + __shfl_xor_sync(kAllLanes, v, bit);
    const bool mine = lane % VECTORS == 0 && lane < 2 * VECTORS;
    if (mine) slots[lane / VECTORS].sum[threadIdx.x / 32 % ROW_WARPS] = v;
    return mine;
}

// c1 and c2, when all warps have written.
__device__ __forceinline__ float2 row_means(const Slots& slots, float n) {
    const int lane = threadIdx.x % 32;
    // Half of the lanes go on with each sum.
    const float mine = tree<ROW_WARPS>(slots[lane / 16].sum) / n, other = __shfl_xor_sync(kAllLanes, mine, 16);
    return lane < 16 ? make_float2(mine, other) : make_float2(other, mine);
}

// Vector i of dx; `residual`: the thread's first piece of the residual's row, or null.
__device__ __forceinline__ void store_dx(
    wide_t* dx, int i, const float (&xhat)[8], const float (&g)[8], float2 c, float rstd, const uint4* residual) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        v[j] = KIND == 0 ? g[j] - c.x : g[j];
        v[j] = rstd * (v[j] - xhat[j] * c.y);
    }
    if (residual != nullptr) {
        const Eight other = arrived(residual, i);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = widen(narrow(v[j])) + widen(other, j);
    }
    store_eight(dx + i * kStripe, v);
}

// Add the chains' sums in pairs and store them to partial[block], through shared memory, so that warps write whole
// lines: if threads wrote what they hold, 16 bytes of every 32, L2 would get twice the requests.
__device__ __forceinline__ void store_partial(
    const float (&sums)[VECTORS][8], uint4* room, float* partial, int hidden, int column, int chain) {
    float4* const staged = reinterpret_cast<float4*>(room);  // [CHAINS][kWidth / 4]
    __syncthreads();                                         // the rows there have been read
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
#pragma unroll
        for (int j = 0; j < 8; j += 4)
            staged[(chain * kWidth + column + i * kStripe + j) / 4] =
                make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
    __syncthreads();
    const auto add = [](float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); };
#pragma unroll 1  // unrolled, it takes more registers than there are
    for (int at = threadIdx.x; 4 * at < hidden; at += kThreads) {
        float4 v = staged[at];
        if constexpr (CHAINS > 1) v = add(v, staged[kWidth / 4 + at]);
        if constexpr (CHAINS == 4) v = add(v, add(staged[kWidth / 2 + at], staged[kWidth / 4 * 3 + at]));
        reinterpret_cast<float4*>(partial)[at] = v;
    }
}

// Store both sums of the block's columns for norm_total.cu, which may start from here on. (Allowed to start with this
// grid, it slowed it down.)
__device__ __forceinline__ void store_columns(
    const Columns& columns, uint4* room, float* partial, int hidden, int column, int chain) {
    let_next_grid_start();
    const size_t stride = static_cast<size_t>(gridDim.x) * hidden;
    float* const target = partial + static_cast<size_t>(blockIdx.x) * hidden;
    store_partial(columns.weight, room, target, hidden, column, chain);
    if (KIND == 0) store_partial(columns.bias, room, target + stride, hidden, column, chain);
}

}  // namespace twin
