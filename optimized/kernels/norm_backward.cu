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
// b has rows b * count .. + count - 1; chain k of CHAINS adds rows k, k + CHAINS, ... in order, from +0; then the chains
// are added in pairs.
//
// Bound by memory: 6 bytes an element in bf16, 8 with a residual. ROW_WARPS warps hold a row, 256 * VECTORS
// neighbouring columns each, 8 * VECTORS to a lane, so that a thread keeps its columns' sums in registers while rows
// stream past; a block takes CHAINS rows at a time. Rows are fetched STAGES - 1 ahead by cp.async; a thread copies what
// it will read itself, so these copies need no barrier. One barrier a row (two sets of slots in shared memory) exchanges
// both of the row's sums. KEPT 1: a thread keeps gamma, xhat and g as well; KEPT 0: it reads and computes them twice,
// where registers are short. WHOLE 1: rows of exactly as many elements as the warps hold, a constant.
#include "norm_row.cuh"
#include "ptx/cp_async.cuh"

constexpr int THREADS = 32 * ROW_WARPS * CHAINS;
constexpr int WIDTH = STRIPE * VECTORS * ROW_WARPS;  // columns that the threads of a row hold
static_assert(VECTORS == 1 || VECTORS == 2 || VECTORS == 4, "a warp's columns are a subtree of the row's sum");
constexpr int PIECES = sizeof(Eight) / 16;

constexpr int TENSORS = 3;
constexpr int TENSOR = VECTORS * PIECES * THREADS;  // 16-byte pieces of one tensor at one stage

// Rows on their way: [stage][grad, x, residual][vector][piece][thread].
extern __shared__ uint4 arriving[];

// `mine`: the thread's first piece of a tensor at a stage.
__device__ __forceinline__ Eight arrived(const uint4* mine, int vector) {
    Eight v;
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const uint4 piece = mine[(vector * PIECES + p) * THREADS];
        v.words[4 * p] = piece.x, v.words[4 * p + 1] = piece.y;
        v.words[4 * p + 2] = piece.z, v.words[4 * p + 3] = piece.w;
    }
    return v;
}

// Whether the row, of which `left` elements are left from the thread's first on, reaches its vector.
__device__ __forceinline__ bool inside(int vector, int left) { return WHOLE || vector * STRIPE < left; }

// `from`: the thread's first element of the row; `left`: elements from there to the row's end.
__device__ __forceinline__ void fetch(uint4* mine, const wide_t* from, int left) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
        if (inside(i, left))
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
                cp_async_16(mine + (i * PIECES + p) * THREADS, from + i * STRIPE + p * LANES);
}

// Waits for the threads of one row only: rows of one block go on independently.
__device__ __forceinline__ void row_barrier(int chain) {
    asm volatile("bar.sync %0, %1;" ::"r"(chain + 1), "n"(32 * ROW_WARPS) : "memory");
}

// Two sums of a row from its warps.
typedef Leaves<ROW_WARPS> Slots[2];

// Both means of a row from a thread's sums of g in each vector, then those of g * xhat. `slots` belong to this row.
__device__ __forceinline__ float2 row_means(const float (&sums)[2 * VECTORS], Slots& slots, int chain, float n) {
    const int lane = threadIdx.x % 32;
    float v = lane_sum(sums);
#pragma unroll
    for (int bit = 1; bit < VECTORS; bit *= 2) v = v + __shfl_xor_sync(ALL, v, bit);
    if (lane % VECTORS == 0 && lane < 2 * VECTORS) slots[lane / VECTORS].sum[threadIdx.x / 32 % ROW_WARPS] = v;
    row_barrier(chain);
    // Half of the lanes go on with each sum.
    const float mine = tree<ROW_WARPS>(slots[lane / 16].sum) / n, other = __shfl_xor_sync(ALL, mine, 16);
    return lane < 16 ? make_float2(mine, other) : make_float2(other, mine);
}

// gamma of 8 columns: weight, or weight + 1.
__device__ __forceinline__ void gamma8(const void* weight, int type, bool zero_centered, int at, float (&gamma)[8]) {
    if (type == 0)
        parameters8<0>(weight, at, gamma);
    else if (type == 1)
        parameters8<1>(weight, at, gamma);
    else
        parameters8<2>(weight, at, gamma);
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (zero_centered) gamma[j] = gamma[j] + 1.0f;
}

// A thread's columns: the sums over the rows so far.
struct Columns {
    float weight[VECTORS][8], bias[VECTORS][8];
};

// One row, which has arrived at `mine`: dx, and what it adds to the columns' sums. gamma(i, v): that of vector i.
template <typename Gamma>
__device__ __forceinline__ void backward_row(
    const uint4* mine, bool has_residual, float mean, float rstd, Columns& columns, Gamma gamma, wide_t* dx, int left,
    float n, Slots& slots, int chain) {
    float sums[2 * VECTORS], xhat[VECTORS][8], g[VECTORS][8];
    const auto normalize = [&](int i, float(&grad)[8]) {
        const Eight incoming = arrived(mine, i), x = arrived(mine + TENSOR, i);
        float factor[8];
        gamma(i, factor);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            grad[j] = widen(incoming, j);
            xhat[i][j] = centered(widen(x, j), mean) * rstd;
            g[i][j] = grad[j] * factor[j];
        }
    };
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float grad[8], gx[8];
        normalize(i, grad);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            gx[j] = g[i][j] * xhat[i][j];
            columns.weight[i][j] = columns.weight[i][j] + grad[j] * xhat[i][j];
            if (KIND == 0) columns.bias[i][j] = columns.bias[i][j] + grad[j];
        }
        sums[i] = inside(i, left) ? tree8(g[i]) : 0.0f;
        sums[VECTORS + i] = inside(i, left) ? tree8(gx) : 0.0f;
    }
    const float2 c = row_means(sums, slots, chain, n);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (inside(i, left)) {
            float v[8];
            if constexpr (!KEPT) normalize(i, v);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                v[j] = KIND == 0 ? g[i][j] - c.x : g[i][j];
                v[j] = rstd * (v[j] - xhat[i][j] * c.y);
            }
            if (has_residual) {
                const Eight residual = arrived(mine + 2 * TENSOR, i);
#pragma unroll
                for (int j = 0; j < 8; ++j) v[j] = widen(narrow(v[j])) + widen(residual, j);
            }
            store_eight(dx + i * STRIPE, v);
        }
    }
}

// The chains' sums in pairs, through shared memory, to partial[block].
__device__ __forceinline__ void store_partial(
    const float (&sums)[VECTORS][8], float* partial, int hidden, int column, int chain) {
    if constexpr (CHAINS == 1) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int at = column + i * STRIPE;
            if (at < hidden) {
                float4* to = reinterpret_cast<float4*>(partial + at);
                to[0] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
                to[1] = make_float4(sums[i][4], sums[i][5], sums[i][6], sums[i][7]);
            }
        }
    } else {
        __shared__ float staged[CHAINS][WIDTH];
        __syncthreads();  // the sums before have been read
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < 8; j += 4)
                *reinterpret_cast<float4*>(&staged[chain][column + i * STRIPE + j]) =
                    make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
        __syncthreads();
        for (int at = threadIdx.x; at < WIDTH && at < hidden; at += THREADS) {
            float v = staged[0][at] + staged[1][at];
            if constexpr (CHAINS == 4) v = v + (staged[2][at] + staged[3][at]);
            partial[at] = v;
        }
    }
}

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void norm_backward(
    const wide_t* __restrict__ grad, const wide_t* __restrict__ x, const void* __restrict__ weight,
    const float* __restrict__ mean, const float* __restrict__ rstd, const wide_t* __restrict__ residual,
    wide_t* __restrict__ dx, float* __restrict__ partial, int rows, int length, int count, int zero_centered,
    int parameters) {
    const int hidden = WHOLE ? WIDTH : length;
    __shared__ Slots slots[2][CHAINS];
    const int chain = threadIdx.x / (32 * ROW_WARPS);
    const int column = threadIdx.x / 32 % ROW_WARPS * STRIPE * VECTORS + threadIdx.x % 32 * 8;
    Columns columns = {};
    float kept[VECTORS][8];
    const auto read_gamma = [&](int i, float(&to)[8]) {
        if (inside(i, hidden - column)) gamma8(weight, parameters, zero_centered != 0, column + i * STRIPE, to);
    };
#pragma unroll
    for (int i = 0; i < (KEPT ? VECTORS : 0); ++i) read_gamma(i, kept[i]);
    const auto gamma = [&](int i, float(&to)[8]) {
        if constexpr (KEPT) {
#pragma unroll
            for (int j = 0; j < 8; ++j) to[j] = kept[i][j];
        } else {
            read_gamma(i, to);
        }
    };
    const int begin = blockIdx.x * count + chain, end = min((blockIdx.x + 1) * count, rows);
    const int left = hidden - column;
    const bool has_residual = residual != nullptr;
    const auto fetch_row = [&](int row, int stage) {
        if (row < end) {
            uint4* const mine = arriving + stage * TENSORS * TENSOR + threadIdx.x;
            const size_t at = static_cast<size_t>(row) * hidden + column;
            fetch(mine, grad + at, left);
            fetch(mine + TENSOR, x + at, left);
            if (has_residual) fetch(mine + 2 * TENSOR, residual + at, left);
        }
        cp_async_commit_group();  // an empty group too, so that the count of groups is that of rows
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch_row(begin + stage * CHAINS, stage);
    float center = 0.0f, inverse = 0.0f;
    const auto read_statistics = [&](int row) {
        if (row < end) {
            if (KIND == 0) center = __ldg(mean + row);
            inverse = __ldg(rstd + row);
        }
    };
    read_statistics(begin);
    const float n = static_cast<float>(hidden);
    int stage = 0;
    for (int row = begin, parity = 0; row < end; row += CHAINS, parity ^= 1) {
        fetch_row(row + (STAGES - 1) * CHAINS, stage == 0 ? STAGES - 1 : stage - 1);
        cp_async_wait_group<STAGES - 1>();
        const float row_mean = center, row_rstd = inverse;
        read_statistics(row + CHAINS);
        backward_row(
            arriving + stage * TENSORS * TENSOR + threadIdx.x, has_residual, row_mean, row_rstd, columns, gamma,
            dx + static_cast<size_t>(row) * hidden + column, left, n, slots[parity][chain], chain);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    const size_t stride = static_cast<size_t>(gridDim.x) * hidden;
    float* const target = partial + static_cast<size_t>(blockIdx.x) * hidden;
    store_partial(columns.weight, target, hidden, column, chain);
    if (KIND == 0) store_partial(columns.bias, target + stride, hidden, column, chain);
}
