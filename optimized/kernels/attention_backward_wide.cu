// Attention backward, heads of more than 128 channels. Definition, order and rounding points:
// reference/ops/attention_backward.py.
//
// A cluster of two blocks takes 128 keys of one head, 64 for each, and streams 64 queries at a time past them. dv and dk
// of 64 keys and 256 channels fill one warpgroup's registers each, so a block's two consumer warpgroups have a result
// each, and both compute the scores (the GEMMs of a tile, 64 keys and 64 queries, six in a block):
//
//     dv, dq     Sᵀ = k qᵀ                     dv += Pᵀ grad     dq = dS k of the tile before, 128 of the channels
//     dk         Sᵀ = k qᵀ     dPᵀ = v gradᵀ   dk += dSᵀ q
//
// P and dS are operands just as they lie in registers. dq sums over all 128 keys: each block gives its half of dS to the
// other, and computes one half of dq's channels. dq leaves through a mailbox to a warp that adds it to global memory when
// its turn has come, as in attention_backward.cu; each half of the channels has its turns.
//
// Clusters stay and take works by tickets, a head's last keys first. So a work only ever waits for works that were taken
// before it. The first block takes the ticket and tells the other.
//
// Around it: attention_backward_ends.cu.
//
// Defines: FORMAT (BF16 | FP16), N_OUT (256), QUERIES (64), DROPOUT (0 | 1), BIAS (0 | 1).
#include "attention_pairs.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/store_async.cuh"
#include "ptx/turn.cuh"

using namespace twin;

constexpr int kKeys = 64;         // of a block
constexpr int kRows = 64 * 128;   // bytes of 64 rows and 64 channels
constexpr int kMatrix = 4 * kRows;  // and of all channels
static_assert(QUERIES == 64 && N_OUT == 256, "what the tiles are made for");

// What a block does at a time: 64 keys from `first`; of each of `group` heads, the queries of a range. Without a head: it
// is done.
struct Work {
    int batch, key_head, first;
    Range queries;
};

struct __align__(1024) Shared {
    unsigned char k[kMatrix], v[kMatrix];
    unsigned char others[2 * kRows];  // of the other block's keys the channels of dq
    unsigned char q[2][kMatrix], grad[kMatrix];
    unsigned char ds[2 * kRows];      // [128 keys][64 queries]
    float dq[2 * kPiece];
    float base[2][QUERIES], inv[2][QUERIES], dots[QUERIES];
    Mailbox keys_box, q_box[2], grad_box, ds_box, dq_box, work_box[2];
    Mailbox ticket_box;  // full: the second block's; empty: the first one's
    Work work[2];
    int ticket;
};
static_assert(sizeof(Shared) <= 226 * 1024, "what optimized/ops/attention_backward.py asks for");

// The work of a rank, for this block of the cluster. Heads are taken `together` at a time, their last keys first.
__device__ __forceinline__ Work work_of(const Arguments& a, int rank, int works, int block) {
    const int key_blocks = (a.skv + kTileRows - 1) / kTileRows, key_heads = a.heads / a.group;
    const int all_heads = a.batches * key_heads;
    if (rank >= works) return {0, -1, 0, {0, 0}};
    const int before = rank / (a.together * key_blocks) * a.together;
    const int heads = min(a.together, all_heads - before), place = rank - before * key_blocks;
    const int head = before + place % heads;
    const int first = (key_blocks - 1 - place / heads) * kTileRows;
    return {head / key_heads, head % key_heads, first + kKeys * block, visitors(a, first)};
}

// The next ticket, in both blocks of the cluster.
__device__ __forceinline__ int take_ticket(Shared& shared, const Scratch& scratch, unsigned parity, int block) {
    const unsigned full = shared_address(&shared.ticket_box.full), empty = shared_address(&shared.ticket_box.empty);
    if (block == 0) {
        const int ticket = atomicAdd(scratch.ticket, 1);
        mbarrier_wait(empty, parity ^ 1);
        store_async(map_to_rank(shared_address(&shared.ticket), 1), __int_as_float(ticket), map_to_rank(full, 1));
        return ticket;
    }
    mbarrier_arrive_expect_tx(full, 4);
    mbarrier_wait(full, parity);
    const int ticket = *static_cast<volatile int*>(&shared.ticket);
    mbarrier_arrive_cluster(map_to_rank(empty, 0));
    return ticket;
}

// 64 rows and 64 channels at a time, from channel `x`.
__device__ __forceinline__ void load(unsigned char* to, const CUtensorMap* map, unsigned full, int chunks, int x, int row,
                                     int head, int batch) {
    for (int c = 0; c < chunks; c++) load_chunk(shared_address(to) + c * kRows, map, full, x + 64 * c, row, head, batch);
}

// One thread takes works, and loads their queries.
__device__ __forceinline__ void produce_queries(Shared& shared, const CUtensorMap* q, const CUtensorMap* grad,
                                                const Arguments& a, const Scratch& scratch, int padded, int block) {
    Stage<2> works, queries;
    Stage<1> grads, tickets;
    for (;; works.advance(), tickets.advance()) {
        const int ticket = take_ticket(shared, scratch, tickets.parity, block);
        shared.work_box[works.index].wait_empty(works.parity);
        const Work work = shared.work[works.index] = work_of(a, ticket, scratch.works, block);
        mbarrier_arrive(shared_address(&shared.work_box[works.index].full));
        if (work.key_head < 0) return;
        for (int n = 0; n < a.group; n++) {
            const int head = work.key_head * a.group + n;
            for (int row = work.queries.from; row < work.queries.to; row += QUERIES) {
                const long long at = static_cast<long long>(work.batch * a.heads + head) * padded + row;
                const int s = queries.index;
                const unsigned q_full = shared_address(&shared.q_box[s].full);
                shared.q_box[s].wait_empty(queries.parity);
                mbarrier_arrive_expect_tx(q_full, kMatrix + 8 * QUERIES);
                load(shared.q[s], q, q_full, 4, 0, row, head, work.batch);
                bulk_load(shared_address(shared.base[s]), scratch.base + at, 4 * QUERIES, q_full);
                bulk_load(shared_address(shared.inv[s]), scratch.inv + at, 4 * QUERIES, q_full);
                queries.advance();
                const unsigned grad_full = shared_address(&shared.grad_box.full);
                shared.grad_box.wait_empty(grads.parity);
                mbarrier_arrive_expect_tx(grad_full, kMatrix + 4 * QUERIES);
                load(shared.grad, grad, grad_full, 4, 0, row, head, work.batch);
                bulk_load(shared_address(shared.dots), scratch.dots + at, 4 * QUERIES, grad_full);
                grads.advance();
            }
        }
    }
}

// One thread loads their keys.
__device__ __forceinline__ void produce_keys(Shared& shared, const CUtensorMap* k, const CUtensorMap* v, int block) {
    Stage<1> keys;
    for (Stage<2> works;; works.advance()) {
        Mailbox& box = shared.work_box[works.index];
        box.wait_full(works.parity);
        const Work work = shared.work[works.index];
        mbarrier_arrive(shared_address(&box.empty));
        if (work.key_head < 0) return;
        if (!work.queries.any()) continue;
        const unsigned full = shared_address(&shared.keys_box.full);
        shared.keys_box.wait_empty(keys.parity);
        mbarrier_arrive_expect_tx(full, 2 * kMatrix + 2 * kRows);
        load(shared.k, k, full, 4, 0, work.first, work.key_head, work.batch);
        load(shared.v, v, full, 4, 0, work.first, work.key_head, work.batch);
        load(shared.others, k, full, 2, 128 * block, work.first ^ kKeys, work.key_head, work.batch);
        keys.advance();
    }
}

// What is in shared.dq goes to global memory after that of the later key blocks.
__device__ __forceinline__ void add_dq(Shared& shared, const Arguments& a, const Scratch& scratch, int padded, int block) {
    const unsigned source = shared_address(shared.dq);
    unsigned parity = 0;
    for (Stage<2> works;; works.advance()) {
        Mailbox& box = shared.work_box[works.index];
        box.wait_full(works.parity);
        const Work work = shared.work[works.index];
        mbarrier_arrive(shared_address(&box.empty));
        if (work.key_head < 0) return;
        for (int n = 0; n < a.group; n++) {
            const long long head = work.batch * a.heads + work.key_head * a.group + n;
            for (int row = work.queries.from; row < work.queries.to; row += QUERIES, parity ^= 1) {
                const long long tile = (head * (padded / QUERIES) + row / QUERIES) * kHalves + block;
                const unsigned turn = visited(a, row & -kTileRows).to - 1 - work.first / kTileRows;
                float* to = scratch.dq + tile * (2 * kPiece);
                if (turn > 0) {
                    wait_for_turn(scratch.turns + tile, turn);
                    fence_proxy_async_all();
                }
                shared.dq_box.wait_full(parity);
                if (turn > 0)
                    bulk_add(to, source, 8 * kPiece);
                else
                    bulk_store(to, source, 8 * kPiece);
                bulk_commit();
                bulk_wait_read<0>();
                mbarrier_arrive(shared_address(&shared.dq_box.empty));
                bulk_wait<0>();
                fence_proxy_async_all();
                pass_turn(scratch.turns + tile, turn + 1);
            }
        }
    }
}

// Issue Sᵀ = k qᵀ, or dPᵀ = v gradᵀ.
__device__ __forceinline__ void score(float (&acc)[kScores], unsigned keys, unsigned queries) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 16; step++)
        wgmma_k16<FORMAT, 0, 0>(acc, along_d(keys, kRows, step), along_d(queries, kRows, step), step > 0);
    wgmma_commit();
}

// Issue acc += A(values, 64 keys x queries) B, B of the tile's queries in shared memory.
__device__ __forceinline__ void accumulate(float (&acc)[N_OUT / 2], const unsigned (&values)[4][4], unsigned tile) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma_k16<FORMAT, 1>(acc, values[step], along_rows(tile, kRows, step), 1);
    wgmma_commit();
}

// A warpgroup's sum, over the queries, and where it stands.
struct Consumer {
    Shared& shared;
    const Arguments& a;
    const Scratch& scratch;
    int block;
    Stage<2> queries;
    Stage<1> grads, ds, dq;
    float sum[N_OUT / 2];

    // Wait for the scores, which become weights.
    template <int kPending>
    __device__ __forceinline__ void finish_scores(float (&s)[kScores], Pairs& at, bool some_hidden) {
        const int column = 2 * (threadIdx.x % 4);
        if (some_hidden) hide(at, a);
        if constexpr (DROPOUT) read_kept(at, a, scratch);
        wgmma_wait<kPending>();
        wgmma_hold(s);
        weigh(s, a, at, some_hidden, shared.base[queries.index] + column, shared.inv[queries.index] + column);
    }

    // Issue the previous tile's dq = dS k, of half the channels.
    __device__ __forceinline__ void multiply_dq(float (&acc)[kPiece / 64]) {
        const unsigned own = shared_address(shared.k) + block * (2 * kRows), others = shared_address(shared.others);
        const unsigned keys[2] = {block == 0 ? own : others, block == 0 ? others : own};
        shared.ds_box.wait_full(ds.parity);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kTileRows / 16; step++)
            wgmma_k16<FORMAT, 1, 1>(acc, along_rows(shared_address(shared.ds), 2 * kRows, step),
                                    along_rows(keys[step / 4], kRows, step % 4), step > 0);
        wgmma_commit();
    }

    // Give the previous tile's dq, which has been waited for, to the warp that adds it.
    __device__ __forceinline__ void send_dq(const float (&acc)[kPiece / 64]) {
        shared.ds_box.arrive_empty();
        if (threadIdx.x % 32 == 0) mbarrier_arrive_cluster(map_to_rank(shared_address(&shared.ds_box.empty), block ^ 1));
        shared.dq_box.wait_empty(dq.parity);
        float4* to = reinterpret_cast<float4*>(shared.dq) + threadIdx.x % 128;
#pragma unroll
        for (int j = 0; j < kPiece / 256; j++)
            to[128 * j] = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
        fence_proxy_async();
        shared.dq_box.arrive_full();
        ds.advance(), dq.advance();
    }

    // One tile's share of dv.
    __device__ __forceinline__ void add_to_dv(Pairs& at, bool some_hidden) {
        float s[kScores];
        shared.q_box[queries.index].wait_full(queries.parity);
        score(s, shared_address(shared.k), shared_address(shared.q[queries.index]));
        finish_scores<0>(s, at, some_hidden);
        shared.q_box[queries.index].arrive_empty();
        unsigned weights[4][4];
#pragma unroll
        for (int step = 0; step < 4; step++) pack_kept(weights[step], s, at, step);
        shared.grad_box.wait_full(grads.parity);
        accumulate(sum, weights, shared_address(shared.grad));
        wgmma_wait<0>();
        wgmma_hold(sum);
        shared.grad_box.arrive_empty();
    }

    // The previous tile's dq.
    __device__ __forceinline__ void finish_dq() {
        float acc[kPiece / 64];
        multiply_dq(acc);
        wgmma_wait<0>();
        wgmma_hold(acc);
        send_dq(acc);
    }

    // dS of this block's keys, [keys][queries], into the shared memory of both blocks.
    __device__ __forceinline__ void share(const unsigned (&gradients)[4][4]) {
        const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
        const unsigned to = shared_address(shared.ds) + block * kRows, full = shared_address(&shared.ds_box.full);
        shared.ds_box.wait_empty(ds.parity);
#pragma unroll
        for (int step = 0; step < 4; step++)
            stmatrix_x4(to + row * 128 + ((2 * step + lane / 16 ^ row % 8) << 4), gradients[step]);
        fence_proxy_async();
        barrier_sync<128>(1);
        if (threadIdx.x % 128 == 0) {
            mbarrier_arrive_expect_tx(full, kRows);  // what the other block sends
            bulk_to_block(map_to_rank(to, block ^ 1), to, kRows, map_to_rank(full, block ^ 1));
        }
        ds.advance();
    }

    // One tile's share of dk.
    __device__ __forceinline__ void add_to_dk(Pairs& at, bool some_hidden) {
        const unsigned q = shared_address(shared.q[queries.index]);
        float s[kScores], dp[kScores];
        shared.q_box[queries.index].wait_full(queries.parity);
        score(s, shared_address(shared.k), q);
        shared.grad_box.wait_full(grads.parity);
        score(dp, shared_address(shared.v), shared_address(shared.grad));
        finish_scores<1>(s, at, some_hidden);
        wgmma_wait<0>();
        wgmma_hold(dp);
        differentiate(dp, s, a, at, some_hidden, shared.dots + 2 * (threadIdx.x % 4));
        shared.grad_box.arrive_empty();
        unsigned gradients[4][4];
#pragma unroll
        for (int step = 0; step < 4; step++) pack_operand<FORMAT>(gradients[step], dp, step);
        accumulate(sum, gradients, q);
        share(gradients);
        wgmma_wait<0>();
        wgmma_hold(sum);
        shared.q_box[queries.index].arrive_empty();
    }
};

// One warpgroup: dv and dq, or dk.
template <bool kDk>
__device__ __forceinline__ void consume(Shared& shared, const Arguments& a, const Scratch& scratch, unsigned short* out,
                                        int block) {
    Consumer consumer{shared, a, scratch, block};
    Stage<1> keys;
    for (Stage<2> works;; works.advance()) {
        shared.work_box[works.index].wait_full(works.parity);
        const Work work = shared.work[works.index];
        shared.work_box[works.index].arrive_empty();
        if (work.key_head < 0) return;
        const int row = work.first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        Pairs at{work.batch * a.heads + work.key_head * a.group, row, 0, {}, {}};
#pragma unroll
        for (int i = 0; i < N_OUT / 2; i++) consumer.sum[i] = 0.0f;
        if (work.queries.any()) {
            shared.keys_box.wait_full(keys.parity);
            keys.advance();
            bool is_first = true;
            for (int n = 0; n < a.group; n++, at.head++) {
                for (int first = work.queries.from; first < work.queries.to; first += QUERIES) {
                    at.query = first + threadIdx.x % 4 * 2;
                    const bool some_hidden = a.mask != nullptr || first + QUERIES > a.sq ||
                                             work.first + kKeys > key_limit(a, first) ||
                                             work.first < key_from(a, first + QUERIES - 1);
                    if constexpr (kDk) {
                        consumer.add_to_dk(at, some_hidden);
                    } else {
                        consumer.add_to_dv(at, some_hidden);
                        if (!is_first) consumer.finish_dq();
                        is_first = false;
                    }
                    consumer.queries.advance(), consumer.grads.advance();
                }
            }
            if constexpr (!kDk) consumer.finish_dq();
            shared.keys_box.arrive_empty();
        }
        const float scale = kDk ? a.scale : a.kept;
        store_rows(consumer.sum, scale, scale, out + work.batch * a.out_b + work.key_head * a.out_h + row * a.out_s,
                   a.out_s, a.skv - row, a.d);
    }
}

extern "C" __global__ __cluster_dims__(2, 1, 1) void __launch_bounds__(384, 1)
    attention_backward(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                       const __grid_constant__ CUtensorMap v, const __grid_constant__ CUtensorMap grad,
                       const __grid_constant__ Arguments a, const __grid_constant__ Scratch scratch,
                       unsigned short* dk, unsigned short* dv) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int block = static_cast<int>(cluster_rank());
    if (threadIdx.x == 0) {
        shared.keys_box.init(1, 4 * kWarpgroups);
        for (Mailbox& box : shared.q_box) box.init(1, 4 * kWarpgroups);
        shared.grad_box.init(1, 4 * kWarpgroups);
        shared.ds_box.init(1, 4 * 2);  // the warps of both blocks that compute dq
        shared.dq_box.init(4, 1);
        for (Mailbox& box : shared.work_box) box.init(1, 4 * kWarpgroups + 2);
        shared.ticket_box.init(1, 1);
        fence_mbarrier_init();
    }
    cluster_arrive();
    cluster_wait();
    const int padded = padded_queries(a);
    const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    if (warpgroup == kWarpgroups) {  // the last warpgroup moves data
        setmaxnreg_dec<40>();
        if (threadIdx.x == 256) produce_queries(shared, &q, &grad, a, scratch, padded, block);
        if (threadIdx.x == 288) produce_keys(shared, &k, &v, block);
        if (threadIdx.x == 320) add_dq(shared, a, scratch, padded, block);
    } else {
        setmaxnreg_inc<232>();
        if (warpgroup == 0)
            consume<false>(shared, a, scratch, dv, block);
        else
            consume<true>(shared, a, scratch, dk, block);
    }
    // A block must not end while the other may still write into its shared memory or arrive on a barrier there.
    cluster_arrive();
    cluster_wait();
}
