// norm_backward_long: norm_backward.cu (its formulas, arguments and sums) for rows too long to keep in registers. A
// row's work has two halves: up to its sums c1 and c2, and from them on.
//
// A thread reads a row from shared memory and computes xhat and g in each half. Since it keeps nothing in between, the
// first half of the next row comes before the second half of this one: by then the sums are there, and the warps of a
// row need not wait for each other. An mbarrier counts the warps that have written. A warp may be ahead of another by a
// row and a half, so there are four sets of sums.
//
// Gradient and x are fetched STAGES - 1 rows ahead; the residual, which only the second half needs, during the first
// half of the next row. KEPT 1: a thread keeps gamma; KEPT 0: it reads gamma from L1 in each half.
#include "norm_backward.cuh"
#include "ptx/mbarrier.cuh"

using namespace twin;

constexpr int kSets = 4;

struct Exchange {
    Slots slots;
    unsigned long long barrier;
};

// Rows on their way: [stage][grad, x][vector][piece][thread], then one of the residual.
extern __shared__ uint4 arriving[];

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) norm_backward(
    const wide_t* __restrict__ grad, const wide_t* __restrict__ x, const void* __restrict__ weight,
    const float* __restrict__ mean, const float* __restrict__ rstd, const wide_t* __restrict__ residual,
    wide_t* __restrict__ dx, float* __restrict__ partial, int rows, int length, int count, int zero_centered,
    int parameters) {
    const int hidden = WHOLE ? kWidth : length;
    __shared__ Exchange exchange[CHAINS][kSets];
    const int chain = threadIdx.x / (32 * ROW_WARPS);
    const int column = threadIdx.x / 32 % ROW_WARPS * kStripe * VECTORS + threadIdx.x % 32 * 8;
    if (threadIdx.x < CHAINS * kSets)  // each warp arrives with two sums
        mbarrier_init(shared_address(&exchange[threadIdx.x / kSets][threadIdx.x % kSets].barrier), 2 * ROW_WARPS);
    const int begin = blockIdx.x * count + chain, end = min((blockIdx.x + 1) * count, rows);
    const int left = hidden - column;
    const auto fetch_row = [&](int row, int stage) {
        if (row < end) {
            uint4* const mine = arriving + stage * 2 * kTensor + threadIdx.x;
            const size_t at = static_cast<size_t>(row) * hidden + column;
            fetch<true>(mine, grad + at, left);
            fetch<true>(mine + kTensor, x + at, left);
        }
        cp_async_commit_group();  // an empty group too, so that the count of groups is that of rows
    };
    uint4* const residual_row = residual == nullptr ? nullptr : arriving + STAGES * 2 * kTensor + threadIdx.x;
    const auto fetch_residual = [&](int row) {
        if (residual != nullptr && row < end)
            fetch<true>(residual_row, residual + static_cast<size_t>(row) * hidden + column, left);
        cp_async_commit_group();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        if (stage > 0) fetch_residual(end);  // none: an empty group
        fetch_row(begin + stage * CHAINS, stage);
    }
    float kept[VECTORS][8];
    const auto read_gamma = [&](int i, float(&to)[8]) {
        if (inside(i, left)) affine8(true, weight, parameters, zero_centered != 0, column + i * kStripe, to);
    };
#pragma unroll
    for (int i = 0; i < (KEPT ? VECTORS : 0); i++) read_gamma(i, kept[i]);
    const auto normalize_row = [&](const uint4* mine, int i, float mean, float rstd, float(&grad)[8], float(&xhat)[8],
                                   float(&g)[8]) {
        if constexpr (KEPT) {
            normalize(mine, i, mean, rstd, kept[i], grad, xhat, g);
        } else {
            float gamma[8];
            read_gamma(i, gamma);
            normalize(mine, i, mean, rstd, gamma, grad, xhat, g);
        }
    };
    Columns columns = {};
    const auto first_half = [&](int stage, float mean, float rstd, Exchange& to) {
        Sums sums;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            float row_grad[8], xhat[8], g[8];
            normalize_row(arriving + stage * 2 * kTensor + threadIdx.x, i, mean, rstd, row_grad, xhat, g);
            add_vector(i, left, row_grad, xhat, g, sums, columns);
        }
        if (write_sums(sums, to.slots)) mbarrier_arrive(shared_address(&to.barrier));
    };
    const float n = static_cast<float>(hidden);
    const auto second_half = [&](int stage, float mean, float rstd, const Exchange& from, int parity, wide_t* to) {
        mbarrier_wait(shared_address(&from.barrier), parity);
        const float2 c = row_means(from.slots, n);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (inside(i, left)) {
                float row_grad[8], xhat[8], g[8];
                normalize_row(arriving + stage * 2 * kTensor + threadIdx.x, i, mean, rstd, row_grad, xhat, g);
                store_dx(to, i, xhat, g, c, rstd, residual_row);
            }
        }
    };
    float center = 0.0f, inverse = 0.0f;
    const auto read_statistics = [&](int row) {
        if (row < end) {
            if (KIND == 0) center = __ldg(mean + row);
            inverse = __ldg(rstd + row);
        }
    };
    read_statistics(begin);
    float row_mean = center, row_rstd = inverse;
    read_statistics(begin + CHAINS);
    __syncthreads();  // the barriers are initialised
    cp_async_wait_group<2 * (STAGES - 2)>();
    if (begin < end) first_half(0, row_mean, row_rstd, exchange[chain][0]);
    unsigned turn = 0;
    for (int row = begin, stage = 0; row < end; row += CHAINS, ++turn) {
        const int next = stage == STAGES - 1 ? 0 : stage + 1;
        fetch_residual(row);
        fetch_row(row + (STAGES - 1) * CHAINS, stage == 0 ? STAGES - 1 : stage - 1);
        const float next_mean = center, next_rstd = inverse;
        read_statistics(row + 2 * CHAINS);
        cp_async_wait_group<2 * (STAGES - 2)>();
        if (row + CHAINS < end) first_half(next, next_mean, next_rstd, exchange[chain][(turn + 1) % kSets]);
        cp_async_wait_group<1>();  // the residual
        second_half(stage, row_mean, row_rstd, exchange[chain][turn % kSets], turn / kSets & 1,
                    dx + static_cast<size_t>(row) * hidden + column);
        row_mean = next_mean, row_rstd = next_rstd;
        stage = next;
    }
    store_columns(columns, arriving, partial, hidden, column, chain);
}
