// norm_backward: gradients of LayerNorm or RMSNorm.
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
// ROW_WARPS is defined for hidden a multiple of 8 up to 16384 (fp32: 8192); the form without it takes any row. KEPT:
// what a thread keeps of a row in registers until its sums are there, 2 xhat and g, 1 gamma, 0 nothing.
#include "norm_row.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid.cuh"
#include "ptx/mbarrier.cuh"

#ifdef ROW_WARPS

// Fetching a row, its arithmetic, and the columns' sums.
//
// ROW_WARPS warps hold a row, 256 * VECTORS neighbouring columns each, 8 * VECTORS to a lane; a block takes CHAINS rows
// at a time. WHOLE 1: rows of exactly as many elements as the warps hold, a constant.

// Rows on their way: [stage][tensor][vector][piece][thread].
extern __shared__ uint4 arriving[];

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
__device__ __forceinline__ void normalize(const uint4* mine, int i, float mean, float rstd, const float (&gamma)[8],
                                          float (&grad)[8], float (&xhat)[8], float (&g)[8]) {
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
__device__ __forceinline__ void add_vector(int i, int left, const float (&grad)[8], const float (&xhat)[8],
                                           const float (&g)[8], Sums& sums, Columns& columns) {
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
__device__ __forceinline__ void store_dx(wide_t* dx, int i, const float (&xhat)[8], const float (&g)[8], float2 c,
                                         float rstd, const uint4* residual) {
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
__device__ __forceinline__ void store_partial(const float (&sums)[VECTORS][8], uint4* room, float* partial, int hidden,
                                              int column, int chain) {
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
__device__ __forceinline__ void store_columns(const Columns& columns, uint4* room, float* partial, int hidden,
                                              int column, int chain) {
    let_next_grid_start();
    const size_t stride = static_cast<size_t>(gridDim.x) * hidden;
    float* const target = partial + static_cast<size_t>(blockIdx.x) * hidden;
    store_partial(columns.weight, room, target, hidden, column, chain);
    if (KIND == 0) store_partial(columns.bias, room, target + stride, hidden, column, chain);
}

struct Statistics {
    float mean, rstd;
};

// A thread's part of a block's work: its columns of the rows `begin`, begin + CHAINS, ... before `end`.
struct Part {
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
            if (KIND == 0) to.mean = __ldg(mean + row);
            to.rstd = __ldg(rstd + row);
        }
    }

    __device__ __forceinline__ void read_gamma(int i, float (&gamma)[8]) const {
        if (inside(i, left)) affine8(true, weight, parameters, zero_centered != 0, column + i * kStripe, gamma);
    }
};

// Bound by memory: 6 bytes an element in bf16, 8 with a residual. A thread keeps its columns' sums in registers while
// rows stream past. Rows are fetched STAGES - 1 ahead by cp.async; a thread copies what it will read itself, so these
// copies need no barrier. It keeps xhat and g while both sums of the row are exchanged in shared memory, at one barrier
// a row (two sets of slots in turn).
__device__ __forceinline__ void read_once(const Part& part) {
    constexpr int kTensors = 3;  // gradient, x, residual
    __shared__ Slots slots[2][CHAINS];
    const bool has_residual = part.residual != nullptr;
    const auto fetch_row = [&](int row, int stage) {
        if (row < part.end) {
            uint4* const mine = arriving + stage * kTensors * kTensor + threadIdx.x;
            const size_t at = static_cast<size_t>(row) * part.hidden + part.column;
            fetch(mine, part.grad + at, part.left);
            fetch(mine + kTensor, part.x + at, part.left);
            if (has_residual) fetch(mine + 2 * kTensor, part.residual + at, part.left);
        }
        cp_async_commit_group();  // an empty group too, so that the count of groups is that of rows
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) fetch_row(part.begin + stage * CHAINS, stage);
    Statistics next_row = {};
    part.read_statistics(part.begin, next_row);
    // Only now, since the first rows' copies would wait for it.
    float gamma[VECTORS][8];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) part.read_gamma(i, gamma[i]);
    Columns columns = {};
    const float n = static_cast<float>(part.hidden);
    int stage = 0;
    for (int row = part.begin, parity = 0; row < part.end; row += CHAINS, parity ^= 1) {
        fetch_row(row + (STAGES - 1) * CHAINS, stage == 0 ? STAGES - 1 : stage - 1);
        cp_async_wait_group<STAGES - 1>();
        const float row_mean = next_row.mean, row_rstd = next_row.rstd;
        part.read_statistics(row + CHAINS, next_row);
        const uint4* const mine = arriving + stage * kTensors * kTensor + threadIdx.x;
        float xhat[VECTORS][8], g[VECTORS][8];
        Sums sums;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            float row_grad[8];
            normalize(mine, i, row_mean, row_rstd, gamma[i], row_grad, xhat[i], g[i]);
            add_vector(i, part.left, row_grad, xhat[i], g[i], sums, columns);
        }
        write_sums(sums, slots[parity][part.chain]);
        // Only the threads of one row: a block's rows are independent.
        barrier_sync<32 * ROW_WARPS>(part.chain + 1);
        const float2 c = row_means(slots[parity][part.chain], n);
        wide_t* const to = part.dx + static_cast<size_t>(row) * part.hidden + part.column;
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            if (inside(i, part.left))
                store_dx(to, i, xhat[i], g[i], c, row_rstd, has_residual ? mine + 2 * kTensor : nullptr);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    store_columns(columns, arriving, part.partial, part.hidden, part.column, part.chain);
}

// For rows too long to keep in registers. A row's work has two halves: up to its sums c1 and c2, and from them on.
//
// A thread reads a row from shared memory and computes xhat and g in each half. Since it keeps nothing in between, the
// first half of the next row comes before the second half of this one: by then the sums are there, and the warps of a
// row need not wait for each other. An mbarrier counts the warps that have written. A warp may be ahead of another by a
// row and a half, so there are four sets of sums.
//
// Gradient and x are fetched STAGES - 1 rows ahead; the residual, which only the second half needs, during the first
// half of the next row: there is room for one of it, after the stages.
constexpr int kSets = 4;

struct Exchange {
    Slots slots;
    unsigned long long barrier;
};

using Exchanges = Exchange[CHAINS][kSets];

__device__ __forceinline__ Exchanges& exchanges() {
    __shared__ Exchanges all;
    return all;
}

__device__ __forceinline__ void init_exchanges() {
    if (threadIdx.x < CHAINS * kSets)  // each warp arrives with two sums
        mbarrier_init(shared_address(&exchanges()[threadIdx.x / kSets][threadIdx.x % kSets].barrier), 2 * ROW_WARPS);
}

__device__ __forceinline__ void read_twice(const Part& part) {
    constexpr int kTensors = 2;
    Exchanges& exchange = exchanges();
    const auto fetch_row = [&](int row, int stage) {
        if (row < part.end) {
            uint4* const mine = arriving + stage * kTensors * kTensor + threadIdx.x;
            const size_t at = static_cast<size_t>(row) * part.hidden + part.column;
            fetch<true>(mine, part.grad + at, part.left);
            fetch<true>(mine + kTensor, part.x + at, part.left);
        }
        cp_async_commit_group();  // an empty group too, so that the count of groups is that of rows
    };
    uint4* const residual_row =
        part.residual == nullptr ? nullptr : arriving + STAGES * kTensors * kTensor + threadIdx.x;
    const auto fetch_residual = [&](int row) {
        if (part.residual != nullptr && row < part.end)
            fetch<true>(residual_row, part.residual + static_cast<size_t>(row) * part.hidden + part.column, part.left);
        cp_async_commit_group();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        if (stage > 0) fetch_residual(part.end);  // none: an empty group
        fetch_row(part.begin + stage * CHAINS, stage);
    }
    float kept[VECTORS][8];
#pragma unroll
    for (int i = 0; i < (KEPT ? VECTORS : 0); i++) part.read_gamma(i, kept[i]);
    const auto normalize_row = [&](const uint4* mine, int i, float mean, float rstd, float (&grad)[8], float (&xhat)[8],
                                   float (&g)[8]) {
        if constexpr (KEPT) {
            normalize(mine, i, mean, rstd, kept[i], grad, xhat, g);
        } else {
            float gamma[8];
            part.read_gamma(i, gamma);
            normalize(mine, i, mean, rstd, gamma, grad, xhat, g);
        }
    };
    Columns columns = {};
    const auto first_half = [&](int stage, float mean, float rstd, Exchange& to) {
        Sums sums;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            float row_grad[8], xhat[8], g[8];
            normalize_row(arriving + stage * kTensors * kTensor + threadIdx.x, i, mean, rstd, row_grad, xhat, g);
            add_vector(i, part.left, row_grad, xhat, g, sums, columns);
        }
        if (write_sums(sums, to.slots)) mbarrier_arrive(shared_address(&to.barrier));
    };
    const float n = static_cast<float>(part.hidden);
    const auto second_half = [&](int stage, float mean, float rstd, const Exchange& from, int parity, wide_t* to) {
        mbarrier_wait(shared_address(&from.barrier), parity);
        const float2 c = row_means(from.slots, n);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (inside(i, part.left)) {
                float row_grad[8], xhat[8], g[8];
                normalize_row(arriving + stage * kTensors * kTensor + threadIdx.x, i, mean, rstd, row_grad, xhat, g);
                store_dx(to, i, xhat, g, c, rstd, residual_row);
            }
        }
    };
    Statistics next_row = {};
    part.read_statistics(part.begin, next_row);
    float row_mean = next_row.mean, row_rstd = next_row.rstd;
    part.read_statistics(part.begin + CHAINS, next_row);
    __syncthreads();  // the barriers are initialised
    cp_async_wait_group<2 * (STAGES - 2)>();
    if (part.begin < part.end) first_half(0, row_mean, row_rstd, exchange[part.chain][0]);
    unsigned turn = 0;
    for (int row = part.begin, stage = 0; row < part.end; row += CHAINS, ++turn) {
        const int next = stage == STAGES - 1 ? 0 : stage + 1;
        fetch_residual(row);
        fetch_row(row + (STAGES - 1) * CHAINS, stage == 0 ? STAGES - 1 : stage - 1);
        const float next_mean = next_row.mean, next_rstd = next_row.rstd;
        part.read_statistics(row + 2 * CHAINS, next_row);
        cp_async_wait_group<2 * (STAGES - 2)>();
        if (row + CHAINS < part.end) first_half(next, next_mean, next_rstd, exchange[part.chain][(turn + 1) % kSets]);
        cp_async_wait_group<1>();  // the residual
        second_half(stage, row_mean, row_rstd, exchange[part.chain][turn % kSets], turn / kSets & 1,
                    part.dx + static_cast<size_t>(row) * part.hidden + part.column);
        row_mean = next_mean, row_rstd = next_rstd;
        stage = next;
    }
    store_columns(columns, arriving, part.partial, part.hidden, part.column, part.chain);
}

}  // namespace twin

using namespace twin;

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    norm_backward(const wide_t* __restrict__ grad, const wide_t* __restrict__ x, const void* __restrict__ weight,
                  const float* __restrict__ mean, const float* __restrict__ rstd, const wide_t* __restrict__ residual,
                  wide_t* __restrict__ dx, float* __restrict__ partial, int rows, int length, int count,
                  int zero_centered, int parameters) {
    const int hidden = WHOLE ? kWidth : length;
    const int chain = threadIdx.x / (32 * ROW_WARPS);
    const int column = threadIdx.x / 32 % ROW_WARPS * kStripe * VECTORS + threadIdx.x % 32 * 8;
    if constexpr (KEPT < 2) init_exchanges();
    const int begin = blockIdx.x * count + chain, end = min((blockIdx.x + 1) * count, rows);
    const Part part = {grad,          x,          weight, mean,  rstd,   residual, dx,  partial,
                       zero_centered, parameters, hidden, chain, column, begin,    end, hidden - column};
    if constexpr (KEPT == 2)
        read_once(part);
    else
        read_twice(part);
}

#else

// Any hidden up to 2^21 and any alignment, at a fraction of the speed.
//
// `rows` computes dx, a block of threads to a row; `columns` computes partial, a thread to a column of a block of rows;
// CHAINS is an argument.

using namespace twin;

extern "C" __global__ void __launch_bounds__(kBlockThreads)
    rows(const wide_t* __restrict__ grad, const wide_t* __restrict__ x, const void* __restrict__ weight,
         const float* __restrict__ mean, const float* __restrict__ rstd, const wide_t* __restrict__ residual,
         wide_t* __restrict__ dx, int hidden, int zero_centered, int parameters) {
    const size_t first = static_cast<size_t>(blockIdx.x) * hidden;
    const float n = static_cast<float>(hidden);
    const float center = KIND == 0 ? mean[blockIdx.x] : 0.0f, inverse = rstd[blockIdx.x];
    const auto xhat = [&](int at) { return centered(widen(x[first + at]), center) * inverse; };
    const auto scaled = [&](int at) {
        const float gamma = parameter(weight, parameters, at);
        return widen(grad[first + at]) * (zero_centered ? gamma + 1.0f : gamma);
    };
    float c1 = 0.0f;
    if (KIND == 0) c1 = block_row_sum(hidden, scaled) / n;
    const float c2 = block_row_sum(hidden, [&](int at) { return scaled(at) * xhat(at); }) / n;
    for (int at = threadIdx.x; at < hidden; at += kBlockThreads) {
        float g = scaled(at);
        if (KIND == 0) g = g - c1;
        float v = inverse * (g - xhat(at) * c2);
        if (residual != nullptr) v = widen(narrow(v)) + widen(residual[first + at]);
        dx[first + at] = narrow(v);
    }
}

extern "C" __global__ void __launch_bounds__(kBlockThreads)
    columns(const wide_t* __restrict__ grad, const wide_t* __restrict__ x, const float* __restrict__ mean,
            const float* __restrict__ rstd, float* __restrict__ partial, int rows, int hidden, int count, int chains) {
    const int blocks = (rows + count - 1) / count;
    const int block = blockIdx.x % blocks;
    const int column = blockIdx.x / blocks * kBlockThreads + threadIdx.x;
    if (column >= hidden) return;
    const int end = min((block + 1) * count, rows);
    float weight[4] = {}, bias[4] = {};
#pragma unroll
    for (int chain = 0; chain < 4; chain++) {
        if (chain >= chains) break;
        for (int row = block * count + chain; row < end; row += chains) {
            const size_t at = static_cast<size_t>(row) * hidden + column;
            const float incoming = widen(grad[at]);
            const float xhat = centered(widen(x[at]), KIND == 0 ? mean[row] : 0.0f) * rstd[row];
            weight[chain] = weight[chain] + incoming * xhat;
            bias[chain] = bias[chain] + incoming;
        }
    }
    float* const to = partial + static_cast<size_t>(block) * hidden + column;
    // Chains that do not exist add +0 to sums that are never -0.
    *to = (weight[0] + weight[1]) + (weight[2] + weight[3]);
    if (KIND == 0) to[static_cast<size_t>(blocks) * hidden] = (bias[0] + bias[1]) + (bias[2] + bias[3]);
}

#endif
