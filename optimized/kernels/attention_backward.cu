// Attention backward, heads of up to 128 channels. Definition, order and rounding points:
// reference/ops/attention_backward.py. Wider heads: attention_backward_wide.cu.
//
// A block holds 128 keys of one head, 64 for each of two consumer warpgroups, and streams QUERIES queries at a time
// past them. For each tile five GEMMs:
//
//     Sᵀ = k qᵀ     dPᵀ = v gradᵀ     dv += Pᵀ grad     dk += dSᵀ q          two warpgroups, 64 keys each
//     dq = dS k                                                              a third
//
// P and dS are operands just as they lie in registers; dv and dk stay there. dS goes through shared memory to the third
// warpgroup, which sums over all 128 keys. dq leaves through a mailbox to a warp that adds it to global memory when
// its turn has come: a tile of queries takes key blocks in descending order. Blocks are numbered by tickets, a head's
// last keys first, so a block only ever waits for blocks that have started before it.
//
// Three launches: `dots` (what the tiles need of each query), `attention_backward`, `attention_dq` (dq scaled and rounded).
//
// Defines: as attention.cu, and QUERIES (64 | 128).
#include "attention_tile.cuh"
#include "ptx/bulk.cuh"
#include "ptx/grid.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/turn.cuh"

using namespace twin;

constexpr int kWords = QUERIES / 64;       // of 32 pairs each that a thread has in a tile
constexpr int kScores = QUERIES / 2;       // accumulators of a tile of 64 keys
constexpr int kAcc = N_OUT / 2;
// Pᵀ grad starts before dPᵀ is done, where there are registers for the weights beside both.
constexpr bool kEarly = kWords == 1 && !DROPOUT;
constexpr int kKeyChunk = kTileRows * 128; // bytes of 128 keys and 64 channels, or 64 queries
constexpr int kChunk = QUERIES * 128;
constexpr int kPiece = 64 * 64;            // half of a tile's dq, in floats
constexpr int kTiles = kWords > 1 ? 1 : 2;  // of dq, in shared memory
static_assert(QUERIES * N_OUT == 2 * kPiece, "dq of a tile is two pieces");

struct __align__(1024) Shared {
    unsigned char k[D_CHUNKS * kKeyChunk], v[D_CHUNKS * kKeyChunk];
    unsigned char q[STAGES][D_CHUNKS * kChunk], grad[STAGES][D_CHUNKS * kChunk];
    unsigned char ds[2][kWords * kKeyChunk];
    float dq[kTiles][2 * kPiece];
    float base[STAGES][QUERIES], inv[STAGES][QUERIES], dots[STAGES][QUERIES];
    unsigned long long keys_full;
    Mailbox q_box[STAGES], grad_box[STAGES], ds_box[2], dq_box[kTiles];
    unsigned ticket;
};
static_assert(sizeof(Shared) <= 232448, "a block has at most 227 KB of shared memory");

// What the kernels share in global memory; `padded` is sq up to a multiple of 128.
struct Scratch {
    float *base, *inv, *dots;  // [b h, padded]: 384 - m, 1 / l and D of a query; zeros beyond sq
    float* dq;                 // [b h, padded / QUERIES, 2 pieces, 8, 128 threads, 4]
    unsigned* turns;           // [b h, padded / QUERIES]: key blocks that have been added to a tile
    unsigned* ticket;          // blocks that have started
};

// The tiles of a block: keys from `first`; of each of `group` heads, the queries of a range.
struct Work {
    int batch, key_head, first;
    Range queries;
};

// Heads are taken `together` at a time, their last keys first.
__device__ __forceinline__ Work work_of(const Arguments& a, unsigned rank, int key_blocks, int all_heads) {
    const int before = rank / (a.together * key_blocks) * a.together;
    const int heads = min(a.together, all_heads - before), place = rank - before * key_blocks;
    const int head = before + place % heads, key_heads = a.heads / a.group;
    const int first = (key_blocks - 1 - place / heads) * kTileRows;
    return {head / key_heads, head % key_heads, first, visitors(a, first)};
}

__device__ __forceinline__ void produce(Shared& shared, const CUtensorMap* q, const CUtensorMap* k,
                                        const CUtensorMap* v, const CUtensorMap* grad, const Arguments& a,
                                        const Scratch& scratch, const Work& work, int padded) {
    const unsigned keys_full = shared_address(&shared.keys_full);
    mbarrier_arrive_expect_tx(keys_full, 2 * sizeof(shared.k));
    for (int c = 0; c < D_CHUNKS; c++) {
        load_chunk(shared_address(shared.k) + c * kKeyChunk, k, keys_full, 64 * c, work.first, work.key_head,
                   work.batch);
        load_chunk(shared_address(shared.v) + c * kKeyChunk, v, keys_full, 64 * c, work.first, work.key_head,
                   work.batch);
    }
    Stage<STAGES> stage;
    for (int n = 0; n < a.group; n++) {
        const int head = work.key_head * a.group + n;
        for (int row = work.queries.from; row < work.queries.to; row += QUERIES, stage.advance()) {
            const long long at = static_cast<long long>(work.batch * a.heads + head) * padded + row;
            const int s = stage.index;
            shared.q_box[s].wait_empty(stage.parity);
            const unsigned q_full = shared_address(&shared.q_box[s].full);
            mbarrier_arrive_expect_tx(q_full, D_CHUNKS * kChunk + 8 * QUERIES);
            for (int c = 0; c < D_CHUNKS; c++)
                load_chunk(shared_address(shared.q[s]) + c * kChunk, q, q_full, 64 * c, row, head, work.batch);
            bulk_load(shared_address(shared.base[s]), scratch.base + at, 4 * QUERIES, q_full);
            bulk_load(shared_address(shared.inv[s]), scratch.inv + at, 4 * QUERIES, q_full);
            shared.grad_box[s].wait_empty(stage.parity);
            const unsigned grad_full = shared_address(&shared.grad_box[s].full);
            mbarrier_arrive_expect_tx(grad_full, D_CHUNKS * kChunk + 4 * QUERIES);
            for (int c = 0; c < D_CHUNKS; c++)
                load_chunk(shared_address(shared.grad[s]) + c * kChunk, grad, grad_full, 64 * c, row, head,
                           work.batch);
            bulk_load(shared_address(shared.dots[s]), scratch.dots + at, 4 * QUERIES, grad_full);
        }
    }
}

// One thread adds dq of a tile to global memory when the later key blocks have added theirs.
__device__ __forceinline__ void add_dq(Shared& shared, const Arguments& a, const Scratch& scratch, const Work& work,
                                       int padded) {
    Stage<kTiles> stage;
    for (int n = 0; n < a.group; n++) {
        const long long head = work.batch * a.heads + work.key_head * a.group + n;
        for (int row = work.queries.from; row < work.queries.to; row += QUERIES, stage.advance()) {
            const long long tile = head * (padded / QUERIES) + row / QUERIES;
            const unsigned turn = visited(a, row & -kTileRows).to - 1 - work.first / kTileRows;
            const unsigned source = shared_address(shared.dq[stage.index]);
            float* to = scratch.dq + tile * (2 * kPiece);
            if (turn > 0) {
                wait_for_turn(scratch.turns + tile, turn);
                fence_proxy_async_all();
            }
            mbarrier_wait(shared_address(&shared.dq_box[stage.index].full), stage.parity);
            if (turn > 0)
                bulk_add(to, source, 8 * kPiece);
            else
                bulk_store(to, source, 8 * kPiece);
            bulk_commit();
            bulk_wait_read<0>();
            mbarrier_arrive(shared_address(&shared.dq_box[stage.index].empty));
            bulk_wait<0>();
            fence_proxy_async_all();
            pass_turn(scratch.turns + tile, turn + 1);
        }
    }
}

// Which of a 16 x 16 tile's pairs are kept, for the eight a thread has: bit 4 c + 2 r + e as the accumulators lie.
// The mask is laid out for tiles of queries x keys. In a tile of keys x queries a thread needs halves of two counters,
// and the thread four lanes away needs the others of the same two: each computes one and they trade.
__device__ __forceinline__ unsigned kept_bits(const Generator& generator, unsigned long long tile, unsigned threshold) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, odd = g % 2;
    unsigned words[4], bits = 0;
    philox(words, generator, tile + 4 * (2 * q + odd) + g / 2);
    const unsigned own[2] = {odd ? words[2] : words[0], odd ? words[3] : words[1]};
    const unsigned give[2] = {odd ? words[0] : words[2], odd ? words[1] : words[3]};
    unsigned other[2];
#pragma unroll
    for (int c = 0; c < 2; c++) other[c] = __shfl_xor_sync(0xFFFFFFFF, give[c], 4);
#pragma unroll
    for (int i = 0; i < 8; i++) {  // i = 4 r + 2 c + e: query 8 r + 2 q + e, key 8 c + g
        const int r = i / 4, c = i / 2 % 2, e = i % 2;
        bits |= kept(e == odd ? own[c] : other[c], r, threshold) << i;
    }
    return bits;
}

// What a thread hides and keeps of its pairs, and where they lie: accumulator 4 t + 2 r + e is of the key
// `key` + 8 r and of the query `query` + 8 t + e.
struct Pairs {
    int head, key, query;                     // head: batch h + head, of the queries
    unsigned hidden[kWords], keep[kWords];    // bit n % 32 of word n / 32: of accumulator n
};

// Fill `hidden`, for a tile in which some pair is hidden.
__device__ __forceinline__ void hide(Pairs& at, const Arguments& a) {
    const unsigned char* mask = head_mask(a, at.head / a.heads, at.head % a.heads);
#pragma unroll
    for (int word = 0; word < kWords; word++) {
        unsigned bits = 0;
#pragma unroll 1
        for (int n = 0; n < 32; n++) {
            const int key = at.key + n / 2 % 2 * 8, query = at.query + 64 * word + n / 4 * 8 + n % 2;
            bool hidden = query >= a.sq || unseen(a, query, key);
            if (mask != nullptr && !hidden) hidden = masked(a, mask, query, key);
            bits |= static_cast<unsigned>(hidden) << n;
        }
        at.hidden[word] = bits;
    }
}

__device__ __forceinline__ void draw(Pairs& at, const Arguments& a) {
    const Generator generator = read_state(a.rng_state);
#pragma unroll
    for (int word = 0; word < kWords; word++) {
        unsigned bits = 0;
#pragma unroll 1
        for (int step = 0; step < 4; step++)
            bits |= kept_bits(generator, tile_counter(a, at.head, at.query / 16 + 4 * word + step, at.key / 16),
                              a.threshold) << (8 * step);
        at.keep[word] = bits;
    }
}

__device__ __forceinline__ bool is_set(const unsigned (&bits)[kWords], int n) { return bits[n / 32] >> n % 32 & 1; }

// The scores s become the weights, in place: +0 where a pair is hidden.
__device__ __forceinline__ void weigh(float (&s)[kScores], const Arguments& a, const Pairs& at, bool some_hidden,
                                      const float* base, const float* inv) {
#pragma unroll
    for (int t = 0; t < kScores / 4; t++) {
        const float2 bases = *reinterpret_cast<const float2*>(base + 8 * t);
        const float2 inverses = *reinterpret_cast<const float2*>(inv + 8 * t);
#pragma unroll
        for (int n = 4 * t; n < 4 * t + 4; n++)
            s[n] = __fmul_rn(weight(s[n], a.c, n % 2 ? bases.y : bases.x), n % 2 ? inverses.y : inverses.x);
    }
    if (some_hidden) {
#pragma unroll
        for (int n = 0; n < kScores; n++) s[n] = is_set(at.hidden, n) ? 0.0f : s[n];
    }
}

// The weights of 16 queries that dropout keeps, as an operand.
__device__ __forceinline__ void pack_kept(unsigned (&weights)[4], const float (&s)[kScores], const Pairs& at,
                                          int step) {
    float kept[8];
#pragma unroll
    for (int i = 0; i < 8; i++) kept[i] = !DROPOUT || is_set(at.keep, 8 * step + i) ? s[8 * step + i] : 0.0f;
    pack_operand<FORMAT>(weights, kept, 0);
}

// The gradients of the scores, in place of dp.
__device__ __forceinline__ void differentiate(float (&dp)[kScores], const float (&s)[kScores], const Arguments& a,
                                              const Pairs& at, bool some_hidden, const float* dots) {
#pragma unroll
    for (int n = 0; n < kScores; n++) {
        const float2 dot = *reinterpret_cast<const float2*>(dots + n / 4 * 8);
        const float passed = !DROPOUT || is_set(at.keep, n) ? dp[n] : 0.0f;
        dp[n] = __fmul_rn(s[n], __fmaf_rn(passed, a.kept, -(n % 2 ? dot.y : dot.x)));
    }
    if (some_hidden) {
#pragma unroll
        for (int n = 0; n < kScores; n++) dp[n] = is_set(at.hidden, n) ? 0.0f : dp[n];
    }
}

// acc += A(values, 64 keys x queries) B, B of the tile's queries in shared memory.
__device__ __forceinline__ void accumulate(float (&acc)[kAcc], const unsigned (&values)[kScores / 8][4],
                                           unsigned tile) {
#pragma unroll
    for (int step = 0; step < kScores / 8; step++)
        wgmma_k16<FORMAT, 1>(acc, values[step], along_rows(tile, kChunk, step), 1);
}

// Issue Sᵀ = k qᵀ, or dPᵀ = v gradᵀ: `keys` are the warpgroup's rows of one, `queries` a stage of the other.
__device__ __forceinline__ void score(float (&acc)[kScores], unsigned keys, unsigned queries) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4 * D_CHUNKS; step++)
        wgmma_k16<FORMAT, 0, 0>(acc, along_d(keys, kKeyChunk, step), along_d(queries, kChunk, step), step > 0);
    wgmma_commit();
}

struct Consumer {
    Shared& shared;
    const Arguments& a;
    int warpgroup;
    unsigned keys, values;  // this warpgroup's rows of k and of v, in shared memory
    Stage<STAGES> stage;
    Stage<2> ds;
    Stage<kTiles> dq;
    float dk[kAcc], dv[kAcc];

    // Issue this warpgroup's half of the previous tile's dq = dS k: 64 channels, or 64 queries.
    __device__ __forceinline__ void multiply_dq(float (&acc)[kPiece / 128]) {
        const unsigned rows = shared_address(shared.ds[ds.index]) + (kWords > 1 ? warpgroup * kKeyChunk : 0);
        const unsigned k = shared_address(shared.k) + (kWords > 1 ? 0 : warpgroup * kKeyChunk);
        shared.ds_box[ds.index].wait_full(ds.parity);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kTileRows / 16; step++)
            wgmma_k16<FORMAT, 1, 1>(acc, along_rows(rows, kKeyChunk, step), along_rows(k, kKeyChunk, step), step > 0);
        wgmma_commit();
    }

    // Give the previous tile's dq, which has been waited for, to the warp that adds it.
    __device__ __forceinline__ void send_dq(const float (&acc)[kPiece / 128]) {
        shared.ds_box[ds.index].arrive_empty();
        shared.dq_box[dq.index].wait_empty(dq.parity);
        float4* to = reinterpret_cast<float4*>(shared.dq[dq.index] + warpgroup * kPiece) + threadIdx.x % 128;
#pragma unroll
        for (int j = 0; j < kPiece / 512; j++)
            to[128 * j] = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
        fence_proxy_async();
        shared.dq_box[dq.index].arrive_full();
        ds.advance(), dq.advance();
    }

    // One tile, and dq of the one before, if there was one.
    template <bool kFirst>
    __device__ __forceinline__ void tile(Pairs& at, bool some_hidden) {
        const int place = stage.index, lane = threadIdx.x % 32, column = 2 * (lane % 4);
        const unsigned q = shared_address(shared.q[place]), grad = shared_address(shared.grad[place]);
        float s[kScores];
        shared.q_box[place].wait_full(stage.parity);
        score(s, keys, q);
        Stage<2> next = ds;
        if constexpr (!kFirst) {
            float acc[kPiece / 128];
            multiply_dq(acc);
            next.advance();
            if (some_hidden) hide(at, a);
            if constexpr (DROPOUT) draw(at, a);
            wgmma_wait<1>();
            wgmma_hold(s);
            weigh(s, a, at, some_hidden, shared.base[place] + column, shared.inv[place] + column);
            wgmma_wait<0>();
            wgmma_hold(acc);
            send_dq(acc);
        } else {
            if (some_hidden) hide(at, a);
            if constexpr (DROPOUT) draw(at, a);
            wgmma_wait<0>();
            wgmma_hold(s);
            weigh(s, a, at, some_hidden, shared.base[place] + column, shared.inv[place] + column);
        }
        float dp[kScores];
        shared.grad_box[place].wait_full(stage.parity);
        score(dp, values, grad);
        unsigned weights[kScores / 8][4], gradients[kScores / 8][4];
        if constexpr (kEarly) {
#pragma unroll
            for (int step = 0; step < kScores / 8; step++) pack_kept(weights[step], s, at, step);
            wgmma_fence();
            accumulate(dv, weights, grad);
            wgmma_commit();
        }
        wgmma_wait<kEarly>();
        wgmma_hold(dp);
        differentiate(dp, s, a, at, some_hidden, shared.dots[place] + column);
#pragma unroll
        for (int step = 0; step < kScores / 8; step++) {
            pack_operand<FORMAT>(gradients[step], dp, step);
            if constexpr (!kEarly) pack_kept(weights[step], s, at, step);
        }
        if constexpr (!kEarly) {
            wgmma_fence();
            accumulate(dv, weights, grad);
            wgmma_commit();
        }
        // dS into shared memory, [keys][queries].
        shared.ds_box[next.index].wait_empty(next.parity);
        const unsigned to = shared_address(shared.ds[next.index]);
        const int row = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
        for (int step = 0; step < kScores / 8; step++) {
            const int unit = 2 * (step % 4) + lane / 16;
            stmatrix_x4(to + step / 4 * kKeyChunk + row * 128 + ((unit ^ row % 8) << 4), gradients[step]);
        }
        fence_proxy_async();
        shared.ds_box[next.index].arrive_full();
        wgmma_fence();
        accumulate(dk, gradients, q);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_hold(dv);
        shared.grad_box[place].arrive_empty();
        wgmma_wait<0>();
        wgmma_hold(dk);
        shared.q_box[place].arrive_empty();
        stage.advance();
    }
};

__device__ __forceinline__ void consume(Shared& shared, const Arguments& a, const Work& work, unsigned short* dk_out,
                                        unsigned short* dv_out, int warpgroup) {
    const int row = work.first + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    Pairs at{work.batch * a.heads + work.key_head * a.group, row, 0, {}, {}};
    const unsigned keys = shared_address(shared.k) + warpgroup * (64 * 128);
    Consumer consumer{shared, a, warpgroup, keys, keys + static_cast<unsigned>(sizeof(shared.k))};
#pragma unroll
    for (int i = 0; i < kAcc; i++) consumer.dk[i] = consumer.dv[i] = 0.0f;
    mbarrier_wait(shared_address(&shared.keys_full), 0);
    bool is_first = true;
    for (int n = 0; n < a.group; n++, at.head++) {
        for (int first = work.queries.from; first < work.queries.to; first += QUERIES) {
            at.query = first + threadIdx.x % 4 * 2;
            const bool some_hidden = a.mask != nullptr || first + QUERIES > a.sq ||
                                     work.first + kTileRows > key_limit(a, first) ||
                                     work.first < key_from(a, first + QUERIES - 1);
            if (is_first)
                consumer.tile<true>(at, some_hidden), is_first = false;
            else
                consumer.tile<false>(at, some_hidden);
        }
    }
    if (!is_first) {
        float acc[kPiece / 128];
        consumer.multiply_dq(acc);
        wgmma_wait<0>();
        wgmma_hold(acc);
        consumer.send_dq(acc);
    }
    const long long to = work.batch * a.out_b + work.key_head * a.out_h + row * a.out_s;
    store_rows(consumer.dv, a.kept, a.kept, dv_out + to, a.out_s, a.skv - row, a.d);
    store_rows(consumer.dk, a.scale, a.scale, dk_out + to, a.out_s, a.skv - row, a.d);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_backward(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                       const __grid_constant__ CUtensorMap v, const __grid_constant__ CUtensorMap grad,
                       const __grid_constant__ Arguments a, const __grid_constant__ Scratch scratch,
                       unsigned short* dk, unsigned short* dv) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        wait_for_grid_before();
        shared.ticket = atomicAdd(scratch.ticket, 1);
        let_next_grid_start();
        mbarrier_init(shared_address(&shared.keys_full), 1);
        for (int s = 0; s < STAGES; s++) {
            shared.q_box[s].init(1, 4 * kWarpgroups);
            shared.grad_box[s].init(1, 4 * kWarpgroups);
        }
        for (int s = 0; s < 2; s++) shared.ds_box[s].init(4 * kWarpgroups, 4 * kWarpgroups);
        for (int s = 0; s < kTiles; s++) shared.dq_box[s].init(4 * kWarpgroups, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    const int padded = (a.sq + kTileRows - 1) / kTileRows * kTileRows;
    const int key_blocks = (a.skv + kTileRows - 1) / kTileRows;
    const Work work = work_of(a, shared.ticket, key_blocks, gridDim.x / key_blocks);

    const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    if (warpgroup < kWarpgroups) {
        setmaxnreg_inc<240>();
        consume(shared, a, work, dk, dv, warpgroup);
    } else {  // the last warpgroup moves data
        setmaxnreg_dec<24>();
        if (threadIdx.x == 128 * kWarpgroups)
            produce(shared, &q, &k, &v, &grad, a, scratch, work, padded);
        else if (threadIdx.x == 128 * kWarpgroups + 32)
            add_dq(shared, a, scratch, work, padded);
    }
}

// Element i of 8 in a 16-byte vector, widened.
__device__ __forceinline__ float element(const uint4& v, int i) {
    const unsigned word = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
    if constexpr (same_type<FORMAT, BF16>) return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
    return cvt_f32_f16(static_cast<unsigned short>(i % 2 ? word >> 16 : word & 0xFFFFu));
}

// A query is a group of lanes, 8 channels each; a thread takes four queries. grad has the strides grad_*, out those of
// `a.out_*`, in elements. No turn has been taken yet.
extern "C" __global__ void __launch_bounds__(256)
    dots(const __grid_constant__ Arguments a, const unsigned short* grad, const unsigned short* out, long long grad_b,
         long long grad_h, long long grad_s, const float* m, const float* inv, const __grid_constant__ Scratch scratch) {
    constexpr int kLanes = N_OUT / 8, kGroups = 256 / kLanes, kEach = 4;
    let_next_grid_start();
    const int padded = (a.sq + kTileRows - 1) / kTileRows * kTileRows, lane = threadIdx.x % kLanes;
    const int batch = blockIdx.x / a.heads, head = blockIdx.x % a.heads;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *scratch.ticket = 0;
    const int first = blockIdx.y * (kEach * kGroups) + threadIdx.x / kLanes;
    uint4 x[kEach] = {}, y[kEach] = {};
#pragma unroll
    for (int n = 0; n < kEach; n++) {
        const int query = first + n * kGroups;
        if (query >= a.sq || 8 * lane >= a.d) continue;
        x[n] = *reinterpret_cast<const uint4*>(grad + batch * grad_b + head * grad_h + query * grad_s + 8 * lane);
        y[n] = *reinterpret_cast<const uint4*>(out + batch * a.out_b + head * a.out_h + query * a.out_s + 8 * lane);
    }
#pragma unroll
    for (int n = 0; n < kEach; n++) {
        const int query = first + n * kGroups;
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) dot = __fmaf_rn(element(x[n], i), element(y[n], i), dot);
        dot = dot + 0.0f;  // the lanes of 32 that a query does not have hold zeros
#pragma unroll
        for (int h = kLanes / 2; h > 0; h /= 2) dot = dot + __shfl_xor_sync(0xFFFFFFFF, dot, h);
        if (lane != 0 || query >= padded) continue;
        const long long of = static_cast<long long>(blockIdx.x) * a.sq + query;
        const long long at = static_cast<long long>(blockIdx.x) * padded + query;
        const bool exists = query < a.sq;
        scratch.base[at] = exists ? kGrid15 - m[of] : 0.0f;
        scratch.inv[at] = exists ? inv[of] : 0.0f;
        scratch.dots[at] = exists ? dot : 0.0f;
        if (query % QUERIES == 0) scratch.turns[at / QUERIES] = 0;
    }
}

// dq = round(sum * scale); a block takes a tile of queries. Zeros where no key is visited.
extern "C" __global__ void __launch_bounds__(256)
    attention_dq(const __grid_constant__ Arguments a, const __grid_constant__ Scratch scratch, unsigned short* dq) {
    wait_for_grid_before();
    const int first = blockIdx.x * QUERIES, piece = threadIdx.x / 128;
    const int batch = blockIdx.y / a.heads, head = blockIdx.y % a.heads;
    const int row = first + (kWords > 1 ? 64 * piece : 0) + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int column = kWords > 1 ? 0 : 64 * piece;
    const float4* from = reinterpret_cast<const float4*>(
        scratch.dq + (static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * (2 * kPiece) + piece * kPiece);
    const bool any = visited(a, first & -kTileRows).any();
    float sum[32];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float4 four = any ? from[128 * j + threadIdx.x % 128] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        sum[4 * j] = four.x, sum[4 * j + 1] = four.y, sum[4 * j + 2] = four.z, sum[4 * j + 3] = four.w;
    }
    store_rows(sum, a.scale, a.scale, dq + batch * a.out_b + head * a.out_h + row * a.out_s + column, a.out_s, a.sq - row,
               a.d - column);
}
