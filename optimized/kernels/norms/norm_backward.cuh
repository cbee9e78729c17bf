// A row of norm_backward.cu in registers: fetching it, its arithmetic, and the columns' sums.
//
// kRowWarps warps hold a row, 256 * kVectors neighbouring columns each, 8 * kVectors to a lane; a block takes kChains
// rows at a time. kWhole: rows of exactly as many elements as the warps hold, a constant.
#pragma once

#include "norm_row.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid.cuh"

namespace twin {

// What follows from a configuration (norm_backward.cu).
template <class Config>
struct NormBackward {
    static constexpr bool kLayerNorm = Config::kLayerNorm;
    static constexpr int kRowWarps = Config::kRowWarps, kVectors = Config::kVectors, kChains = Config::kChains;
    static constexpr int kStages = Config::kStages;
    static constexpr int kRowThreads = 32 * kRowWarps, kThreads = kRowThreads * kChains;
    static constexpr int kWidth = kStripe * kVectors * kRowWarps;  // columns that the threads of a row hold
    static_assert(kVectors == 1 || kVectors == 2 || kVectors == 4, "a warp's columns are a subtree of the row's sum");
    static constexpr int kPieces = sizeof(Eight) / 16;
    static constexpr int kTensor = kVectors * kPieces * kThreads;  // 16-byte pieces of the rows of one tensor

    // `mine`: the thread's first piece of a tensor at a stage.
    static __device__ __forceinline__ Eight arrived(const uint4* mine, int vector) {
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
    static __device__ __forceinline__ bool inside(int vector, int left) {
        return Config::kWhole || vector * kStripe < left;
    }

    // `from`: the thread's first element of the row; `left`: elements from there to the row's end.
    template <bool kThroughL1 = false>
    static __device__ __forceinline__ void fetch(uint4* mine, const wide_t* from, int left) {
#pragma unroll
        for (int i = 0; i < kVectors; i++)
            if (inside(i, left))
#pragma unroll
                for (int p = 0; p < kPieces; p++)
                    cp_async_16<kThroughL1>(mine + (i * kPieces + p) * kThreads, from + i * kStripe + p * kLanes);
    }

    // The sums of a thread's columns over the rows so far.
    struct Columns {
        float weight[kVectors][8], bias[kVectors][8];
    };

    // Vector i of the row at `mine`: the gradient, xhat, and g.
    static __device__ __forceinline__ void normalize(const uint4* mine, int i, float mean, float rstd,
                                                     const float (&gamma)[8], float (&grad)[8], float (&xhat)[8],
                                                     float (&g)[8]) {
        const Eight incoming = arrived(mine, i), x = arrived(mine + kTensor, i);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            grad[j] = widen(incoming, j);
            xhat[j] = centered<kLayerNorm>(widen(x, j), mean) * rstd;
            g[j] = grad[j] * gamma[j];
        }
    }

    // A thread's part of a row's sums: those of g of each vector, then those of g * xhat.
    using Sums = float[2 * kVectors];

    // What vector i adds to the row's sums and to the columns'.
    static __device__ __forceinline__ void add_vector(int i, int left, const float (&grad)[8], const float (&xhat)[8],
                                                      const float (&g)[8], Sums& sums, Columns& columns) {
        float gx[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            gx[j] = g[j] * xhat[j];
            columns.weight[i][j] = columns.weight[i][j] + grad[j] * xhat[j];
            if (kLayerNorm) columns.bias[i][j] = columns.bias[i][j] + grad[j];
        }
        sums[i] = inside(i, left) ? tree8(g) : 0.0f;
        sums[kVectors + i] = inside(i, left) ? tree8(gx) : 0.0f;
    }

    // Two sums of a row from its warps.
    using Slots = Leaves<kRowWarps>[2];

    // The warp's part of both; whether this lane wrote one of them.
    static __device__ __forceinline__ bool write_sums(const Sums& sums, Slots& slots) {
        const int lane = threadIdx.x % 32;
        float v = lane_sum(sums);
#pragma unroll
        for (int bit = 1; bit < kVectors; bit *= 2) v = v + __shfl_xor_sync(kAllLanes, v, bit);
        const bool mine = lane % kVectors == 0 && lane < 2 * kVectors;
        if (mine) slots[lane / kVectors].sum[threadIdx.x / 32 % kRowWarps] = v;
        return mine;
    }

    // c1 and c2, when all warps have written.
    static __device__ __forceinline__ float2 row_means(const Slots& slots, float n) {
        const int lane = threadIdx.x % 32;
        // Half of the lanes go on with each sum.
        const float mine = tree<kRowWarps>(slots[lane / 16].sum) / n, other = __shfl_xor_sync(kAllLanes, mine, 16);
        return lane < 16 ? make_float2(mine, other) : make_float2(other, mine);
    }

    // Vector i of dx; `residual`: the thread's first piece of the residual's row, or null.
    static __device__ __forceinline__ void store_dx(wide_t* dx, int i, const float (&xhat)[8], const float (&g)[8],
                                                    float2 c, float rstd, const uint4* residual) {
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = kLayerNorm ? g[j] - c.x : g[j];
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
    static __device__ __forceinline__ void store_partial(const float (&sums)[kVectors][8], uint4* room, float* partial,
                                                         int hidden, int column, int chain) {
        float4* const staged = reinterpret_cast<float4*>(room);  // [kChains][kWidth / 4]
        __syncthreads();                                         // the rows there have been read
#pragma unroll
        for (int i = 0; i < kVectors; i++)
#pragma unroll
            for (int j = 0; j < 8; j += 4)
                staged[(chain * kWidth + column + i * kStripe + j) / 4] =
                    make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
        __syncthreads();
        const auto add = [](float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); };
#pragma unroll 1  // unrolled, it takes more registers than there are
        for (int at = threadIdx.x; 4 * at < hidden; at += kThreads) {
            float4 v = staged[at];
            if constexpr (kChains > 1) v = add(v, staged[kWidth / 4 + at]);
            if constexpr (kChains == 4) v = add(v, add(staged[kWidth / 2 + at], staged[kWidth / 4 * 3 + at]));
            reinterpret_cast<float4*>(partial)[at] = v;
        }
    }

    // Store both sums of the block's columns for norm_total.cu, which may start from here on. (Allowed to start with this
    // grid, it slowed it down.)
    static __device__ __forceinline__ void store_columns(const Columns& columns, uint4* room, float* partial,
                                                         int hidden, int column, int chain) {
        let_next_grid_start();
        const size_t stride = static_cast<size_t>(gridDim.x) * hidden;
        float* const target = partial + static_cast<size_t>(blockIdx.x) * hidden;
        store_partial(columns.weight, room, target, hidden, column, chain);
        if (kLayerNorm) store_partial(columns.bias, room, target + stride, hidden, column, chain);
    }

    struct Statistics {
        float mean, rstd;
    };

    // A thread's part of a block's work: its columns of the rows `begin`, begin + kChains, ... before `end`.
    struct Part {
        uint4* arriving;  // rows on their way, in shared memory: [stage][tensor][vector][piece][thread]
        const wide_t *grad, *x;
        const void* weight;
        const float *mean, *rstd;
        const wide_t* residual;
        wide_t* dx;
        float* partial;
        int zero_centered, parameters;
        int hidden, chain, column, begin, end;
        int left;  // elements from `column` to a row's end

        __device__ __forceinline__ void read_statistics(int row, Statistics& to) const {
            if (row < end) {
                if (kLayerNorm) to.mean = __ldg(mean + row);
                to.rstd = __ldg(rstd + row);
            }
        }

        __device__ __forceinline__ void read_gamma(int i, float (&gamma)[8]) const {
            if (inside(i, left)) affine8(true, weight, parameters, zero_centered != 0, column + i * kStripe, gamma);
        }
    };

    // Bound by memory: 6 bytes an element in bf16, 8 with a residual. A thread keeps its columns' sums in registers while
    // rows stream past. Rows are fetched kStages - 1 ahead by cp.async; a thread copies what it will read itself, so these
    // copies need no barrier. It keeps xhat and g while both sums of the row are exchanged in shared memory, at one barrier
    // a row (two sets of slots in turn).
    static __device__ __forceinline__ void read_once(const Part& part) {
        constexpr int kTensors = 3;  // gradient, x, residual
        __shared__ Slots slots[2][kChains];
        const bool has_residual = part.residual != nullptr;
        const auto fetch_row = [&](int row, int stage) {
            if (row < part.end) {
                uint4* const mine = part.arriving + stage * kTensors * kTensor + threadIdx.x;
                const size_t at = static_cast<size_t>(row) * part.hidden + part.column;
                fetch(mine, part.grad + at, part.left);
                fetch(mine + kTensor, part.x + at, part.left);
                if (has_residual) fetch(mine + 2 * kTensor, part.residual + at, part.left);
            }
            cp_async_commit_group();  // an empty group too, so that the count of groups is that of rows
        };
#pragma unroll
        for (int stage = 0; stage < kStages - 1; stage++) fetch_row(part.begin + stage * kChains, stage);
        Statistics next_row = {};
        part.read_statistics(part.begin, next_row);
        // Only now, since the first rows' copies would wait for it.
        float gamma[kVectors][8];
#pragma unroll
        for (int i = 0; i < kVectors; i++) part.read_gamma(i, gamma[i]);
        Columns columns = {};
        const float n = static_cast<float>(part.hidden);
        int stage = 0;
        for (int row = part.begin, parity = 0; row < part.end; row += kChains, parity ^= 1) {
            fetch_row(row + (kStages - 1) * kChains, stage == 0 ? kStages - 1 : stage - 1);
            cp_async_wait_group<kStages - 1>();
            const float row_mean = next_row.mean, row_rstd = next_row.rstd;
            part.read_statistics(row + kChains, next_row);
            const uint4* const mine = part.arriving + stage * kTensors * kTensor + threadIdx.x;
            float xhat[kVectors][8], g[kVectors][8];
            Sums sums;
#pragma unroll
            for (int i = 0; i < kVectors; i++) {
                float row_grad[8];
                normalize(mine, i, row_mean, row_rstd, gamma[i], row_grad, xhat[i], g[i]);
                add_vector(i, part.left, row_grad, xhat[i], g[i], sums, columns);
            }
            write_sums(sums, slots[parity][part.chain]);
            // Only the threads of one row: a block's rows are independent.
            barrier_sync<kRowThreads>(part.chain + 1);
            const float2 c = row_means(slots[parity][part.chain], n);
            wide_t* const to = part.dx + static_cast<size_t>(row) * part.hidden + part.column;
#pragma unroll
            for (int i = 0; i < kVectors; i++)
                if (inside(i, part.left))
                    store_dx(to, i, xhat[i], g[i], c, row_rstd, has_residual ? mine + 2 * kTensor : nullptr);
            stage = stage == kStages - 1 ? 0 : stage + 1;
        }
        store_columns(columns, part.arriving, part.partial, part.hidden, part.column, part.chain);
    }
};

}  // namespace twin
