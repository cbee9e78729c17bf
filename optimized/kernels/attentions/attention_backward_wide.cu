// Attention backward, heads of more than 128 channels. Definition, order and rounding points:
// reference/ops/attentions/attention_backward.py.
//
// A cluster of two blocks takes 128 keys of one head, 64 for each, and streams 64 queries at a time past them. For each
// tile of 64 keys and 64 queries a block computes five GEMMs. dv and dk, of 256 channels, fill the registers of one
// consumer warpgroup each:
//
//     one     Sᵀ = k qᵀ     dPᵀ = v gradᵀ     dk += dSᵀ q       dS is an operand just as it lies in registers
//     other   dv += Pᵀ grad     dq = dS k, of 128 channels      P and dS go to it through shared memory
//
// Each block loads half of a tile's channels, into both. dq sums over all 128 keys: each block gives its half of dS to
// the other one, too, and computes dq of one half of the channels. It leaves through a mailbox, 64 channels at a time, to
// a warp that adds it to global memory when its turn has come, as in attention_backward.cu; each half of the channels has
// its turns.
//
// Clusters stay and take works by tickets, a head's last keys first. So a work only ever waits for works that were taken
// before it. The first block takes the ticket and tells the other.
//
// Around it: attention_backward_ends.cu.
//
// Defines: FORMAT (BF16 | FP16), N_OUT (256), QUERIES (64), DROPOUT (0 | 1), BIAS (0 | 1), LENGTHS (0 | 1), PACKED
// (0 | 1).
#include "attention_backward_wide_producer.cuh"
#include "attention_backward_softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/stmatrix.cuh"

using namespace twin;

struct Config : BackwardDefaults {
    using Format = FORMAT;
    static constexpr bool kDropout = DROPOUT, kBias = BIAS, kLengths = LENGTHS, kPacked = PACKED;
    static constexpr int kQueries = QUERIES, kChannels = N_OUT;
};
using Format = Config::Format;
using Arguments = AttentionArguments<Config>;
using Limits = AttentionLimits<Config>;
using Scratch = BackwardScratch<Config>;
using Work = WideWork<Config>;
using Shared = WideShared<Config>;
using Pairs = BackwardPairs<Config>;
static_assert(sizeof(Shared) <= 218 * 1024, "what optimized/ops/attentions/attention_backward.py asks for");

constexpr int kScores = BackwardTile<Config>::kScores, kAcc = Config::kChannels / 2;

// Issue Sᵀ = k qᵀ, or dPᵀ = v gradᵀ.
__device__ __forceinline__ void score(float (&acc)[kScores], unsigned keys, unsigned queries) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 16; step++)
        wgmma_k16<Format, 0, 0>(acc, along_d(keys, kRows, step), along_d(queries, kRows, step), step > 0);
    wgmma_commit();
}

// A thread's place in a tile [keys][64 queries]: 16 queries further it is this, with bits 5 and 6 of the address flipped.
__device__ __forceinline__ unsigned place_in(unsigned tile) {
    int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    asm volatile("" : "+r"(lane), "+r"(row));  // so that no place is kept from tile to tile
    return tile + row * 128 + ((lane / 16 ^ row % 8) << 4);
}

// The limits of a consumer's work, which stay in shared memory: registers are few.
template <class Config, bool = Config::kLengths>
struct LimitsInPlace {
    const OwnLimits<Config>* work;

    __device__ __forceinline__ auto& limits(const AttentionArguments<Config>&) const { return work->limits; }
    __device__ __forceinline__ void begin(const WideWork<Config>& next) { work = &next; }
};
template <class Config>
struct LimitsInPlace<Config, false> {
    __device__ __forceinline__ auto& limits(const AttentionArguments<Config>& a) const { return a; }
    __device__ __forceinline__ void begin(const WideWork<Config>&) {}
};

// The warpgroup that sums dv, and multiplies dq.
struct DvConsumer {
    Shared& shared;
    int block;
    Stage<1> tiles, dq;
    LimitsInPlace<Config> of_work;
    float dv[kAcc];

    // Issue dq = dS k, of half the channels.
    __device__ __forceinline__ void multiply_dq(float (&acc)[kPiece / 64]) {
        const unsigned own = shared_address(shared.k) + block * (2 * kRows), others = shared_address(shared.others);
        const unsigned keys[2] = {block == 0 ? own : others, block == 0 ? others : own};
        shared.ds_box.wait_full(tiles.parity);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kTileRows / 16; step++)
            wgmma_k16<Format, 1, 1>(acc, along_rows(shared_address(shared.ds), 2 * kRows, step),
                                    along_rows(keys[step / 4], kRows, step % 4), step > 0);
        wgmma_commit();
    }

    // Give dq, which has been waited for, to the warp that adds it.
    __device__ __forceinline__ void send_dq(const float (&acc)[kPiece / 64]) {
#pragma unroll
        for (int piece = 0; piece < 2; piece++, dq.advance()) {
            shared.dq_box.wait_empty(dq.parity);
            float4* to = reinterpret_cast<float4*>(shared.dq) + threadIdx.x % 128;
#pragma unroll
            for (int j = 0; j < kPiece / 512; j++) {
                const float* four = acc + kPiece / 128 * piece + 4 * j;
                to[128 * j] = make_float4(four[0], four[1], four[2], four[3]);
            }
            fence_proxy_async();
            shared.dq_box.arrive_full();
        }
    }

    // Of clear_rows, which takes the one after it; barrier 1 is the other warpgroup's.
    static constexpr int kBarrier = 1;

    // Keys of another entry become zeros, as dS is 0 there.
    __device__ __forceinline__ void clear_keys(const Arguments& a, const Work& work) {
        const int skv = limits_of(a, work).skv, rows = skv - work.first, others = skv - (work.first ^ kKeys);
        if (rows < kKeys) clear_rows<4>(shared.k, kRows, max(rows, 0), kKeys, kBarrier);
        if (others < kKeys) clear_rows<2>(shared.others, kRows, max(others, 0), kKeys, kBarrier);
    }

    __device__ __forceinline__ void tile(const Arguments& a, int query) {
        float acc[kPiece / 64];
        shared.grad_box.wait_full(tiles.parity);
        if constexpr (Config::kPacked) {
            const int rows = of_work.limits(a).sq - query;
            if (rows < kQueries) clear_rows<4>(shared.grad, kRows, rows, kQueries, kBarrier);
        }
        shared.p_box.wait_full(tiles.parity);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; step++)
            wgmma_k16<Format, 0, 1>(dv, along_d(shared_address(shared.p), kRows, step),
                                    along_rows(shared_address(shared.grad), kRows, step), 1);
        wgmma_commit();
        multiply_dq(acc);
        wgmma_wait<1>();
        wgmma_hold(dv);
        empty_for_both(shared.grad_box);
        shared.p_box.arrive_empty();
        wgmma_wait<0>();
        wgmma_hold(acc);
        empty_for_both(shared.ds_box);
        tiles.advance();
        send_dq(acc);
    }
};

// The warpgroup that sums dk.
struct DkConsumer {
    Shared& shared;
    const Arguments& a;
    const Scratch& scratch;
    int block;
    Stage<2> queries;
    Stage<1> tiles;
    LimitsInPlace<Config> of_work;
    float dk[kAcc];

    __device__ __forceinline__ const Limits& limits() const { return of_work.limits(a); }

    // Pᵀ, the weights that dropout keeps, into shared memory.
    __device__ __forceinline__ void give_weights(const float (&s)[kScores], const Pairs& at) {
        const unsigned to = place_in(shared_address(shared.p));
        shared.p_box.wait_empty(tiles.parity);
#pragma unroll
        for (int step = 0; step < 4; step++) {
            unsigned weights[4];
            pack_kept(weights, s, at, step);
            stmatrix_x4(to ^ step << 5, weights);
        }
        fence_proxy_async();
        shared.p_box.arrive_full();
    }

    // dSᵀ into the shared memory of both blocks.
    __device__ __forceinline__ void give_gradients(const unsigned (&gradients)[4][4]) {
        const unsigned half = shared_address(shared.ds) + block * kRows, full = shared_address(&shared.ds_box.full);
        const unsigned to = place_in(half);
        shared.ds_box.wait_empty(tiles.parity);
#pragma unroll
        for (int step = 0; step < 4; step++) stmatrix_x4(to ^ step << 5, gradients[step]);
        fence_proxy_async();
        barrier_sync<128>(1);
        if (threadIdx.x % 128 == 0) {
            mbarrier_arrive_expect_tx(full, kRows);  // what the other block sends
            bulk_to_block(map_to_rank(half, block ^ 1), half, kRows, map_to_rank(full, block ^ 1));
        }
    }

    __device__ __forceinline__ void tile(Pairs& at, bool some_hidden) {
        const int place = queries.index, column = 2 * (threadIdx.x % 4);
        const unsigned q = shared_address(shared.q[place]);
        // Opaque, or the compiler keeps what it derives from them in registers from tile to tile.
        asm volatile("" : "+r"(at.head), "+r"(at.key));
        float s[kScores], dp[kScores];
        shared.q_box[place].wait_full(queries.parity);
        if constexpr (Config::kPacked) {
            const int rows = limits().sq - (at.query - column);
            if (rows < kQueries) clear_rows<4>(shared.q[place], kRows, rows, kQueries, 2);
        }
        score(s, shared_address(shared.k), q);
        shared.grad_box.wait_full(tiles.parity);
        score(dp, shared_address(shared.v), shared_address(shared.grad));
        if (some_hidden) hide(at, a, limits());
        if constexpr (Config::kDropout) read_kept(at, a, scratch);
        wgmma_wait<1>();
        wgmma_hold(s);
        weigh(s, a, limits(), at, some_hidden, shared.base[place] + column, shared.inv[place] + column);
        give_weights(s, at);
        // Read again, or the compiler keeps each bit that the weights have asked for in a register.
        if constexpr (Config::kDropout) read_kept(at, a, scratch);
        wgmma_wait<0>();
        wgmma_hold(dp);
        differentiate(dp, s, a, at, some_hidden, shared.dots + column);
        empty_for_both(shared.grad_box);
        unsigned gradients[4][4];
#pragma unroll
        for (int step = 0; step < 4; step++) pack_operand<Format>(gradients[step], dp, step);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; step++) wgmma_k16<Format, 1>(dk, gradients[step], along_rows(q, kRows, step), 1);
        wgmma_commit();
        give_gradients(gradients);
        wgmma_wait<0>();
        wgmma_hold(dk);
        empty_for_both(shared.q_box[place]);
        queries.advance(), tiles.advance();
    }
};

// Calls `begin`, then `tile` with each tile's head and first query, and then `store` with the sum's place: for each work.
template <class Begin, class Tile, class Store>
__device__ __forceinline__ void consume(Shared& shared, const Arguments& a, float (&sum)[kAcc], const Begin& begin,
                                        const Tile& tile, const Store& store) {
    for (unsigned works = 0;; works++) {  // one number, as registers are few
        shared.work_box[works % 2].wait_full(works / 2 % 2);
        const Work& work = shared.work[works % 2];  // read where it is needed
        if (work.key_head < 0) return;
        const int row = work.first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < kAcc; i++) sum[i] = 0.0f;
        shared.keys_box.wait_full(works % 2);
        begin(work);
        Pairs at{work.batch * a.heads + work.key_head * a.group, row, 0, {}, {}};
        for (int n = 0; n < a.group; n++, at.head++)
            for (int first = work.queries.from; first < work.queries.to; first += kQueries) tile(at, work.first, first);
        shared.keys_box.arrive_empty();
        const Limits& limits = limits_of(a, work);
        store(work.batch * a.out_b + work.key_head * a.out_h + (row + kv_start(limits)) * a.out_s,
              kv_written(a, limits) - row);
        shared.work_box[works % 2].arrive_empty();
    }
}

extern "C" __global__ __cluster_dims__(2, 1, 1) void __launch_bounds__(384, 1)
    attention_backward(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                       const __grid_constant__ CUtensorMap v, const __grid_constant__ CUtensorMap grad,
                       const __grid_constant__ Arguments a, const __grid_constant__ Scratch scratch, unsigned short* dk,
                       unsigned short* dv) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int block = static_cast<int>(cluster_rank());
    if (threadIdx.x == 0) {
        shared.keys_box.init(1, 4 * kWarpgroups);
        for (Mailbox& box : shared.q_box) box.init(1, 4 * 2);  // the warps of both blocks
        shared.grad_box.init(1, 4 * kWarpgroups * 2);
        shared.ds_box.init(1, 4 * 2);
        shared.p_box.init(4, 4);
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
        if (threadIdx.x == 288) produce_keys(shared, &k, &v, a, block);
        if (threadIdx.x == 320) add_dq(shared, a, scratch, padded, block);
    } else {
        setmaxnreg_inc<232>();
        if (warpgroup == 0) {
            DvConsumer consumer{shared, block};
            const auto begin = [&](const Work& work) {
                consumer.of_work.begin(work);
                if constexpr (Config::kPacked) consumer.clear_keys(a, work);
            };
            consume(
                shared, a, consumer.dv, begin, [&](Pairs&, int, int query) { consumer.tile(a, query); },
                [&](long long to, int rows) {
                    store_rows<Format>(consumer.dv, a.kept, a.kept, dv + to, a.out_s, rows, a.d);
                });
        } else {
            DkConsumer consumer{shared, a, scratch, block};
            const auto tile = [&](Pairs& at, int key, int query) {
                at.query = query + threadIdx.x % 4 * 2;
                consumer.tile(at, a.mask != nullptr || query + kQueries > consumer.limits().sq ||
                                      key + kKeys > key_limit(consumer.limits(), query) ||
                                      key < key_from(consumer.limits(), query + kQueries - 1));
            };
            const auto begin = [&](const Work& work) { consumer.of_work.begin(work); };
            consume(shared, a, consumer.dk, begin, tile, [&](long long to, int rows) {
                store_rows<Format>(consumer.dk, a.scale, a.scale, dk + to, a.out_s, rows, a.d);
            });
        }
    }
    // A block must not end while the other may still write into its shared memory or arrive on a barrier there.
    cluster_arrive();
    cluster_wait();
}
