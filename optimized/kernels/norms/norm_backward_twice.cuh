// norm_backward.cu for rows too long to keep in registers. A row's work has two halves: up to its sums c1 and c2, and from them on.
//
// A thread reads a row from shared memory and computes xhat and g in each half. Since it keeps nothing in between, the
// first half of the next row comes before the second half of this one: by then the sums are there, and the warps of a
// row need not wait for each other. An mbarrier counts the warps that have written. A warp may be ahead of another by a
// row and a half, so there are four sets of sums.
//
// Gradient and x are fetched kStages - 1 rows ahead; the residual, which only the second half needs, during the first
// half of the next row: there is room for one of it, after the stages.
#pragma once

#include "norm_backward.cuh"
#include "ptx/mbarrier.cuh"

namespace twin {

template <class Config>
struct ReadTwice {
    using Norm = NormBackward<Config>;
    static constexpr int kRowWarps = Norm::kRowWarps, kVectors = Norm::kVectors, kChains = Norm::kChains;
    static constexpr int kStages = Norm::kStages;
    static constexpr bool kKeepsGamma = Config::kKept == 1;
    static constexpr int kSets = 4;

    struct Exchange {
        typename Norm::Slots slots;
        unsigned long long barrier;
    };

    using Exchanges = Exchange[kChains][kSets];

    static __device__ __forceinline__ Exchanges& exchanges() {
        __shared__ Exchanges all;
        return all;
    }

    static __device__ __forceinline__ void init() {
        if (threadIdx.x < kChains * kSets)  // each warp arrives with two sums
            mbarrier_init(shared_address(&exchanges()[threadIdx.x / kSets][threadIdx.x % kSets].barrier),
                          2 * kRowWarps);
    }

    static __device__ __forceinline__ void run(const typename Norm::Part& part) {
        constexpr int kTensors = 2;
        Exchanges& exchange = exchanges();
        const auto fetch_row = [&](int row, int stage) {
            if (row < part.end) {
                uint4* const mine = part.arriving + stage * kTensors * Norm::kTensor + threadIdx.x;
                const size_t at = static_cast<size_t>(row) * part.hidden + part.column;
                Norm::template fetch<true>(mine, part.grad + at, part.left);
                Norm::template fetch<true>(mine + Norm::kTensor, part.x + at, part.left);
            }
            cp_async_commit_group();  // an empty group too, so that the count of groups is that of rows
        };
        uint4* const residual_row =
            part.residual == nullptr ? nullptr : part.arriving + kStages * kTensors * Norm::kTensor + threadIdx.x;
        const auto fetch_residual = [&](int row) {
            if (part.residual != nullptr && row < part.end)
                Norm::template fetch<true>(
                    residual_row, part.residual + static_cast<size_t>(row) * part.hidden + part.column, part.left);
            cp_async_commit_group();
        };
#pragma unroll
        for (int stage = 0; stage < kStages - 1; stage++) {
            if (stage > 0) fetch_residual(part.end);  // none: an empty group
            fetch_row(part.begin + stage * kChains, stage);
        }
        float kept[kVectors][8];
#pragma unroll
        for (int i = 0; i < (kKeepsGamma ? kVectors : 0); i++) part.read_gamma(i, kept[i]);
        const auto normalize_row = [&](const uint4* mine, int i, float mean, float rstd, float (&grad)[8],
                                       float (&xhat)[8], float (&g)[8]) {
            if constexpr (kKeepsGamma) {
                Norm::normalize(mine, i, mean, rstd, kept[i], grad, xhat, g);
            } else {
                float gamma[8];
                part.read_gamma(i, gamma);
                Norm::normalize(mine, i, mean, rstd, gamma, grad, xhat, g);
            }
        };
        typename Norm::Columns columns = {};
        const auto first_half = [&](int stage, float mean, float rstd, Exchange& to) {
            typename Norm::Sums sums;
#pragma unroll
            for (int i = 0; i < kVectors; i++) {
                float row_grad[8], xhat[8], g[8];
                normalize_row(part.arriving + stage * kTensors * Norm::kTensor + threadIdx.x, i, mean, rstd, row_grad,
                              xhat, g);
                Norm::add_vector(i, part.left, row_grad, xhat, g, sums, columns);
            }
            if (Norm::write_sums(sums, to.slots)) mbarrier_arrive(shared_address(&to.barrier));
        };
        const float n = static_cast<float>(part.hidden);
        const auto second_half = [&](int stage, float mean, float rstd, const Exchange& from, int parity, wide_t* to) {
            mbarrier_wait(shared_address(&from.barrier), parity);
            const float2 c = Norm::row_means(from.slots, n);
#pragma unroll
            for (int i = 0; i < kVectors; i++) {
                if (Norm::inside(i, part.left)) {
                    float row_grad[8], xhat[8], g[8];
                    normalize_row(part.arriving + stage * kTensors * Norm::kTensor + threadIdx.x, i, mean, rstd,
                                  row_grad, xhat, g);
                    Norm::store_dx(to, i, xhat, g, c, rstd, residual_row);
                }
            }
        };
        typename Norm::Statistics next_row = {};
        part.read_statistics(part.begin, next_row);
        float row_mean = next_row.mean, row_rstd = next_row.rstd;
        part.read_statistics(part.begin + kChains, next_row);
        __syncthreads();  // the barriers are initialised
        cp_async_wait_group<2 * (kStages - 2)>();
        if (part.begin < part.end) first_half(0, row_mean, row_rstd, exchange[part.chain][0]);
        unsigned turn = 0;
        for (int row = part.begin, stage = 0; row < part.end; row += kChains, ++turn) {
            const int next = stage == kStages - 1 ? 0 : stage + 1;
            fetch_residual(row);
            fetch_row(row + (kStages - 1) * kChains, stage == 0 ? kStages - 1 : stage - 1);
            const float next_mean = next_row.mean, next_rstd = next_row.rstd;
            part.read_statistics(row + 2 * kChains, next_row);
            cp_async_wait_group<2 * (kStages - 2)>();
            if (row + kChains < part.end)
                first_half(next, next_mean, next_rstd, exchange[part.chain][(turn + 1) % kSets]);
            cp_async_wait_group<1>();  // the residual
            second_half(stage, row_mean, row_rstd, exchange[part.chain][turn % kSets], turn / kSets & 1,
                        part.dx + static_cast<size_t>(row) * part.hidden + part.column);
            row_mean = next_mean, row_rstd = next_rstd;
            stage = next;
        }
        Norm::store_columns(columns, part.arriving, part.partial, part.hidden, part.column, part.chain);
    }
};

}  // namespace twin
