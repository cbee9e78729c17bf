// Attention backward, heads of up to 128 channels. Definition, order and rounding points:
// reference/ops/attentions/attention_backward.py. Wider heads: attention_backward_wide.cu.
//
// A block holds 128 keys of one head, 64 for each of two consumer warpgroups, and streams QUERIES queries at a time
// past them. For each tile five GEMMs:
//
//     Sᵀ = k qᵀ     dPᵀ = v gradᵀ     dv += Pᵀ grad     dk += dSᵀ q     dq = dS k
//
// P and dS are operands just as they lie in registers; dv and dk stay there. dS also goes through shared memory: dq sums
// over all 128 keys, and each warpgroup computes a half of it, while it weighs the next tile. dq leaves through a mailbox
// to a warp that adds it to global memory when its turn has come: a tile of queries takes key blocks in descending order.
//
// Blocks stay, one on each multiprocessor, and take works by tickets, a head's last keys first. So a work only ever
// waits for works that were taken before it.
//
// Around it: attention_backward_ends.cu.
//
// Defines: FORMAT (BF16 | FP16), D_CHUNKS (d in chunks of 64: 1, 2), N_OUT (64 | 128), STAGES, QUERIES (64 | 128), DROPOUT
// (0 | 1), BIAS (0 | 1), LENGTHS (0 | 1), PACKED (0 | 1), HEADS_APART (0 | 1; attention_backward_scheduler.cuh), AMAX
// (0 | 1; attention_amax.cuh).
#include "attention_backward_softmax.cuh"
#include "attention_backward_scheduler.cuh"
#include "attention_amax.cuh"
#include "ptx/bulk.cuh"
#include "ptx/grid.cuh"
#include "ptx/stmatrix.cuh"

using namespace twin;

#ifdef AMAX
constexpr bool kAmax = true;
#define TWIN_AMAX , unsigned* amax_word
#define TWIN_AMAX_WORD amax_word
#else
constexpr bool kAmax = false;
#define TWIN_AMAX
#define TWIN_AMAX_WORD nullptr
#endif

struct Config : BackwardDefaults {
    using Format = FORMAT;
    static constexpr bool kDropout = DROPOUT, kBias = BIAS, kLengths = LENGTHS, kPacked = PACKED;
    static constexpr bool kHeadsApart = HEADS_APART;
    static constexpr int kQueries = QUERIES, kChunks = D_CHUNKS, kChannels = N_OUT, kStages = STAGES;
};
using Format = Config::Format;
using Arguments = AttentionArguments<Config>;
using Limits = AttentionLimits<Config>;
using Scratch = BackwardScratch<Config>;
using Work = BackwardWork<Config>;
using Pairs = BackwardPairs<Config>;

constexpr int kQueries = Config::kQueries, kChunks = Config::kChunks, kStages = Config::kStages;
constexpr int kWords = BackwardTile<Config>::kWords, kScores = BackwardTile<Config>::kScores;
constexpr int kAcc = Config::kChannels / 2;
constexpr int kKeyChunk = kTileRows * 128;  // bytes of 128 keys and 64 channels, or 64 queries
constexpr int kChunk = kQueries * 128;
constexpr int kTiles = kWords > 1 ? 1 : 2;  // of dq, in shared memory
constexpr int kAdders = kTiles;             // warps that add dq to global memory, a tile in turn

struct __align__(1024) Shared {
    unsigned char k[kChunks * kKeyChunk], v[kChunks * kKeyChunk];
    unsigned char q[kStages][kChunks * kChunk], grad[kStages][kChunks * kChunk];
    unsigned char ds[2][kWords * kKeyChunk];
    float dq[kTiles][2 * kPiece];
    float base[kStages][kQueries], inv[kStages][kQueries], dots[kStages][kQueries];
    Mailbox keys_box, q_box[kStages], grad_box[kStages], ds_box[2], dq_box[kTiles], work_box[2];
    Work work[2];
};
static_assert(sizeof(Shared) <= 232448, "a block has at most 227 KB of shared memory");

__device__ __forceinline__ void produce(Shared& shared, const CUtensorMap* q, const CUtensorMap* k,
                                        const CUtensorMap* v, const CUtensorMap* grad, const Arguments& a,
                                        const Scratch& scratch, int padded) {
    Stage<kStages> stage;
    Stage<2> works;
    Stage<1> keys;
    for (;; works.advance(), keys.advance()) {
        shared.work_box[works.index].wait_empty(works.parity);
        const Work work = shared.work[works.index] = work_of(a, scratch, atomicAdd(scratch.ticket, 1));
        mbarrier_arrive(shared_address(&shared.work_box[works.index].full));
        if (work.key_head < 0) return;
        const Limits& limits = limits_of(a, shared.work[works.index]);  // read from there each time: registers are few
        const auto load_keys = [&] {
            const unsigned keys_full = shared_address(&shared.keys_box.full);
            const int chunks = Config::kLengths && !work.queries.any() ? 0 : kChunks;
            shared.keys_box.wait_empty(keys.parity);
            mbarrier_arrive_expect_tx(keys_full, chunks * 2 * kKeyChunk);
            for (int c = 0; c < chunks; c++) {
                load_chunk<Config>(shared_address(shared.k) + c * kKeyChunk, k, keys_full, 64 * c,
                                   work.first + kv_start(limits), work.key_head, work.batch);
                load_chunk<Config>(shared_address(shared.v) + c * kKeyChunk, v, keys_full, 64 * c,
                                   work.first + kv_start(limits), work.key_head, work.batch);
            }
        };
        bool has_keys = false;
        for (int n = head_from(work); n < head_to(work, a.group); n++) {
            const int head = work.key_head * a.group + n;
            for (int row = work.queries.from; row < work.queries.to; row += kQueries, stage.advance()) {
                const long long at = static_cast<long long>(work.batch * a.heads + head) * padded + row;
                const int s = stage.index;
                shared.q_box[s].wait_empty(stage.parity);
                const unsigned q_full = shared_address(&shared.q_box[s].full);
                mbarrier_arrive_expect_tx(q_full, kChunks * kChunk + 8 * kQueries);
                for (int c = 0; c < kChunks; c++)
                    load_chunk<Config>(shared_address(shared.q[s]) + c * kChunk, q, q_full, 64 * c,
                                       row + q_start(limits), head, work.batch);
                bulk_load(shared_address(shared.base[s]), scratch.base + at, 4 * kQueries, q_full);
                bulk_load(shared_address(shared.inv[s]), scratch.inv + at, 4 * kQueries, q_full);
                shared.grad_box[s].wait_empty(stage.parity);
                const unsigned grad_full = shared_address(&shared.grad_box[s].full);
                mbarrier_arrive_expect_tx(grad_full, kChunks * kChunk + 4 * kQueries);
                for (int c = 0; c < kChunks; c++)
                    load_chunk<Config>(shared_address(shared.grad[s]) + c * kChunk, grad, grad_full, 64 * c,
                                       row + q_start(limits), head, work.batch);
                bulk_load(shared_address(shared.dots[s]), scratch.dots + at, 4 * kQueries, grad_full);
                if (!has_keys) load_keys(), has_keys = true;  // after the first queries: their place is free earlier
            }
        }
        if (!has_keys) load_keys();
    }
}

// One thread for each place of dq in shared memory. What is there goes to global memory after that of the later key
// blocks. While one thread waits for its turn, or for its addition to be seen, the other one works.
__device__ __forceinline__ void add_dq(Shared& shared, const Arguments& a, const Scratch& scratch, int padded,
                                       int place) {
    Mailbox& dq_box = shared.dq_box[place];
    const unsigned source = shared_address(shared.dq[place]);
    unsigned parity = 0;
    int count = 0;  // of tiles
    for (Stage<2> works;; works.advance()) {
        Mailbox& box = shared.work_box[works.index];
        box.wait_full(works.parity);
        const Work work = shared.work[works.index];
        mbarrier_arrive(shared_address(&box.empty));
        if (work.key_head < 0) return;
        for (int n = head_from(work); n < head_to(work, a.group); n++) {
            const long long head = work.batch * a.heads + work.key_head * a.group + n;
            for (int row = work.queries.from; row < work.queries.to; row += kQueries, count++) {
                if (count % kAdders != place) continue;
                const long long tile = head * (padded / kQueries) + row / kQueries;
                const unsigned turn = visited(limits_of(a, work), row & -kTileRows).to - 1 - work.first / kTileRows;
                float* to = scratch.dq + tile * (2 * kPiece);
                if (turn > 0) {
                    wait_for_turn(scratch.turns + tile, turn);
                    fence_proxy_async_all();
                }
                dq_box.wait_full(parity);
                if (turn > 0)
                    bulk_add(to, source, 8 * kPiece);
                else
                    bulk_store(to, source, 8 * kPiece);
                bulk_commit();
                bulk_wait_read<0>();
                mbarrier_arrive(shared_address(&dq_box.empty));
                bulk_wait<0>();
                fence_proxy_async_all();
                pass_turn(scratch.turns + tile, turn + 1);
                parity ^= 1;
            }
        }
    }
}

// acc += A(values, 64 keys x queries) B, B of the tile's queries in shared memory.
__device__ __forceinline__ void accumulate(float (&acc)[kAcc], const unsigned (&values)[kScores / 8][4],
                                           unsigned tile) {
#pragma unroll
    for (int step = 0; step < kScores / 8; step++)
        wgmma_k16<Format, 1>(acc, values[step], along_rows(tile, kChunk, step), 1);
}

// Issue Sᵀ = k qᵀ, or dPᵀ = v gradᵀ: `keys` are the warpgroup's rows of one, `queries` a stage of the other.
__device__ __forceinline__ void score(float (&acc)[kScores], unsigned keys, unsigned queries) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4 * kChunks; step++)
        wgmma_k16<Format, 0, 0>(acc, along_d(keys, kKeyChunk, step), along_d(queries, kChunk, step), step > 0);
    wgmma_commit();
}

struct Consumer {
    Shared& shared;
    const Arguments& a;
    const Scratch& scratch;
    int warpgroup;
    unsigned keys, values;  // this warpgroup's rows of k and of v, in shared memory
    Stage<kStages> stage;
    Stage<2> ds;
    Stage<kTiles> dq;
    float dk[kAcc], dv[kAcc];
    OwnLimits<Config> of_work;

    __device__ __forceinline__ const Limits& limits() const { return limits_of(a, of_work); }

    // Issue this warpgroup's half of the previous tile's dq = dS k: 64 channels, or 64 queries.
    __device__ __forceinline__ void multiply_dq(float (&acc)[kPiece / 128]) {
        const unsigned rows = shared_address(shared.ds[ds.index]) + (kWords > 1 ? warpgroup * kKeyChunk : 0);
        const unsigned k = shared_address(shared.k) + (kWords > 1 ? 0 : warpgroup * kKeyChunk);
        shared.ds_box[ds.index].wait_full(ds.parity);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kTileRows / 16; step++)
            wgmma_k16<Format, 1, 1>(acc, along_rows(rows, kKeyChunk, step), along_rows(k, kKeyChunk, step), step > 0);
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

    // Clear the queries of the next tile that another entry has, from this one on.
    __device__ __forceinline__ void clear_queries(int from) {
        const int place = stage.index;
        shared.q_box[place].wait_full(stage.parity);
        shared.grad_box[place].wait_full(stage.parity);
        clear_rows<kChunks>(shared.q[place], kChunk, from, kQueries, warpgroup);
        clear_rows<kChunks>(shared.grad[place], kChunk, from, kQueries, warpgroup);
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
            if (some_hidden) hide(at, a, limits());
            if constexpr (Config::kDropout) read_kept(at, a, scratch);
            wgmma_wait<1>();
            wgmma_hold(s);
            weigh(s, a, limits(), at, some_hidden, shared.base[place] + column, shared.inv[place] + column);
            wgmma_wait<0>();
            wgmma_hold(acc);
            send_dq(acc);
        } else {
            if (some_hidden) hide(at, a, limits());
            if constexpr (Config::kDropout) read_kept(at, a, scratch);
            wgmma_wait<0>();
            wgmma_hold(s);
            weigh(s, a, limits(), at, some_hidden, shared.base[place] + column, shared.inv[place] + column);
        }
        float dp[kScores];
        shared.grad_box[place].wait_full(stage.parity);
        score(dp, values, grad);
        unsigned weights[kScores / 8][4], gradients[kScores / 8][4];
        wgmma_wait<0>();
        wgmma_hold(dp);
        differentiate(dp, s, a, at, some_hidden, shared.dots[place] + column);
#pragma unroll
        for (int step = 0; step < kScores / 8; step++) {
            pack_operand<Format>(gradients[step], dp, step);
            pack_kept(weights[step], s, at, step);
        }
        wgmma_fence();
        accumulate(dv, weights, grad);
        wgmma_commit();
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

__device__ __forceinline__ void consume(Shared& shared, const Arguments& a, const Scratch& scratch,
                                        unsigned short* dk_out, unsigned short* dv_out, unsigned* amax_word,
                                        int warpgroup) {
    const unsigned keys = shared_address(shared.k) + warpgroup * (64 * 128);
    Consumer consumer{shared, a, scratch, warpgroup, keys, keys + static_cast<unsigned>(sizeof(shared.k))};
    Stage<1> keys_stage;
    for (Stage<2> works;; works.advance()) {
        shared.work_box[works.index].wait_full(works.parity);
        const Work work = shared.work[works.index];
        shared.work_box[works.index].arrive_empty();
        if (work.key_head < 0) return;
        const int row = work.first + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
        Pairs at{work.batch * a.heads + work.key_head * a.group + head_from(work), row, 0, {}, {}};
#pragma unroll
        for (int i = 0; i < kAcc; i++) consumer.dk[i] = consumer.dv[i] = 0.0f;
        if (head_from(work) > 0) take_over(consumer.dv, consumer.dk, a, scratch, work);
        shared.keys_box.wait_full(keys_stage.parity);
        keys_stage.advance();
        consumer.of_work.carry(limits_of(a, work));
        const Limits& limits = consumer.limits();
        if (Config::kPacked && work.queries.any() && work.first + kTileRows > limits.skv)
            clear_rows<kChunks>(shared.k, kKeyChunk, limits.skv - work.first, kTileRows, warpgroup);
        bool is_first = true;
        for (int n = head_from(work); n < head_to(work, a.group); n++, at.head++) {
            for (int first = work.queries.from; first < work.queries.to; first += kQueries) {
                at.query = first + threadIdx.x % 4 * 2;
                const bool some_hidden = a.mask != nullptr || first + kQueries > limits.sq ||
                                         work.first + kTileRows > key_limit(limits, first) ||
                                         work.first < key_from(limits, first + kQueries - 1);
                if (Config::kPacked && first + kQueries > limits.sq) consumer.clear_queries(limits.sq - first);
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
            shared.keys_box.arrive_empty();
            consumer.send_dq(acc);
        } else {
            shared.keys_box.arrive_empty();
        }
        if (head_to(work, a.group) < a.group) {
            hand_over(consumer.dv, consumer.dk, a, scratch, work);
        } else {
            const long long to = work.batch * a.out_b + work.key_head * a.out_h + (row + kv_start(limits)) * a.out_s;
            Amax<Format, kAmax> amax;
            store_rows<Format>(consumer.dv, a.kept, a.kept, dv_out + to, a.out_s, kv_written(a, limits) - row, a.d,
                               amax.also());
            store_rows<Format>(consumer.dk, a.scale, a.scale, dk_out + to, a.out_s, kv_written(a, limits) - row, a.d,
                               amax.also());
            amax.leave_of_warp(amax_word);
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_backward(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                       const __grid_constant__ CUtensorMap v, const __grid_constant__ CUtensorMap grad,
                       const __grid_constant__ Arguments a, const __grid_constant__ Scratch scratch, unsigned short* dk,
                       unsigned short* dv TWIN_AMAX) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        shared.keys_box.init(1, 4 * kWarpgroups);
        for (Mailbox& box : shared.q_box) box.init(1, 4 * kWarpgroups);
        for (Mailbox& box : shared.grad_box) box.init(1, 4 * kWarpgroups);
        for (Mailbox& box : shared.ds_box) box.init(4 * kWarpgroups, 4 * kWarpgroups);
        for (Mailbox& box : shared.dq_box) box.init(4 * kWarpgroups, 1);
        for (Mailbox& box : shared.work_box) box.init(1, 4 * kWarpgroups + kAdders);
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_grid_before();
    let_next_grid_start();
    const int padded = padded_queries(a);
    const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    if (warpgroup < kWarpgroups) {
        setmaxnreg_inc<232>();
        consume(shared, a, scratch, dk, dv, TWIN_AMAX_WORD, warpgroup);
    } else {  // the last warpgroup moves data
        setmaxnreg_dec<40>();
        const int warp = threadIdx.x / 32 - 4 * kWarpgroups;
        if (threadIdx.x % 32 != 0) return;
        if (warp == 0)
            produce(shared, &q, &k, &v, &grad, a, scratch, padded);
        else if (warp <= kAdders)
            add_dq(shared, a, scratch, padded, warp - 1);
    }
}
