// norm_backward: gradients of LayerNorm or RMSNorm, for hidden a multiple of 8, up to 16384 (fp32: 8192).
//
//     xhat = (x - mean) * rstd          rmsnorm: x * rstd
//     g    = grad * gamma,  c1 = rowsum(g) / n (layernorm only),  c2 = rowsum(g * xhat) / n
//     dx   = rstd * ((g - c1) - xhat * c2)        one rounding to WIDE
//     dx   = dx + residual                        where there is one: rounded again
//     partial[0, b] = sum of grad * xhat, partial[1, b] = sum of grad (layernorm only) over the rows of block b
//
// grad, x, residual, dx [rows, hidden] of type WIDE; weight [hidden] of type `parameters`; mean, rstd fp32 [rows];
// partial fp32 [2 (rmsnorm: 1), blocks, hidden], which norm_total.cu adds up. rowsum: norm_row.cuh. Column sums: block
// b has rows b * count .. + count - 1; chain k of CHAINS adds rows k, k + CHAINS, ... in order, from +0; then the
// chains are added in pairs.
//
// Bound by memory: 6 bytes an element in bf16, 8 with a residual. A thread keeps its columns' sums in registers while
// rows stream past (norm_backward.cuh). Rows are fetched STAGES - 1 ahead by cp.async; a thread copies what it will
// read itself, so these copies need no barrier. It keeps xhat and g while both sums of the row are exchanged in shared
// memory, at one barrier a row (two sets of slots in turn). norm_backward_long.cu takes rows that are too long for
// that.
#include "norm_backward.cuh"
#include "ptx/barrier.cuh"

using namespace twin;

constexpr int kTensors = 3;

// Rows on their way: [stage][grad, x, residual][vector][piece][thread].
extern __shared__ uint4 arriving[];

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) norm_backward(
    const wide_t* __restrict__ grad, const wide_t* __restrict__ x, const void* __restrict__ weight,
    const float* __restrict__ mean, const float* __restrict__ rstd, const wide_t* __restrict__ residual,
    wide_t* __restrict__ dx, float* __restrict__ partial, int rows, int length, int count, int zero_centered,
    int parameters) {
    const int hidden = WHOLE ? kWidth : length;
    __shared__ Slots slots[2][CHAINS];
    const int chain = threadIdx.x / (32 * ROW_WARPS);
    const int column = threadIdx.x / 32 % ROW_WARPS * kStripe * VECTORS + threadIdx.x % 32 * 8;
    const int begin = blockIdx.x * count + chain, end = min((blockIdx.x + 1) * count, rows);
    const int left = hidden - column;
    const bool has_residual = residual != nullptr;
    const auto fetch_row = [&](int row, int stage) {
        if (row < end) {
            uint4* const mine = arriving + stage * kTensors * kTensor + threadIdx.x;
            const size_t at = static_cast<size_t>(row) * hidden + column;
            fetch(mine, grad + at, left);
            fetch(mine + kTensor, x + at, left);
            if (has_residual) fetch(mine + 2 * kTensor, residual + at, left);
        }
        cp_async_commit_group();  // an empty group too, so that the count of groups is that of rows
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) fetch_row(begin + stage * CHAINS, stage);
    float center = 0.0f, inverse = 0.0f;
    const auto read_statistics = [&](int row) {
        if (row < end) {
            if (KIND == 0) center = __ldg(mean + row);
            inverse = __ldg(rstd + row);
        }
    };
    read_statistics(begin);
    // Only now, since the first rows' copies would wait for it.
    float gamma[VECTORS][8];
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (inside(i, left)) affine8(true, weight, parameters, zero_centered != 0, column + i * kStripe, gamma[i]);
    Columns columns = {};
    const float n = static_cast<float>(hidden);
    int stage = 0;
    for (int row = begin, parity = 0; row < end; row += CHAINS, parity ^= 1) {
        fetch_row(row + (STAGES - 1) * CHAINS, stage == 0 ? STAGES - 1 : stage - 1);
        cp_async_wait_group<STAGES - 1>();
        const float row_mean = center, row_rstd = inverse;
        read_statistics(row + CHAINS);
        const uint4* const mine = arriving + stage * kTensors * kTensor + threadIdx.x;
        float xhat[VECTORS][8], g[VECTORS][8];
        Sums sums;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            float row_grad[8];
            normalize(mine, i, row_mean, row_rstd, gamma[i], row_grad, xhat[i], g[i]);
            add_vector(i, left, row_grad, xhat[i], g[i], sums, columns);
        }
        write_sums(sums, slots[parity][chain]);
        // Only the threads of one row: a block's rows are independent.
        barrier_sync<32 * ROW_WARPS>(chain + 1);
        const float2 c = row_means(slots[parity][chain], n);
        wide_t* const to = dx + static_cast<size_t>(row) * hidden + column;
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            if (inside(i, left))
                store_dx(to, i, xhat[i], g[i], c, row_rstd, has_residual ? mine + 2 * kTensor : nullptr);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    store_columns(columns, arriving, partial, hidden, column, chain);
}
