// norm_cast_transpose: LayerNorm or RMSNorm, cast to FP8 from fp32, with the transposed copy and the amax. With ROUND, of
// 16-bit x: cast from y rounded to x's type, without an amax.
//
//     y         as in norm.cu, fp32, not rounded further
//     q[r, c]   = satfinite_rne(y[r, c] * scale[0])         NaN -> 0x7F
//     q_t[c, r] = q[r, c]; 0x00 for rows <= r < ceil16(rows)
//     scale_inv = 1 / scale[0]                              IEEE division
//     amax[0]   = max(amax[0], max |y|)                     y not scaled, NaN ignored; skipped if amax is null
//
// x [rows, hidden] of type WIDE; hidden a multiple of 16, at most 16384; q [rows,
// hidden], q_t [hidden, ceil16(rows)] FP8 (FP8); mean, rstd fp32 [rows].
//
// Bound by memory: 4 bytes an element in bf16. A block takes 64 rows at a time, 64 bytes of each row of q_t: two whole
// sectors, one request to L2. A warp holds a row in registers (norm_registers.cuh) and writes its codes to q and to shared
// memory. Then threads read 16 rows by 8 columns of codes back, transpose them in registers and write 16 bytes of each
// row of q_t; 4 neighbouring lanes fill the two sectors. Blocks are persistent: the first rows of the next tile are
// loaded during the transposition.
//
// CLUSTER is defined for rows of more than 1024 elements: a form of its own, below.
#include "norm_row.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/store_async.cuh"
#include "common/quantize.cuh"
#include "common/store_transposed.cuh"
#ifndef CLUSTER
#include "norm_registers.cuh"
#endif
#ifdef ROUND
#include "common/wide_store.cuh"
#endif

using namespace twin;

#ifdef ROUND
// y in x's type, and back.
template <int kCount>
__device__ __forceinline__ void round_to_wide(float (&to)[kCount], const float (&y)[kCount]) {
    static_assert(sizeof(wide_t) == 2, "ROUND is of 16-bit numbers");
    Vector<kCount> rounded;
#pragma unroll
    for (int j = 0; j < kCount; j += 2) rounded.words[j / 2] = word_of(y + j);
#pragma unroll
    for (int j = 0; j < kCount; j++) to[j] = widen(rounded, j);
}
#endif

#ifndef CLUSTER

struct Config {
    static constexpr bool kLayerNorm = KIND == 0, kWhole = WHOLE;
    static constexpr int kRowWarps = ROW_WARPS, kTileWarps = TILE_WARPS;
};
using Rows = RegisterRows<Config>;
static_assert(Config::kRowWarps == 1, "a warp holds a row");

constexpr int kTileWarps = Config::kTileWarps, kThreads = 32 * kTileWarps;
constexpr int kTileRows = 64, kRuns = kTileRows / kRunRows;
constexpr int kSkew = 128 / kRuns;  // bytes between runs of rows in shared memory: lanes read other banks

extern __shared__ __align__(16) float affine[];  // gamma, beta; codes, [kRuns][16 rows][hidden]

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    norm_cast_transpose(const wide_t* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                        const float* __restrict__ scale_slot, float* amax_slot, unsigned char* __restrict__ q,
                        unsigned char* __restrict__ q_t, float* __restrict__ scale_inv, float* __restrict__ mean,
                        float* __restrict__ rstd, int rows, int length, float eps, int zero_centered, int parameters) {
    const float scale = *scale_slot;
    const Rows::Held held(length);
    const int hidden = held.hidden;
    const int warp = threadIdx.x / 32;
    const int run_stride = kRunRows * hidden + kSkew;
    unsigned char* const codes = reinterpret_cast<unsigned char*>(affine + Rows::kParameters * hidden);
#ifndef ROUND
    float amax = 0.0f;
#endif
    int tile = blockIdx.x;
    Rows::Packed packed, next;
    Rows::Slots unused;  // a warp needs no other's sum
    if (tile * kTileRows + warp < rows) packed = held.load(x, tile * kTileRows + warp);
    Rows::stage_parameters(affine, weight, bias, parameters, zero_centered != 0, hidden);
    for (; tile * kTileRows < rows; tile += gridDim.x) {
#pragma unroll 1
        for (int local = warp; local < kTileRows; local += kTileWarps) {
            const int row = tile * kTileRows + local;
            const int after = local + kTileWarps < kTileRows ? row + kTileWarps : (tile + gridDim.x) * kTileRows + warp;
            if (after < rows) next = held.load(x, after);
            if (row < rows) {
                const Rows::Row normalized(packed, held, eps, unused, 0, 0);
                normalized.store_statistics(mean, rstd, row, held);
                unsigned char* const target = q + static_cast<size_t>(row) * hidden + held.first;
                unsigned char* const copy =
                    codes + local / kRunRows * run_stride + local % kRunRows * hidden + held.first;
#ifdef ROUND
                normalized.for_each_output(affine, held, [&](int i, const float (&exact)[8]) {
                    float y[8];
                    round_to_wide(y, exact);
#else
                normalized.for_each_output(affine, held, [&](int i, const float (&y)[8]) {
#pragma unroll
                    for (int j = 0; j < 8; j++) amax = amax_of(amax, y[j]);
#endif
                    const uint2 words = make_uint2(quantize4(y, scale), quantize4(y + 4, scale));
                    *reinterpret_cast<uint2*>(target + kStripe * i) = words;
                    *reinterpret_cast<uint2*>(copy + kStripe * i) = words;
                });
            }
            packed = next;
        }
        __syncthreads();
        for (int unit = threadIdx.x; unit < kRuns * hidden / 8; unit += kThreads) {
            const int run = unit % kRuns, column = unit / kRuns * 8, row = tile * kTileRows + run * kRunRows;
            if (row < rows)
                store_transposed(codes + run * run_stride + column, hidden, q_t + column * q_t_stride(rows) + row,
                                 q_t_stride(rows), rows - row);
        }
        __syncthreads();  // the codes have been read
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
#ifndef ROUND
    if (amax_slot != nullptr) commit_amax<kTileWarps>(amax, amax_slot);
#endif
}

#else

// Rows of more than 1024 elements.
//
// hidden is a multiple of 16, at most 512 * STRIPES * CLUSTER; WHOLE 1: exactly that.
//
// A cluster of CLUSTER blocks takes TILE_ROWS rows, each block 512 * STRIPES columns of them. A warp holds its block's
// part of a row in registers, a lane 16 neighbours of each 512; the warps of a row, one in each block, send each other
// their sums (`st.async`, counted by a barrier). Codes are transposed as in norm_cast_transpose.cu, TILE_ROWS bytes of
// a row of q_t at a time. A warp holds as much of a row as its registers can, because each warp pays for the shuffles,
// the division, the root and the exchange.
//
// The copy engine brings each warp its next RING rows in shared memory. Clusters take neighbouring tiles in turn, so
// that long pieces of a row of q_t are written at about the same time (with a contiguous range of rows to each cluster
// it took 1.15 to 1.5 times as long); the last tiles are half as high if that divides the rest more evenly.

struct Config {
    static constexpr bool kLayerNorm = KIND == 0, kWhole = WHOLE;
    static constexpr int kCluster = CLUSTER, kStripes = STRIPES;
    static constexpr int kTileRows = TILE_ROWS, kTileWarps = TILE_WARPS, kRing = RING;
};
constexpr bool kLayerNorm = Config::kLayerNorm, kWhole = Config::kWhole;
constexpr int kCluster = Config::kCluster, kStripes = Config::kStripes, kRing = Config::kRing;
constexpr int kTileRows = Config::kTileRows, kTileWarps = Config::kTileWarps;

constexpr int kValues = 16;  // neighbours in a lane
constexpr int kSpan = 32 * kValues;
constexpr int kShare = kSpan * kStripes;     // columns of a block
constexpr int kLeaf = kStripes & -kStripes;  // stripes of a warp whose sum is a subtree of the row's
constexpr int kWarpLeaves = kStripes / kLeaf, kLeaves = kWarpLeaves * kCluster;
constexpr int kLaneSums = power_of_two(kStripes);
constexpr int kThreads = 32 * kTileWarps;
constexpr int kRuns = kTileRows / kRunRows;
constexpr int kSkew = 128 / kRuns;  // bytes between runs of rows in shared memory: lanes read other banks
constexpr int kRunStride = kRunRows * kShare + kSkew;
constexpr int kParameters = kLayerNorm ? 2 : 1;

// gamma and beta of the block's columns, as norm_registers.cuh stages them: [gamma, beta][4 of 16 columns][16 columns][4].
__device__ __forceinline__ void stage_share(float4* shared, const void* weight, const void* bias, int type,
                                            bool zero_centered, int first, int columns) {
    for (int at = threadIdx.x * 8; at < columns; at += kThreads * 8) {
#pragma unroll
        for (int which = 0; which < kParameters; which++) {
            float v[8];
            affine8(which == 0, which == 0 ? weight : bias, type, zero_centered, first + at, v);
            float4* const to = shared + (4 * which + at % kValues / 4) * (kShare / kValues) + at / kValues;
            to[0] = make_float4(v[0], v[1], v[2], v[3]);
            to[kShare / kValues] = make_float4(v[4], v[5], v[6], v[7]);
        }
    }
}

__device__ __forceinline__ void staged(const float4* shared, int at, float (&out)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
        const float4 four = shared[i / 4 * (kShare / kValues) + at / kValues];
        out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
    }
}

// Where the warps of a row exchange a sum. Two are used in turn: when a warp has got the sum of one, all have read the
// other, and it may send there again.
struct Exchange {
    Leaves<kLeaves> slots;
    unsigned long long barrier;
};

// The row's sum from a lane's sums of its stripes; every lane of its warps gets it.
__device__ __forceinline__ float row_sum(const float (&stripes)[kLaneSums], Exchange& exchange, int parity, int rank) {
    float sum = lane_sum(stripes);
#pragma unroll
    for (int bit = 1; bit < kLeaf; bit *= 2) sum = sum + __shfl_xor_sync(kAllLanes, sum, bit);
    if constexpr (kLeaves == 1) {
        return sum;
    } else {
        const int lane = threadIdx.x % 32, stripe = lane % kLaneSums;
        const unsigned barrier = shared_address(&exchange.barrier);
        if (lane == 0) mbarrier_arrive_expect_tx(barrier, kLeaves * sizeof(float));
        const unsigned slot = shared_address(&exchange.slots.sum[rank * kWarpLeaves + stripe / kLeaf]);
        if (stripe < kStripes && stripe % kLeaf == 0)
#pragma unroll
            for (int to = lane / kLaneSums; to < kCluster; to += 32 / kLaneSums)
                store_async(map_to_rank(slot, to), sum, map_to_rank(barrier, to));
        mbarrier_wait(barrier, parity);
        if constexpr (kLeaves <= 8) return tree<kLeaves>(exchange.slots.sum);
        constexpr int kPadded = power_of_two(kLeaves);
        sum = lane % kPadded < kLeaves ? exchange.slots.sum[lane % kPadded] : 0.0f;
#pragma unroll
        for (int bit = 1; bit < kPadded; bit *= 2) sum = sum + __shfl_xor_sync(kAllLanes, sum, bit);
        return sum;
    }
}

// [gamma, beta]; codes [kRuns][16 rows][kShare]; arriving rows [kTileWarps][kRing][kShare].
extern __shared__ __align__(128) unsigned char shared[];

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 1)
    norm_cast_transpose(const wide_t* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                        const float* __restrict__ scale_slot, float* amax_slot, unsigned char* __restrict__ q,
                        unsigned char* __restrict__ q_t, float* __restrict__ scale_inv, float* __restrict__ mean,
                        float* __restrict__ rstd, int rows, int length, float eps, int zero_centered, int parameters) {
    __shared__ Exchange exchanges[kTileWarps][2];
    __shared__ unsigned long long full[kTileWarps][kRing];  // a row has arrived
    float4* const affine = reinterpret_cast<float4*>(shared);
    unsigned char* const codes = shared + kParameters * kShare * sizeof(float);
    const int hidden = kWhole ? kShare * kCluster : length;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = kCluster == 1 ? 0 : blockIdx.x % kCluster, cluster = blockIdx.x / kCluster;
    const int clusters = gridDim.x / kCluster;
    const int columns = kWhole ? kShare : max(0, min(kShare, hidden - rank * kShare));
    const int first = lane * kValues;
    const auto inside = [&](int stripe) { return kWhole || first + kSpan * stripe < columns; };
    wide_t* const ring = reinterpret_cast<wide_t*>(codes + kRuns * kRunStride) + warp * kRing * kShare;
    if (lane == 0) {
        for (int i = 0; i < 2; i++) mbarrier_init(shared_address(&exchanges[warp][i].barrier), 1);
        for (int i = 0; i < kRing; i++) mbarrier_init(shared_address(&full[warp][i]), 1);
        fence_mbarrier_init();
    }
    if (kCluster > 1) cluster_arrive_relaxed();

    // Tiles of `height` rows from `base` on, one for each cluster.
    const auto height_at = [&](int base) {
        return rows - base > clusters * (kTileRows / 2) ? kTileRows : kTileRows / 2;
    };
    int fill_base = 0, fill_height = height_at(0), fill_local = warp;
    const auto fill = [&](int slot) {  // by one lane
        const int row = fill_base + cluster * fill_height + fill_local;
        if (row < rows) {
            const unsigned barrier = shared_address(&full[warp][slot]), bytes = columns * sizeof(wide_t);
            mbarrier_arrive_expect_tx(barrier, bytes);
            if (kWhole || bytes != 0)
                bulk_load(shared_address(ring + slot * kShare), x + static_cast<size_t>(row) * hidden + rank * kShare,
                          bytes, barrier);
        }
        fill_local += kTileWarps;
        if (fill_local >= fill_height) {
            fill_base += clusters * fill_height, fill_height = height_at(fill_base), fill_local = warp;
        }
    };
    if (lane == 0)
        for (int slot = 0; slot < kRing; slot++) fill(slot);
    const float scale = *scale_slot, n = static_cast<float>(hidden);
    stage_share(affine, weight, bias, parameters, zero_centered != 0, rank * kShare, columns);
    __syncthreads();
    if (kCluster > 1) cluster_wait();  // all blocks run, and their barriers are initialised

#ifndef ROUND
    float amax = 0.0f;
#endif
    int slot = 0, parity = 0, turn = 0;
    const auto sum_of_row = [&](const float (&stripes)[kLaneSums]) {
        const float sum = row_sum(stripes, exchanges[warp][turn & 1], turn >> 1 & 1, rank);
        ++turn;
        return sum;
    };
    for (int base = 0, height; base < rows; base += clusters * height) {
        height = height_at(base);
        const int tile = base + cluster * height;
#pragma unroll 1
        for (int local = warp; local < height; local += kTileWarps) {
            const int row = tile + local;
            if (row >= rows) break;
            mbarrier_wait(shared_address(&full[warp][slot]), parity);
            float v[kStripes][kValues], stripes[kLaneSums] = {}, center = 0.0f;
#pragma unroll
            for (int i = 0; i < kStripes; i++) {
                const uint4* const from = reinterpret_cast<const uint4*>(ring + slot * kShare + kSpan * i + first);
                Vector<kValues> packed = {};
                if (inside(i)) {
#pragma unroll
                    for (int p = 0; p < sizeof(packed) / 16; p++) {
                        const uint4 piece = from[p];
                        packed.words[4 * p] = piece.x, packed.words[4 * p + 1] = piece.y;
                        packed.words[4 * p + 2] = piece.z, packed.words[4 * p + 3] = piece.w;
                    }
                }
#pragma unroll
                for (int j = 0; j < kValues; j++) v[i][j] = widen(packed, j);
                stripes[i] = tree<kValues>(v[i]);
            }
            const auto refill = [&] {  // the slot is free: after the sum, every lane has its part in registers
                if (lane == 0) fill(slot);
            };
            if (kLayerNorm) {
                center = sum_of_row(stripes) / n;
                refill();
            }
#pragma unroll
            for (int i = 0; i < kStripes; i++) {
                float squares[kValues];
#pragma unroll
                for (int j = 0; j < kValues; j++) {
                    v[i][j] = centered<kLayerNorm>(v[i][j], center);
                    squares[j] = v[i][j] * v[i][j];
                }
                stripes[i] = inside(i) ? tree<kValues>(squares) : 0.0f;
            }
            const float inverse = 1.0f / sqrtf(sum_of_row(stripes) / n + eps);
            if (!kLayerNorm) refill();
            if (lane == 0 && rank == 0) {
                if (kLayerNorm) mean[row] = center;
                rstd[row] = inverse;
            }
            unsigned char* const target = q + static_cast<size_t>(row) * hidden + rank * kShare + first;
            unsigned char* const copy = codes + local / kRunRows * kRunStride + local % kRunRows * kShare + first;
#pragma unroll
            for (int i = 0; i < kStripes; i++) {
                if (!inside(i)) continue;
                float gamma[kValues], beta[kValues], y[kValues];
                staged(affine, first + kSpan * i, gamma);
                if (kLayerNorm) staged(affine + kShare / 4, first + kSpan * i, beta);
#pragma unroll
                for (int j = 0; j < kValues; j++) {
                    y[j] = (v[i][j] * inverse) * gamma[j];
                    if (kLayerNorm) y[j] = y[j] + beta[j];
#ifndef ROUND
                    amax = amax_of(amax, y[j]);
#endif
                }
#ifdef ROUND
                round_to_wide(y, y);
#endif
                const uint4 sixteen = make_uint4(quantize4(y, scale), quantize4(y + 4, scale), quantize4(y + 8, scale),
                                                 quantize4(y + 12, scale));
                *reinterpret_cast<uint4*>(target + kSpan * i) = sixteen;
                *reinterpret_cast<uint4*>(copy + kSpan * i) = sixteen;
            }
            if (++slot == kRing) slot = 0, parity ^= 1;
        }
        __syncthreads();
        for (int unit = threadIdx.x; unit < kRuns * columns / 8; unit += kThreads) {
            const int run = unit % kRuns, column = unit / kRuns * 8, row = tile + run * kRunRows;
            if (run * kRunRows < height && row < rows)
                store_transposed(codes + run * kRunStride + column, kShare,
                                 q_t + (rank * kShare + column) * q_t_stride(rows) + row, q_t_stride(rows), rows - row);
        }
        __syncthreads();  // the codes have been read
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
#ifndef ROUND
    if (amax_slot != nullptr) commit_amax<kTileWarps>(amax, amax_slot);
#endif
}

#endif
