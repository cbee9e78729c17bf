// Attention backward, heads of more than 128 channels. Definition, order and rounding points: reference/ops/attention_backward.py.
//
// Two kernels of one form. A block holds 128 rows of two "fixed" operands and streams 64 rows at a time of two
// others past them; of each pair of tiles it computes two GEMMs over d, from them the weights and the gradient
// of the scores, and with those, straight from its registers, adds to its results:
//
//              fixed (128 rows)   streamed (64 rows)   rows x columns of a tile    results
//   DQ = 1     q, grad            k, v                 queries x keys              dq += dS k
//   DQ = 0     k, v               q, grad              keys x queries              dv += Pᵀ grad, dk += dSᵀ q
//
// dv and dk are one tensor-core chain over the group's heads and the queries; dq one for each 128 keys, added in fp32,
// the last keys first.
// grid: (blocks of 128 rows, b heads, chunks of N_OUT columns of d); scores are computed again for each chunk.
//
// `dots` makes what the tiles need of each query, 384 - m and inv, and D; zeros up to a multiple of 128 queries.
//
// Defines: as attention.cu, and DQ (0 | 1).
#include "attention_rows.cuh"

using namespace twin;

constexpr int kAcc = N_OUT / 2;

struct Map {
    static constexpr int kFixedChunk = kTileRows * 128, kFixed = D_CHUNKS * kFixedChunk;
    static constexpr int kChunk = kStreamRows * 128, kStreamed = D_CHUNKS * kChunk;
    static constexpr int kX1 = 0, kX2 = kFixed;
    static constexpr int kY1 = 2 * kFixed;  // stages of (Y1, Y2)
    static constexpr int kFixedFull = kY1 + STAGES * 2 * kStreamed;
    static constexpr int kFull = kFixedFull + 8, kEmpty = kFull + 8 * STAGES;
    static constexpr int kBytes = kEmpty + 8 * STAGES;
    static_assert(kBytes <= 232448, "a block has at most 227 KB of shared memory");
};

// The streamed tiles of a block: for each head of `heads`, rows from `from` to `to` in steps of 64.
struct Walk {
    int heads, from, to;

    // The rows in their order: for dq the last 128 keys first.
    __device__ __forceinline__ int first() const { return DQ ? (to - 1) & -kTileRows : from; }
    __device__ __forceinline__ bool holds(int row) const { return DQ ? row >= from : row < to; }
    __device__ __forceinline__ bool ends_block(int row) const {
        return row % kTileRows == kStreamRows || row + kStreamRows >= to;
    }
    __device__ __forceinline__ int after(int row) const {
        return DQ && ends_block(row) ? (row & -kTileRows) - kTileRows : row + kStreamRows;
    }
};

__device__ __forceinline__ Walk walk(const Arguments& a, const Limits& limits, int first) {
    const Range range = DQ ? visited(limits, first) : visitors(limits, first);
    if constexpr (DQ) return {1, range.from * kTileRows, min(limits.skv, range.to * kTileRows)};
    return {a.group, range.from, range.to};
}

__device__ __forceinline__ void produce(const CUtensorMap* x1, const CUtensorMap* x2, const CUtensorMap* y1,
                                        const CUtensorMap* y2, unsigned shared, const Arguments& a, const Walk& todo,
                                        int first, int batch, int head) {
    const unsigned fixed_full = shared + Map::kFixedFull;
    mbarrier_arrive_expect_tx(fixed_full, 2 * Map::kFixed);
    for (int c = 0; c < D_CHUNKS; c++) {
        load_chunk(shared + Map::kX1 + c * Map::kFixedChunk, x1, fixed_full, 64 * c, first, head, batch);
        load_chunk(shared + Map::kX2 + c * Map::kFixedChunk, x2, fixed_full, 64 * c, first, head, batch);
    }
    Stage<STAGES> stage;
    for (int n = 0; n < todo.heads; n++) {
        const int other = DQ ? head / a.group : head * a.group + n;
        for (int row = todo.first(); todo.holds(row); row = todo.after(row), stage.advance()) {
            const unsigned full = shared + Map::kFull + 8 * stage.index;
            const unsigned at = shared + Map::kY1 + stage.index * 2 * Map::kStreamed;
            mbarrier_wait(shared + Map::kEmpty + 8 * stage.index, stage.parity ^ 1);
            mbarrier_arrive_expect_tx(full, 2 * Map::kStreamed);
            for (int c = 0; c < D_CHUNKS; c++) {
                load_chunk(at + c * Map::kChunk, y1, full, 64 * c, row, other, batch);
                load_chunk(at + Map::kStreamed + c * Map::kChunk, y2, full, 64 * c, row, other, batch);
            }
        }
    }
}

// The weights that dropout keeps, as operands.
__device__ __forceinline__ void pack_kept(unsigned (&weights)[4][4], const float (&s)[32], unsigned keep) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
        float eight[8];
#pragma unroll
        for (int i = 0; i < 8; i++) eight[i] = keep >> (8 * step + i) & 1 ? s[8 * step + i] : 0.0f;
        pack_operand<FORMAT>(weights[step], eight, 0);
    }
}

// From the weights and dp to the gradients of the scores, as operands.
__device__ __forceinline__ void differentiate(unsigned (&gradients)[4][4], const float (&s)[32], float (&dp)[32],
                                              const Arguments& a, const Pairs& at, const float (&own)[2],
                                              const float* of_column) {
#pragma unroll
    for (int pair = 0; pair < 16; pair++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int n = pair / 2 * 4 + 2 * r + pair % 2;
            const float dot = DQ ? own[r] : of_column[pair / 2 * 8 + pair % 2];
            const bool hidden = at.hidden >> n & 1, keep = at.keep >> n & 1;
            const float gradient = __fmul_rn(s[n], __fmaf_rn(keep ? dp[n] : 0.0f, a.kept, -dot));
            dp[n] = hidden ? 0.0f : gradient;
        }
        if (pair % 4 == 3) pack_operand<FORMAT>(gradients[pair / 4], dp, pair / 4);
    }
}

// acc += A(values, 64 x 64) B, B of 64 rows in shared memory.
__device__ __forceinline__ void accumulate(float (&acc)[kAcc], const unsigned (&values)[4][4], unsigned tile) {
#pragma unroll
    for (int step = 0; step < 4; step++)
        wgmma_k16<FORMAT, 1>(acc, values[step], along_rows(tile, Map::kChunk, step), 1);
}

// out[rows, N_OUT columns] = round(acc * scale).
__device__ __forceinline__ void store(const float (&acc)[kAcc], float scale, const Arguments& a, void* out, int row,
                                      int rows, int batch, int head) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (row + 8 * r >= rows) continue;
        unsigned short* line =
            static_cast<unsigned short*>(out) + batch * a.out_b + head * a.out_h + (row + 8 * r) * a.out_s;
#pragma unroll
        for (int t = 0; t < N_OUT / 8; t++) {
            const int column = N_OUT * blockIdx.z + 8 * t + threadIdx.x % 4 * 2;
            if (column < a.d)
                *reinterpret_cast<unsigned*>(line + column) = pack_pair<FORMAT>(
                    __fmul_rn(acc[4 * t + 2 * r], scale), __fmul_rn(acc[4 * t + 2 * r + 1], scale));
        }
    }
}

__device__ __forceinline__ void consume(unsigned shared, const Arguments& a, const Limits& limits, const Walk& todo,
                                        const Stats& stats, void* first_out, void* second_out, int first, int batch, int head) {
    const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    unsigned x1 = shared + Map::kX1 + warpgroup * (64 * 128);
    const int padded = (a.sq + kTileRows - 1) / kTileRows * kTileRows;
    Pairs at{batch * a.heads + (DQ ? head : head * a.group), first + static_cast<int>(threadIdx.x) / 32 * 16, 0, 0, 0};
    float2 own[2] = {};
    float own_dots[2] = {};
    float acc1[kAcc], acc2[kAcc];  // dv and dk; or dq of 128 keys, and in all
#pragma unroll
    for (int i = 0; i < kAcc; i++) acc1[i] = acc2[i] = 0.0f;
    Stage<STAGES> stage;
    mbarrier_wait(shared + Map::kFixedFull, 0);
    for (int n = 0; n < todo.heads; n++, at.head++) {
        const float2* softmax = stats.softmax + static_cast<long long>(at.head) * padded;
        const float* dots = stats.dots + static_cast<long long>(at.head) * padded;
        if constexpr (DQ) {
#pragma unroll
            for (int r = 0; r < 2; r++)
                own[r] = softmax[at.thread_row() + 8 * r], own_dots[r] = dots[at.thread_row() + 8 * r];
        }
        for (int from = todo.first(); todo.holds(from); from = todo.after(from), stage.advance()) {
            at.column = from;
            // Opaque, or the compiler keeps what it derives from them in registers that the tiles need, and spills.
            asm volatile("" : "+r"(at.row), "+r"(at.head), "+r"(x1));
            prepare(at, a, limits);
            mbarrier_wait(shared + Map::kFull + 8 * stage.index, stage.parity);
            const unsigned y1 = shared + Map::kY1 + stage.index * 2 * Map::kStreamed, y2 = y1 + Map::kStreamed;
            float s[32], dp[32];
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4 * D_CHUNKS; step++)
                wgmma_k16<FORMAT, 0, 0>(s, along_d(x1, Map::kFixedChunk, step), along_d(y1, Map::kChunk, step),
                                        step > 0);
            wgmma_commit();
#pragma unroll
            for (int step = 0; step < 4 * D_CHUNKS; step++)
                wgmma_k16<FORMAT, 0, 0>(dp, along_d(x1 + Map::kX2, Map::kFixedChunk, step),
                                        along_d(y2, Map::kChunk, step), step > 0);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_hold(s);
            weigh(s, a, limits, at, own, softmax + at.thread_column());
            const unsigned chunk = blockIdx.z * (N_OUT / 64 * Map::kChunk);
            unsigned weights[4][4], gradients[4][4];
            constexpr bool kEarly = !DQ && !DROPOUT;  // with dropout's mask beside them the registers would spill
            if constexpr (kEarly) {
                pack_kept(weights, s, at.keep);
                wgmma_fence();
                accumulate(acc1, weights, y2 + chunk);
                wgmma_commit();
            }
            wgmma_wait<kEarly>();
            wgmma_hold(dp);
            differentiate(gradients, s, dp, a, at, own_dots, dots + at.thread_column());
            if constexpr (!DQ && !kEarly) pack_kept(weights, s, at.keep);
            wgmma_fence();
            if constexpr (!DQ && !kEarly) accumulate(acc1, weights, y2 + chunk);
            accumulate(DQ ? acc1 : acc2, gradients, y1 + chunk);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(acc1);
            if constexpr (!DQ) wgmma_hold(acc2);
            if (threadIdx.x % 32 == 0) mbarrier_arrive(shared + Map::kEmpty + 8 * stage.index);
            if (DQ && todo.ends_block(from)) {
                const bool is_first = (from & -kTileRows) == todo.first();
#pragma unroll
                for (int i = 0; i < kAcc; i++)
                    acc2[i] = is_first ? acc1[i] : acc2[i] + acc1[i], acc1[i] = 0.0f;
            }
        }
    }
    if constexpr (DQ) {
        store(acc2, a.scale, a, first_out, at.thread_row(), a.sq, batch, head);
    } else {
        store(acc1, a.kept, a, first_out, at.thread_row(), a.skv, batch, head);
        store(acc2, a.scale, a, second_out, at.thread_row(), a.skv, batch, head);
    }
}

// One warp a query. grad has the strides grad_*, out those of `a.out_*`, in elements.
extern "C" __global__ void __launch_bounds__(256)
    dots(const __grid_constant__ Arguments a, const unsigned short* grad, const unsigned short* out, long long grad_b,
         long long grad_h, long long grad_s, const float* m, const float* inv, float2* stats_softmax,
         float* stats_dots) {
    const int padded = (a.sq + kTileRows - 1) / kTileRows * kTileRows;
    const int query = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int batch = blockIdx.y / a.heads, head = blockIdx.y % a.heads;
    if (query >= padded) return;
    float2 softmax = make_float2(0.0f, 0.0f);
    float dot = 0.0f;
    if (query < a.sq) {
        if (8 * lane < a.d) {
            const uint4 x = *reinterpret_cast<const uint4*>(grad + batch * grad_b + head * grad_h + query * grad_s +
                                                            8 * lane);
            const uint4 y = *reinterpret_cast<const uint4*>(out + batch * a.out_b + head * a.out_h + query * a.out_s +
                                                            8 * lane);
#pragma unroll
            for (int i = 0; i < 8; i++) dot = __fmaf_rn(element(x, i), element(y, i), dot);
        }
#pragma unroll
        for (int h = 16; h > 0; h /= 2) dot = dot + __shfl_xor_sync(0xFFFFFFFF, dot, h);
        const long long at = static_cast<long long>(blockIdx.y) * a.sq + query;
        softmax = make_float2(kGrid15 - m[at], inv[at]);
    }
    if (lane != 0) return;
    const long long at = static_cast<long long>(blockIdx.y) * padded + query;
    stats_softmax[at] = softmax;
    stats_dots[at] = dot;
}

extern "C" __global__ void __launch_bounds__(128 * (kWarpgroups + 1), 1)
    attention_backward(const __grid_constant__ CUtensorMap x1, const __grid_constant__ CUtensorMap x2,
                       const __grid_constant__ CUtensorMap y1, const __grid_constant__ CUtensorMap y2,
                       const __grid_constant__ Arguments a, const float2* stats_softmax, const float* stats_dots,
                       void* first_out, void* second_out) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const int heads = DQ ? a.heads : a.heads / a.group;
    const int batch = blockIdx.y / heads, head = blockIdx.y % heads;
    // Causal: the blocks with most to do first.
    const int first = (DQ ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * kTileRows;
    const Limits& limits = limits_of(a, batch);
    const Walk todo = walk(a, limits, first);
    if (threadIdx.x == 0) {
        mbarrier_init(shared + Map::kFixedFull, 1);
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(shared + Map::kFull + 8 * s, 1);
            mbarrier_init(shared + Map::kEmpty + 8 * s, 4 * kWarpgroups);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    if (threadIdx.x >= 128 * kWarpgroups) {  // the producer is the last warpgroup
        setmaxnreg_dec<24>();
        if (threadIdx.x == 128 * kWarpgroups) {
            prefetch_tensor_map(&x1);
            prefetch_tensor_map(&x2);
            prefetch_tensor_map(&y1);
            prefetch_tensor_map(&y2);
            produce(&x1, &x2, &y1, &y2, shared, a, todo, first, batch, head);
        }
    } else {
        setmaxnreg_inc<240>();
        consume(shared, a, limits, todo, {stats_softmax, stats_dots}, first_out, second_out, first, batch, head);
    }
}
