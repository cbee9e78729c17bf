// What moves data in attention_backward_wide.cu: a block's shared memory, its works, the threads that load, and the one
// that adds dq to global memory.
#pragma once

#include "attention_cluster.cuh"
#include "attention_backward_workspace.cuh"
#include "ptx/bulk.cuh"
#include "ptx/turn.cuh"

namespace twin {

constexpr int kKeys = 64;           // of a block
constexpr int kRows = 64 * 128;     // bytes of 64 rows and 64 channels
constexpr int kMatrix = 4 * kRows;  // and of all channels
constexpr int kQueries = 64;        // of a tile

// What a block does at a time: 64 keys from `first`; of each of `group` heads, the queries of a range. Without a head: it
// is done.
struct WorkPlace {
    int batch, key_head, first;
    Range queries;
};

template <class Config>
struct WideWork : WorkPlace, OwnLimits<Config> {};

template <class Config_>
struct __align__(1024) WideShared {
    using Config = Config_;
    static_assert(Config::kQueries == kQueries && Config::kChannels == 256, "what the tiles are made for");
    unsigned char k[kMatrix], v[kMatrix];
    unsigned char others[2 * kRows];  // of the other block's keys the channels of dq
    unsigned char q[2][kMatrix], grad[kMatrix];
    unsigned char p[kRows], ds[2 * kRows];  // [64 keys][64 queries], [128 keys][64 queries]
    float dq[kPiece];
    float base[2][kQueries], inv[2][kQueries], dots[kQueries];
    Mailbox keys_box, q_box[2], grad_box, p_box, ds_box, dq_box, work_box[2];
    Mailbox ticket_box;  // full: the second block's; empty: the first one's
    WideWork<Config> work[2];
    int ticket;
};

// The work of a rank, for this block of the cluster. Heads are taken `together` at a time, their last keys first.
template <class Config>
__device__ __forceinline__ WideWork<Config> work_of(const AttentionArguments<Config>& a, int rank, int works,
                                                    int block) {
    const int key_blocks = (a.skv + kTileRows - 1) / kTileRows, key_heads = a.heads / a.group;
    const int all_heads = a.batches * key_heads;
    if (rank >= works) return {{0, -1, 0, {0, 0}}};
    const int before = rank / (a.together * key_blocks) * a.together;
    const int heads = min(a.together, all_heads - before), place = rank - before * key_blocks;
    const int head = before + place % heads;
    const int first = (key_blocks - 1 - place / heads) * kTileRows;
    const AttentionLimits<Config>& limits = limits_of(a, head / key_heads);
    WideWork<Config> work{{head / key_heads, head % key_heads, first + kKeys * block, visitors(limits, first)}};
    work.carry(limits);
    return work;
}

// 64 rows and 64 channels at a time, from channel `x`.
template <class Config>
__device__ __forceinline__ void load(unsigned char* to, const CUtensorMap* map, unsigned full, int chunks, int x,
                                     int row, int head, int batch) {
    for (int c = 0; c < chunks; c++)
        load_chunk<Config>(shared_address(to) + c * kRows, map, full, x + 64 * c, row, head, batch);
}

// One thread takes works, and loads their queries.
template <class Config>
__device__ __forceinline__ void produce_queries(WideShared<Config>& shared, const CUtensorMap* q,
                                                const CUtensorMap* grad, const AttentionArguments<Config>& a,
                                                const CommonScratch& scratch, int padded, int block) {
    Stage<2> works, queries;
    Stage<1> grads, tickets;
    for (;; works.advance(), tickets.advance()) {
        const int ticket = take_ticket(shared.ticket_box, shared.ticket, scratch.ticket, tickets.parity, block);
        shared.work_box[works.index].wait_empty(works.parity);
        const WideWork<Config> work = shared.work[works.index] = work_of(a, ticket, scratch.works, block);
        mbarrier_arrive(shared_address(&shared.work_box[works.index].full));
        if (work.key_head < 0) return;
        const AttentionLimits<Config>& limits =
            limits_of(a, shared.work[works.index]);  // read from there each time: registers are few
        for (int n = 0; n < a.group; n++) {
            const int head = work.key_head * a.group + n;
            for (int row = work.queries.from; row < work.queries.to; row += kQueries) {
                const long long at = static_cast<long long>(work.batch * a.heads + head) * padded + row;
                const int s = queries.index;
                const unsigned q_full = shared_address(&shared.q_box[s].full);
                shared.q_box[s].wait_empty(queries.parity);
                mbarrier_arrive_expect_tx(q_full, kMatrix + 8 * kQueries);
                load_for_both(shared.q[s], q, q_full, 4, kRows, 0, row + q_start(limits), head,
                              Config::kPacked ? 0 : work.batch, block);
                bulk_load(shared_address(shared.base[s]), scratch.base + at, 4 * kQueries, q_full);
                bulk_load(shared_address(shared.inv[s]), scratch.inv + at, 4 * kQueries, q_full);
                queries.advance();
                const unsigned grad_full = shared_address(&shared.grad_box.full);
                shared.grad_box.wait_empty(grads.parity);
                mbarrier_arrive_expect_tx(grad_full, kMatrix + 4 * kQueries);
                load_for_both(shared.grad, grad, grad_full, 4, kRows, 0, row + q_start(limits), head,
                              Config::kPacked ? 0 : work.batch, block);
                bulk_load(shared_address(shared.dots), scratch.dots + at, 4 * kQueries, grad_full);
                grads.advance();
            }
        }
    }
}

// One thread loads their keys.
template <class Config>
__device__ __forceinline__ void produce_keys(WideShared<Config>& shared, const CUtensorMap* k, const CUtensorMap* v,
                                             const AttentionArguments<Config>& a, int block) {
    Stage<1> keys;
    for (Stage<2> works;; works.advance()) {
        Mailbox& box = shared.work_box[works.index];
        box.wait_full(works.parity);
        const WideWork<Config> work = shared.work[works.index];
        mbarrier_arrive(shared_address(&box.empty));
        if (work.key_head < 0) return;
        const unsigned full = shared_address(&shared.keys_box.full);
        shared.keys_box.wait_empty(keys.parity);
        mbarrier_arrive_expect_tx(full, 2 * kMatrix + 2 * kRows);
        const int start = kv_start(limits_of(a, work));
        load<Config>(shared.k, k, full, 4, 0, work.first + start, work.key_head, work.batch);
        load<Config>(shared.v, v, full, 4, 0, work.first + start, work.key_head, work.batch);
        load<Config>(shared.others, k, full, 2, 128 * block, (work.first ^ kKeys) + start, work.key_head, work.batch);
        keys.advance();
    }
}

// What is in shared.dq goes to global memory after that of the later key blocks.
template <class Config>
__device__ __forceinline__ void add_dq(WideShared<Config>& shared, const AttentionArguments<Config>& a,
                                       const CommonScratch& scratch, int padded, int block) {
    const unsigned source = shared_address(shared.dq);
    unsigned parity = 0;
    for (Stage<2> works;; works.advance()) {
        Mailbox& box = shared.work_box[works.index];
        box.wait_full(works.parity);
        const WideWork<Config> work = shared.work[works.index];
        mbarrier_arrive(shared_address(&box.empty));
        if (work.key_head < 0) return;
        for (int n = 0; n < a.group; n++) {
            const long long head = work.batch * a.heads + work.key_head * a.group + n;
            for (int row = work.queries.from; row < work.queries.to; row += kQueries) {
                const long long tile =
                    (head * (padded / kQueries) + row / kQueries) * BackwardTile<Config>::kHalves + block;
                const unsigned turn = visited(limits_of(a, work), row & -kTileRows).to - 1 - work.first / kTileRows;
                float* to = scratch.dq + tile * (2 * kPiece);
                if (turn > 0) {
                    wait_for_turn(scratch.turns + tile, turn);
                    fence_proxy_async_all();
                }
                for (int piece = 0; piece < 2; piece++, to += kPiece, parity ^= 1) {
                    shared.dq_box.wait_full(parity);
                    if (turn > 0)
                        bulk_add(to, source, 4 * kPiece);
                    else
                        bulk_store(to, source, 4 * kPiece);
                    bulk_commit();
                    bulk_wait_read<0>();
                    mbarrier_arrive(shared_address(&shared.dq_box.empty));
                }
                bulk_wait<0>();
                fence_proxy_async_all();
                pass_turn(scratch.turns + tile, turn + 1);
            }
        }
    }
}

}  // namespace twin
