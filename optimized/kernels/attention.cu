// Attention forward.   out = softmax(q k^T scale) v, blocked online softmax, per head
//
// q [b, h, sq, d], k and v [b, hkv, skv, d] of bf16 or fp16 through tensor maps (any strides); out the same; m and
// inv fp32 [b, h, sq]. Definition, order and rounding points: reference/ops/attention.py.
//
// A block has 128 queries of one head: two consumer warpgroups of 64 rows and a producer that keeps keys and values
// coming, 128 of each at a time. Scores, weights and the accumulator stay in registers: the weights are the A operand
// of the second GEMM just as they lie. grid: (query blocks, b h, chunks of N_OUT columns of d); scores are computed
// again for each chunk, of which there are two where d > 128.
//
// Defines: FORMAT (BF16 | FP16), D_CHUNKS (d in chunks of 64: 1, 2, 4), N_OUT (64 | 128), STAGES, DROPOUT (0 | 1).
#include "attention_tile.cuh"

using namespace twin;

struct Map {
    static constexpr int kChunk = kTileRows * 128;
    static constexpr int kTile = D_CHUNKS * kChunk;
    static constexpr int kValues = N_OUT / 64 * kChunk;
    static constexpr int kQ = 0;
    static constexpr int kK = kQ + kTile;
    static constexpr int kV = kK + STAGES * kTile;
    static constexpr int kBarriers = kV + STAGES * kValues;
    static constexpr int kQFull = kBarriers;
    static constexpr int kKFull = kQFull + 8, kKEmpty = kKFull + 8 * STAGES;
    static constexpr int kVFull = kKEmpty + 8 * STAGES, kVEmpty = kVFull + 8 * STAGES;
    static constexpr int kBytes = kVEmpty + 8 * STAGES;
    static_assert(kBytes <= 232448, "a block has at most 227 KB of shared memory");
};

__device__ __forceinline__ void produce(const CUtensorMap* q, const CUtensorMap* k, const CUtensorMap* v,
                                        unsigned shared, const Arguments& a, int first, int batch, int head,
                                        int blocks) {
    mbarrier_arrive_expect_tx(shared + Map::kQFull, Map::kTile);
    for (int c = 0; c < D_CHUNKS; c++)
        load_chunk(shared + Map::kQ + c * Map::kChunk, q, shared + Map::kQFull, 64 * c, first, head, batch);
    const int key_head = head / a.group;
    Stage<STAGES> stage;
    for (int j = 0; j < blocks; j++, stage.advance()) {
        const unsigned k_full = shared + Map::kKFull + 8 * stage.index, v_full = shared + Map::kVFull + 8 * stage.index;
        mbarrier_wait(shared + Map::kKEmpty + 8 * stage.index, stage.parity ^ 1);
        mbarrier_arrive_expect_tx(k_full, Map::kTile);
        for (int c = 0; c < D_CHUNKS; c++)
            load_chunk(shared + Map::kK + stage.index * Map::kTile + c * Map::kChunk, k, k_full, 64 * c,
                       j * kTileRows, key_head, batch);
        mbarrier_wait(shared + Map::kVEmpty + 8 * stage.index, stage.parity ^ 1);
        mbarrier_arrive_expect_tx(v_full, Map::kValues);
        for (int c = 0; c < N_OUT / 64; c++)
            load_chunk(shared + Map::kV + stage.index * Map::kValues + c * Map::kChunk, v, v_full,
                       N_OUT * blockIdx.z + 64 * c, j * kTileRows, key_head, batch);
    }
}

// The running softmax of a thread's two rows (l / 4 and l / 4 + 8 of its warp's 16).
struct Rows {
    float m[2], sum[2];
};

// Scores of hidden pairs become -inf. `row`: the thread's first query; `key`: its first key.
__device__ __forceinline__ void hide(float (&s)[64], const Arguments& a, const unsigned char* mask, int row, int key) {
    const int limits[2] = {key_limit(a, row), key_limit(a, row + 8)};
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const int r = i / 2 % 2, column = key + i / 4 * 8 + i % 2;
        bool hidden = column >= limits[r];
        if (mask != nullptr && !hidden && row + 8 * r < a.sq) hidden = masked(a, mask, row + 8 * r, column);
        if (hidden) s[i] = TWIN_HIDDEN;
    }
}

// Scores to weights, in place; returns alpha of the two rows.
__device__ __forceinline__ void weigh(float (&s)[64], Rows& rows, float (&alpha)[2], float c) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = TWIN_HIDDEN;
#pragma unroll
        for (int i = 2 * r; i < 64; i += 4) top = fmaxf(fmaxf(top, s[i]), s[i + 1]);
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 2));
        const float next = fmaxf(rows.m[r], floorf(__fmul_rn(top, c)) + 0.0f);
        alpha[r] = ex2_approx(rows.m[r] - next);
        rows.m[r] = next;
        const float base = kGrid15 - next;
        float even = 0.0f, odd = 0.0f;
#pragma unroll
        for (int i = 2 * r; i < 64; i += 4) {
            s[i] = weight(s[i], c, base);
            s[i + 1] = weight(s[i + 1], c, base);
            even = even + s[i], odd = odd + s[i + 1];
        }
        rows.sum[r] = __fmaf_rn(rows.sum[r], alpha[r], even + odd);
    }
}

// Dropped weights become zeros. `counter`: the Philox index of the first of the warp's eight 16 x 16 tiles.
__device__ __forceinline__ void drop(float (&s)[64], const Generator& generator, unsigned long long counter,
                                     unsigned threshold) {
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
        unsigned words[4];
        philox(words, generator, counter + 32 * tile + threadIdx.x % 32);
#pragma unroll
        for (int i = 0; i < 8; i++) {  // i = 4 c + 2 r + e
            if (!kept(words[i % 2 * 2 + i / 4], i / 2 % 2, threshold)) s[8 * tile + i] = 0.0f;
        }
    }
}

// Issue s = q kᵀ.
__device__ __forceinline__ void score(float (&s)[64], unsigned q, unsigned k) {
#pragma unroll
    for (int step = 0; step < 4 * D_CHUNKS; step++)
        wgmma_k16<FORMAT, 0, 0>(s, along_d(q, Map::kChunk, step), along_d(k, Map::kChunk, step), step > 0);
}

// Issue o += p v.
__device__ __forceinline__ void add_values(float (&o)[N_OUT / 2], const unsigned (&p)[8][4], unsigned v) {
#pragma unroll
    for (int step = 0; step < 8; step++) wgmma_k16<FORMAT, 1>(o, p[step], along_rows(v, Map::kChunk, step), 1);
}

__device__ __forceinline__ void store(const float (&o)[N_OUT / 2], const Rows& rows, const Arguments& a, void* out,
                                      float* m, float* inv, int row, int batch, int head) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = rows.sum[r];
        sum = sum + __shfl_xor_sync(0xFFFFFFFF, sum, 1);
        sum = sum + __shfl_xor_sync(0xFFFFFFFF, sum, 2);
        const float inverse = sum == 0.0f ? 0.0f : __fdiv_rn(1.0f, sum);
        const int query = row + 8 * r;
        if (query >= a.sq) continue;
        if (lane == 0 && blockIdx.z == 0) {
            const long long at = static_cast<long long>(batch * a.heads + head) * a.sq + query;
            m[at] = rows.m[r];
            inv[at] = inverse;
        }
        const float last = __fmul_rn(inverse, a.kept);
        unsigned short* line = static_cast<unsigned short*>(out) + batch * a.out_b + head * a.out_h + query * a.out_s;
#pragma unroll
        for (int t = 0; t < N_OUT / 8; t++) {
            const int column = N_OUT * blockIdx.z + 8 * t + 2 * lane;
            if (column < a.d)
                *reinterpret_cast<unsigned*>(line + column) = pack_pair<FORMAT>(
                    __fmul_rn(o[4 * t + 2 * r], last), __fmul_rn(o[4 * t + 2 * r + 1], last));
        }
    }
}

__device__ __forceinline__ void consume(unsigned shared, const Arguments& a, void* out, float* m, float* inv, int first,
                                        int batch, int head, int blocks) {
    const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    const int warp_row = first + threadIdx.x / 32 * 16, row = warp_row + threadIdx.x % 32 / 4;
    const unsigned q = shared + Map::kQ + warpgroup * (64 * 128);
    const unsigned char* mask = head_mask(a, batch, head);
    Generator generator{};
    if constexpr (DROPOUT) generator = read_state(a.rng_state);
    Rows rows{{kLowest, kLowest}, {0.0f, 0.0f}};
    float o[N_OUT / 2];
#pragma unroll
    for (int i = 0; i < N_OUT / 2; i++) o[i] = 0.0f;
    const unsigned long long counter = DROPOUT ? tile_counter(a, batch * a.heads + head, warp_row / 16, 0) : 0;
    const auto soften = [&](float(&s)[64], float(&alpha)[2], int j) {
        if (mask != nullptr || (j + 1) * kTileRows > key_limit(a, warp_row))
            hide(s, a, mask, row, j * kTileRows + 2 * (threadIdx.x % 4));
        weigh(s, rows, alpha, a.c);
        if constexpr (DROPOUT) drop(s, generator, counter + 256 * j, a.threshold);
    };
    const auto release = [](unsigned barrier) {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
    };

    Stage<STAGES> keys, values;
    unsigned p[8][4];
    float s[64], alpha[2];
    mbarrier_wait(shared + Map::kQFull, 0);
    if (blocks > 0) {  // the first block: nothing to rescale
        mbarrier_wait(shared + Map::kKFull, 0);
        wgmma_fence();
        score(s, q, shared + Map::kK);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(s);
        release(shared + Map::kKEmpty);
        keys.advance();
        soften(s, alpha, 0);
#pragma unroll
        for (int step = 0; step < 8; step++) pack_operand<FORMAT>(p[step], s, step);
    }
    // While a block's scores become weights, the tensor cores are busy with the values of the block before.
    for (int j = 1; j < blocks; j++, keys.advance(), values.advance()) {
        mbarrier_wait(shared + Map::kKFull + 8 * keys.index, keys.parity);
        wgmma_fence();
        score(s, q, shared + Map::kK + keys.index * Map::kTile);
        wgmma_commit();
        mbarrier_wait(shared + Map::kVFull + 8 * values.index, values.parity);
        wgmma_fence();
        add_values(o, p, shared + Map::kV + values.index * Map::kValues);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_hold(s);
        release(shared + Map::kKEmpty + 8 * keys.index);
        soften(s, alpha, j);
        wgmma_wait<0>();
        wgmma_hold(o);
        release(shared + Map::kVEmpty + 8 * values.index);
        if (__any_sync(0xFFFFFFFF, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < N_OUT / 2; i++) o[i] = __fmul_rn(o[i], alpha[i / 2 % 2]);
        }
#pragma unroll
        for (int step = 0; step < 8; step++) pack_operand<FORMAT>(p[step], s, step);
    }
    if (blocks > 0) {
        mbarrier_wait(shared + Map::kVFull + 8 * values.index, values.parity);
        wgmma_fence();
        add_values(o, p, shared + Map::kV + values.index * Map::kValues);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(o);
    }
    store(o, rows, a, out, m, inv, row, batch, head);
}

extern "C" __global__ void __launch_bounds__(128 * (kWarpgroups + 1), 1)
    attention(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
              const __grid_constant__ CUtensorMap v, const __grid_constant__ Arguments a, void* out, float* m,
              float* inv) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const int batch = blockIdx.y / a.heads, head = blockIdx.y % a.heads;
    // Causal: the blocks with most to do first.
    const int first = (gridDim.x - 1 - blockIdx.x) * kTileRows;
    const int blocks = visited(a, first);
    if (threadIdx.x == 0) {
        mbarrier_init(shared + Map::kQFull, 1);
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(shared + Map::kKFull + 8 * s, 1);
            mbarrier_init(shared + Map::kVFull + 8 * s, 1);
            mbarrier_init(shared + Map::kKEmpty + 8 * s, 4 * kWarpgroups);
            mbarrier_init(shared + Map::kVEmpty + 8 * s, 4 * kWarpgroups);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    if (threadIdx.x >= 128 * kWarpgroups) {  // the producer is the last warpgroup
        setmaxnreg_dec<24>();
        if (threadIdx.x == 128 * kWarpgroups) {
            prefetch_tensor_map(&q);
            prefetch_tensor_map(&k);
            prefetch_tensor_map(&v);
            produce(&q, &k, &v, shared, a, first, batch, head, blocks);
        }
    } else {
        setmaxnreg_inc<240>();
        consume(shared, a, out, m, inv, first, batch, head, blocks);
    }
}
