// The gradient of a bias on attention's scores.   dbias[i, j] = round(Σ ds[i, j]), over the heads that share an element
//
// ds is that of reference/ops/attentions/attention_backward.py, fp32; definition and order: reference/ops/attentions/attention_bias.py.
//
// A block: 128 queries, 64 for each of two warpgroups, and 64 keys of one of the bias's matrices. For each head that has
// this matrix, in order, it computes S = q kᵀ, dP = grad vᵀ and ds, and adds ds to what it keeps in registers.
// grid: (blocks of 64 keys, blocks of 128 queries, matrices of the bias [bias_batches, bias_heads]).
//
// Before it: `dots` of attention_backward_ends.cu.
//
// Defines: FORMAT (BF16 | FP16), D_CHUNKS (d in chunks of 64: 1, 2, 4), DROPOUT (0 | 1), LENGTHS (0 | 1), PACKED (0 | 1),
// PLACED (0 | 1 | 2).
#include "attention_backward.cuh"
#include "attention_bias.cuh"

#ifndef PLACED
#define PLACED 0
#endif

using namespace twin;

struct Config : AttentionDefaults {
    using Format = FORMAT;
    static constexpr int kPlaced = PLACED;
    static constexpr bool kDropout = DROPOUT, kBias = true, kLengths = LENGTHS, kPacked = PACKED;
    static constexpr int kChunks = D_CHUNKS;
};
using Format = Config::Format;
using Arguments = AttentionArguments<Config>;
using Limits = AttentionLimits<Config>;

constexpr int kChunks = Config::kChunks;
constexpr int kStreamRows = 64;                                              // keys of a tile
constexpr int kQueryChunk = kTileRows * 128, kKeyChunk = kStreamRows * 128;  // bytes

struct __align__(1024) Shared {
    unsigned char q[kChunks * kQueryChunk], grad[kChunks * kQueryChunk];
    unsigned char k[kChunks * kKeyChunk], v[kChunks * kKeyChunk];
    unsigned long long full;
};
static_assert(sizeof(Shared) <= 232448, "a block has at most 227 KB of shared memory");

// Which of a 16 x 16 tile's pairs are kept, for the eight a thread has, as the accumulators lie.
__device__ __forceinline__ unsigned kept_of(const Generator& generator, unsigned long long tile, unsigned threshold) {
    unsigned words[4], bits = 0;
    philox(words, generator, tile + threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < 8; i++) bits |= kept(words[i % 2 * 2 + i / 4], i / 2 % 2, threshold) << i;
    return bits;
}

// Where a warp's accumulators lie in the pairs of queries and keys, and what a thread keeps of its 32 pairs.
struct Pairs {
    int head;               // batch h + head, of the queries
    int row, column;        // query and key of the warp's first accumulator
    unsigned hidden, keep;  // bit n: of accumulator n

    __device__ __forceinline__ int thread_row() const { return row + threadIdx.x % 32 / 4; }
    __device__ __forceinline__ int thread_column() const { return column + threadIdx.x % 4 * 2; }
};

// Fill at.hidden and at.keep, ahead of the GEMMs, whose accumulators will need the registers.
__device__ __forceinline__ void prepare(Pairs& at, const Arguments& a, const Limits& limits) {
    at.hidden = 0, at.keep = ~0u;
    if (a.mask != nullptr || at.row + 16 > limits.sq || at.column + kStreamRows > key_limit(limits, at.row) ||
        at.column < key_from(limits, at.row + 15)) {
        const unsigned char* mask = head_mask(a, at.head / a.heads, at.head % a.heads);
#pragma unroll 1
        for (int n = 0; n < 32; n++) {
            const int query = at.thread_row() + n / 2 % 2 * 8, key = at.thread_column() + n / 4 * 8 + n % 2;
            bool hidden = query >= limits.sq || unseen(limits, query, key);
            if (mask != nullptr && !hidden) hidden = masked(a, mask, query, key);
            at.hidden |= static_cast<unsigned>(hidden) << n;
        }
    }
    if constexpr (Config::kDropout) {
        const Generator generator = read_state_once(a.rng_state);
        at.keep = 0;
#pragma unroll 1
        for (int step = 0; step < 4; step++) {
            const auto tile = tile_counter<Config::kPlaced>(a, at.head, at.row / 16, at.column / 16 + step);
            at.keep |= kept_of(generator, tile, a.threshold) << (8 * step);
        }
    }
}

// The scores s become the weights, in place; +0 where a pair is hidden. Of the two rows: 384 - m and 1 / l.
__device__ __forceinline__ void weigh(float (&s)[32], const Arguments& a, const Limits& limits, const Pairs& at,
                                      const float (&base)[2], const float (&inv)[2]) {
    add_bias<false>(s, a, limits, at.head / a.heads, at.head % a.heads, at.thread_row(), at.thread_column());
#pragma unroll
    for (int n = 0; n < 32; n++) {
        const float weighed = __fmul_rn(weight(s[n], factor(a), base[n / 2 % 2]), inv[n / 2 % 2]);
        s[n] = at.hidden >> n & 1 ? 0.0f : weighed;
    }
}

// Issue rows · columnsᵀ, both tiles of d values.
__device__ __forceinline__ void multiply(float (&acc)[32], unsigned rows, unsigned columns) {
#pragma unroll
    for (int step = 0; step < 4 * kChunks; step++)
        wgmma_k16<Format, 0, 0>(acc, along_d(rows, kQueryChunk, step), along_d(columns, kKeyChunk, step), step > 0);
    wgmma_commit();
}

// sum += ds, of the weights s and dp; +0 where a pair is hidden.
__device__ __forceinline__ void add_gradients(float (&sum)[32], const float (&s)[32], const float (&dp)[32],
                                              const Arguments& a, const Pairs& at, const float (&dots)[2]) {
#pragma unroll
    for (int n = 0; n < 32; n++) {
        const float passed = at.keep >> n & 1 ? dp[n] : 0.0f;
        const float ds = __fmul_rn(s[n], __fmaf_rn(passed, a.kept, -dots[n / 2 % 2]));
        sum[n] = sum[n] + (at.hidden >> n & 1 ? 0.0f : ds);
    }
}

__device__ __forceinline__ void store(const float (&sum)[32], const Arguments& a, const Pairs& at, void* dbias) {
    const long long matrix = static_cast<long long>(blockIdx.z) * a.sq * a.skv;
#pragma unroll
    for (int n = 0; n < 32; n++) {
        const int query = at.thread_row() + n / 2 % 2 * 8, key = at.thread_column() + n / 4 * 8 + n % 2;
        if (query >= a.sq || key >= a.skv) continue;
        const long long place = matrix + static_cast<long long>(query) * a.skv + key;
        if (a.bias_is_fp32)
            static_cast<float*>(dbias)[place] = sum[n];
        else
            static_cast<unsigned short*>(dbias)[place] = static_cast<unsigned short>(pack_pair<Format>(sum[n], 0.0f));
    }
}

extern "C" __global__ void __launch_bounds__(256)
    attention_bias(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap grad,
                   const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v,
                   const __grid_constant__ Arguments a, const float* base, const float* inv, const float* dots,
                   void* dbias, int bias_batches, int bias_heads) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const unsigned full = shared_address(&shared.full);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init();
    }
    __syncthreads();

    const int first = blockIdx.y * kTileRows, key = blockIdx.x * kStreamRows;
    const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0), own_rows = warpgroup * (64 * 128);
    const int padded = (a.sq + kTileRows - 1) / kTileRows * kTileRows;
    // The heads that share the matrix: a step of `heads` from batch to batch, all of a batch or one.
    const int matrix_batch = blockIdx.z / bias_heads, matrix_head = blockIdx.z % bias_heads;
    const int batches = bias_batches == 1 ? a.batches : 1, heads = bias_heads == 1 ? a.heads : 1;
    const Range keys = visited(limits_of(a, matrix_batch), first);
    const int block = key / kTileRows;
    const int count = Config::kLengths || (block >= keys.from && block < keys.to) ? batches * heads : 0;

    Pairs at{0, first + static_cast<int>(threadIdx.x) / 32 * 16, key, 0, 0};
    float sum[32];
#pragma unroll
    for (int n = 0; n < 32; n++) sum[n] = 0.0f;
    unsigned parity = 0;
    for (int n = 0; n < count; n++, parity ^= 1) {
        const int batch = matrix_batch + n / heads, head = matrix_head + n % heads;
        const Limits& limits = limits_of(a, batch);
        if constexpr (Config::kLengths) {
            const Range own = visited(limits, first);
            if (block < own.from || block >= own.to) {
                parity ^= 1;  // nothing has arrived
                continue;
            }
        }
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(full, kChunks * 2 * (kQueryChunk + kKeyChunk));
            for (int c = 0; c < kChunks; c++) {
                const int query_row = first + q_start(limits), key_row = key + kv_start(limits);
                load_chunk<Config>(shared_address(shared.q) + c * kQueryChunk, &q, full, 64 * c, query_row, head,
                                   batch);
                load_chunk<Config>(shared_address(shared.grad) + c * kQueryChunk, &grad, full, 64 * c, query_row, head,
                                   batch);
                load_chunk<Config>(shared_address(shared.k) + c * kKeyChunk, &k, full, 64 * c, key_row, head / a.group,
                                   batch);
                load_chunk<Config>(shared_address(shared.v) + c * kKeyChunk, &v, full, 64 * c, key_row, head / a.group,
                                   batch);
            }
        }
        at.head = batch * a.heads + head;
        prepare(at, a, limits);
        const long long row = static_cast<long long>(at.head) * padded + at.thread_row();
        const float own_base[2] = {base[row], base[row + 8]}, own_inv[2] = {inv[row], inv[row + 8]};
        const float own_dots[2] = {dots[row], dots[row + 8]};
        mbarrier_wait(full, parity);
        float s[32], dp[32];
        wgmma_fence();
        multiply(s, shared_address(shared.q) + own_rows, shared_address(shared.k));
        multiply(dp, shared_address(shared.grad) + own_rows, shared_address(shared.v));
        wgmma_wait<0>();
        wgmma_hold(s);
        wgmma_hold(dp);
        weigh(s, a, limits, at, own_base, own_inv);
        add_gradients(sum, s, dp, a, at, own_dots);
        __syncthreads();  // the tiles have been read
    }
    store(sum, a, at, dbias);
}
