// Attention forward, heads of more than 128 channels.   out = softmax(q k^T scale) v, as attention.cu
//
// q [b, h, sq, d], k and v [b, hkv, skv, d] of bf16 or fp16 through tensor maps (any strides); out the same; m and
// inv fp32 [b, h, sq]. Definition, order and rounding points: reference/ops/attentions/attention.py.
//
// A tile is 128 queries of one head, a block of the definition: 64 for each of two consumer warpgroups, while producers
// keep keys and values coming. A warpgroup multiplies with 128 keys, weighs, and multiplies with their 256 channels of
// values: scores are computed once. O and the scores take 192 registers of a thread.
//
// Queries take 64 KB of shared memory. Keys and values pass through a ring of five parts of 32 KB, each the columns of d
// or the rows that a half of a product runs over, so that a part is free as soon as both warpgroups have passed it. When
// one warpgroup reads the last values and the other the next keys, one part is still ahead.
//
// The warpgroups take turns with the scores, so that one multiplies while the other weighs: weighing takes about half of
// the time of a warpgroup's products. Blocks stay and take tiles by tickets, as in attention.cu.
//
// Where no query has limits, so that all tiles of a head visit the same keys, a cluster of two blocks takes two tiles, and
// each block loads half of the keys and values for both.
//
// Defines: FORMAT (BF16 | FP16), CLUSTER (1 | 2; with lengths 1), DROPOUT (0 | 1), BIAS (0 | 1), SINK (0 | 1), LENGTHS
// (0 | 1), PACKED (0 | 1), PAGED (0 | 1), PLACED (0 | 1 | 2), SEGMENT (0 | keys of a segment).
#include "attention_cluster.cuh"
#include "attention_segments.cuh"
#include "ptx/grid.cuh"

#if CLUSTER > 1
#define TWIN_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define TWIN_CLUSTER
#endif

#ifndef PLACED
#define PLACED 0
#endif
#ifndef SEGMENT
#define SEGMENT 0
#endif

#if SEGMENT
#define TWIN_TOTALS , float* totals  // [blocks][kTotals][threads]
#else
#define TWIN_TOTALS
#endif

using namespace twin;

struct Config : AttentionDefaults {
    using Format = FORMAT;
    static constexpr int kPlaced = PLACED;
    static constexpr bool kDropout = DROPOUT, kBias = BIAS, kSink = SINK, kLengths = LENGTHS, kPacked = PACKED,
                          kPaged = PAGED;
    static constexpr int kCluster = CLUSTER;
};
using Format = Config::Format;
using Arguments = AttentionArguments<Config>;
using Limits = AttentionLimits<Config>;

constexpr int kCluster = Config::kCluster;
constexpr int kConsumers = 2;     // warpgroups
constexpr int kParts = 5;         // of keys and values, in shared memory
constexpr int kChannels = 256;    // of a tile; those beyond d are zeros
constexpr int kRows = 64 * 128;   // bytes of 64 rows and 64 channels
constexpr int kPart = 4 * kRows;  // of 128 keys and 128 channels, or of 64 values and all channels
#if SEGMENT
constexpr int kSegmentBlocks = SEGMENT / kTileRows;
static_assert(SEGMENT % kTileRows == 0, "a segment has whole blocks of keys");
#endif

// Queries from `first` of a head, and the blocks of keys that they visit. Without a head (-1), there is no tile.
struct Place {
    int first, batch, head;
    Range blocks;
};
struct Tile : Place, OwnLimits<Config> {};

struct __align__(1024) Shared {
    unsigned char q[kConsumers][4 * kRows];
    unsigned char parts[kParts][kPart];
    Mailbox q_box[kConsumers], part_box[kParts], tile_box[2];
    Mailbox turn;  // empty: the first warpgroup's turn; full: the second one's
    Mailbox ticket_box;
    Tile tile[2];  // what the consumers do next
    int ticket;
};
static_assert(sizeof(Shared) <= 232448, "a block has at most 227 KB of shared memory");

// The tile of a rank, for this block of a cluster. Heads are taken `together` at a time, so that their keys stay in L2,
// and of those the last queries first, which have most to do.
__device__ __forceinline__ Tile tile_of(const Arguments& a, int rank, int block) {
    constexpr int kQueries = kCluster * kTileRows;
    const int query_blocks = (a.sq + kQueries - 1) / kQueries, all_heads = a.batches * a.heads;
    if (rank >= all_heads * query_blocks) return {{0, 0, -1, {0, 0}}};
    const int before = rank / (a.together * query_blocks) * a.together;
    const int heads = min(a.together, all_heads - before), place = rank - before * query_blocks;
    const int head = before + place % heads, first = (query_blocks - 1 - place / heads) * kQueries;
    const Limits& limits = limits_of(a, head / a.heads);
    Tile tile{{first + kTileRows * block, head / a.heads, head % a.heads, visited(limits, first)}};
    tile.carry(limits);
    return tile;
}

// One thread takes tiles. (Three threads share the producer's work, as it has few registers.)
__device__ __forceinline__ void take_tiles(Shared& shared, const Arguments& a, unsigned* ticket, int block) {
    Stage<1> tickets;
    Stage<2> tiles;
    for (int rank = blockIdx.x / kCluster;; tiles.advance(), tickets.advance()) {
        const Tile tile = tile_of(a, rank, block);
        shared.tile_box[tiles.index].wait_empty(tiles.parity);
        shared.tile[tiles.index] = tile;
        mbarrier_arrive(shared_address(&shared.tile_box[tiles.index].full));
        if (tile.head < 0) return;
        if (ticket == nullptr)
            rank = 0x7FFFFFFF;
        else if constexpr (kCluster == 1)
            rank = gridDim.x + atomicAdd(ticket, 1);
        else
            rank = gridDim.x / kCluster + take_ticket(shared.ticket_box, shared.ticket, ticket, tickets.parity, block);
    }
}

// Calls `load` with each tile, which it reads where it needs it.
template <class Load>
__device__ __forceinline__ void produce(Shared& shared, const Load& load) {
    for (unsigned n = 0;; n++) {
        Mailbox& box = shared.tile_box[n % 2];
        box.wait_full(n / 2 % 2);
        const Tile& tile = shared.tile[n % 2];
        if (tile.head < 0) return;
        load(tile);
        mbarrier_arrive(shared_address(&box.empty));
    }
}

// One thread loads the queries of each warpgroup when its last scores of the tile before are done.
__device__ __forceinline__ void produce_queries(Shared& shared, const CUtensorMap* q, const Arguments& a) {
    unsigned parity = 0;
    produce(shared, [&](const Tile& tile) {
        if (!tile.blocks.any()) return;
        for (int n = 0; n < kConsumers; n++) {
            const unsigned full = shared_address(&shared.q_box[n].full);
            shared.q_box[n].wait_empty(parity);
            mbarrier_arrive_expect_tx(full, kPart);
            for (int c = 0; c < 4; c++)
                load_chunk<Config>(shared_address(shared.q[n]) + c * kRows, q, full, 64 * c,
                                   tile.first + 64 * n + q_start(limits_of(a, tile)), tile.head, tile.batch);
        }
        parity ^= 1;
    });
}

// One thread loads their keys and values, in the order in which the warpgroups read them.
__device__ __forceinline__ void produce_keys(Shared& shared, const CUtensorMap* k, const CUtensorMap* v,
                                             const Arguments& a, int block) {
    Stage<kParts> part;
    produce(shared, [&](const Tile& tile) {
        const int key_head = tile.head / a.group;
        const auto load = [&](const CUtensorMap* map, int chunks, int x, int row) {
            const unsigned full = shared_address(&shared.part_box[part.index].full);
            unsigned char* to = shared.parts[part.index];
            shared.part_box[part.index].wait_empty(part.parity);
            mbarrier_arrive_expect_tx(full, kPart);
            if constexpr (kCluster > 1) {
                load_for_both(to, map, full, chunks, kPart / chunks, x, row, key_head, tile.batch, block);
            } else {
                for (int c = 0; c < chunks; c++)
                    load_chunk<Config>(shared_address(to) + c * (kPart / chunks), map, full, x + 64 * c, row, key_head,
                                       tile.batch);
            }
            part.advance();
        };
        for (int j = tile.blocks.from; j < tile.blocks.to; j++) {
            // Not unrolled: registers are few.
#pragma unroll 1
            for (int half = 0; half < 2; half++)
                load(k, 2, 128 * half, key_row(a, limits_of(a, tile), tile.batch, j * kTileRows));
#pragma unroll 1
            for (int half = 0; half < 2; half++)
                load(v, 4, 0, key_row(a, limits_of(a, tile), tile.batch, j * kTileRows) + 64 * half);
        }
    });
}

struct Consumer {
    Shared& shared;
    int warpgroup;
    Stage<1> queries, turn;
    Stage<kParts> part;

    // Rows of a part from this one on, which are another entry's, become zeros.
    __device__ __forceinline__ void clear_from(int row) {
        if (Config::kPacked && row < 64) clear_rows<4>(shared.parts[part.index], kRows, max(row, 0), 64, warpgroup);
    }

    // Both halves of a product: `issue(half, address of the part)`. Of the 128 rows of values there are `rows`.
    template <class Issue, int kCount>
    __device__ __forceinline__ void multiply(float (&acc)[kCount], int rows, const Issue& issue) {
        Mailbox& first = shared.part_box[part.index];
        first.wait_full(part.parity);
        clear_from(rows);
        wgmma_fence();
        issue(0, shared_address(shared.parts[part.index]));
        wgmma_commit();
        part.advance();
        Mailbox& second = shared.part_box[part.index];
        second.wait_full(part.parity);
        clear_from(rows - 64);
        wgmma_fence();
        issue(1, shared_address(shared.parts[part.index]));
        wgmma_commit();
        part.advance();
        wgmma_wait<1>();
        release(first);
        wgmma_wait<0>();
        wgmma_hold(acc);
        release(second);
    }

    __device__ __forceinline__ static void release(Mailbox& box) {
        if constexpr (kCluster > 1)
            empty_for_both(box);
        else
            box.arrive_empty();
    }

    // s = q kᵀ, in this warpgroup's turn.
    __device__ __forceinline__ void score(float (&s)[64]) {
        const unsigned q = shared_address(shared.q[warpgroup]);
        warpgroup == 0 ? shared.turn.wait_empty(turn.parity) : shared.turn.wait_full(turn.parity);
        multiply(s, kTileRows, [&](int half, unsigned keys) {
#pragma unroll
            for (int step = 0; step < 8; step++)
                wgmma_k16<Format, 0, 0>(s, along_d(q, kRows, 8 * half + step), along_d(keys, 2 * kRows, step),
                                        8 * half + step > 0);
        });
        warpgroup == 0 ? shared.turn.arrive_full() : shared.turn.arrive_empty();
        turn.advance();
    }

    // o += p v.
    __device__ __forceinline__ void add_values(float (&o)[kChannels / 2], const unsigned (&p)[8][4], int rows) {
        multiply(o, rows, [&](int half, unsigned values) {
#pragma unroll
            for (int step = 0; step < 4; step++)
                wgmma_k16<Format, 1>(o, p[4 * half + step], along_rows(values, kRows, step), 1);
        });
    }
};

__device__ __forceinline__ void consume(Shared& shared, const Arguments& a, unsigned short* out, float* m, float* inv,
                                        float* totals, int warpgroup) {
    Generator generator{};
    if constexpr (Config::kDropout) generator = read_state_once(a.rng_state);
    Consumer consumer{shared, warpgroup};
    for (Stage<2> tiles;; tiles.advance()) {
        shared.tile_box[tiles.index].wait_full(tiles.parity);
        const Tile& tile = shared.tile[tiles.index];  // read where it is needed: registers are few
        if (tile.head < 0) break;
        const int warp_row = tile.first + threadIdx.x / 32 * 16, row = warp_row + threadIdx.x % 32 / 4;
        const unsigned char* mask = head_mask(a, tile.batch, tile.head);
        Mailbox& q_box = shared.q_box[warpgroup];
        Rows rows{{kLowest, kLowest}, {0.0f, 0.0f}};
        float o[kChannels / 2];
#pragma unroll
        for (int i = 0; i < kChannels / 2; i++) o[i] = 0.0f;
#if SEGMENT
#pragma unroll 1
        for (int from = tile.blocks.from, to; from < tile.blocks.to; from = to) {
            to = min(from / kSegmentBlocks * kSegmentBlocks + kSegmentBlocks, tile.blocks.to);
#pragma unroll 1
            for (int j = from; j < to; j++) {
#else
        for (int j = tile.blocks.from; j < tile.blocks.to; j++) {
#endif
                const int key = j * kTileRows + 2 * (threadIdx.x % 4);
                const Limits& limits = limits_of(a, tile);
                float s[64], alpha[2];
                if (j == tile.blocks.from) q_box.wait_full(consumer.queries.parity);
                consumer.score(s);
                if (j + 1 == tile.blocks.to) q_box.arrive_empty(), consumer.queries.advance();
                add_bias<false>(s, a, limits, tile.batch, tile.head, row, key);
                const bool ends = Config::kLengths && warp_row + 16 > limits.sq;
                if ((j + 1) * kTileRows > key_limit(limits, warp_row) || ends) hide_after(s, limits, row, key);
                if (j * kTileRows < key_from(limits, warp_row + 15)) hide_before(s, limits, row, key);
                if (mask != nullptr && !hides_nothing(a, mask, j * kTileRows)) hide_masked(s, a, mask, row, key);
                weigh(s, rows, alpha, factor(a));
                if constexpr (Config::kDropout) {
                    int head = tile.batch * a.heads + tile.head;
                    asm volatile("" : "+r"(head));  // so that no counter is kept from block to block
                    drop(s, generator, tile_counter<Config::kPlaced>(a, head, warp_row / 16, 8 * j), a.threshold);
                }
                if (__any_sync(0xFFFFFFFF, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
                    for (int i = 0; i < kChannels / 2; i++) o[i] = __fmul_rn(o[i], alpha[i / 2 % 2]);
                }
                unsigned p[8][4];
#pragma unroll
                for (int step = 0; step < 8; step++) pack_operand<Format>(p[step], s, step);
                consumer.add_values(o, p, Config::kPacked ? limits.skv - j * kTileRows : kTileRows);
            }
#if SEGMENT
            end_segment<128 * kConsumers>(o, rows, totals, from == tile.blocks.from, to == tile.blocks.to);
        }
#endif
        float last[2];
        finish(last, rows, a, m, inv, tile.batch, tile.head, row, true);
        const Limits& limits = limits_of(a, tile);
        store_rows<Format>(o, last[0], last[1],
                           out + tile.batch * a.out_b + tile.head * a.out_h + (row + q_start(limits)) * a.out_s,
                           a.out_s, q_written(a, limits) - row, a.d);
        shared.tile_box[tiles.index].arrive_empty();
    }
}

extern "C" __global__ void TWIN_CLUSTER __launch_bounds__(128 * (kConsumers + 1), 1)
    attention(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
              const __grid_constant__ CUtensorMap v, const __grid_constant__ Arguments a, unsigned* ticket,
              unsigned short* out, float* m, float* inv TWIN_TOTALS) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (Mailbox& box : shared.q_box) box.init(1, 4);
        for (Mailbox& box : shared.part_box) box.init(1, 4 * kConsumers * kCluster);
        for (Mailbox& box : shared.tile_box) box.init(1, 4 * kConsumers + 2);
        shared.turn.init(4, 4);
        shared.ticket_box.init(1, 1);
        fence_mbarrier_init();
    }
    const auto meet = [] { cluster_arrive(), cluster_wait(); };
    if constexpr (kCluster > 1)
        meet();
    else
        __syncthreads();
    wait_for_grid_before();

    const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    if (warpgroup == kConsumers) {
        setmaxnreg_dec<24>();
        const int block = kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
        if (threadIdx.x == 128 * kConsumers) take_tiles(shared, a, ticket, block);
        if (threadIdx.x == 128 * kConsumers + 32) produce_queries(shared, &q, a);
        if (threadIdx.x == 128 * kConsumers + 64) produce_keys(shared, &k, &v, a, block);
    } else {
        setmaxnreg_inc<240>();
#if !SEGMENT
        float* const totals = nullptr;
#endif
        consume(shared, a, out, m, inv, totals, warpgroup);
    }
    // A block must not end while the other may still write into its shared memory or arrive on a barrier there.
    if constexpr (kCluster > 1) meet();
}

// No ticket has been taken.
extern "C" __global__ void attention_ticket(unsigned* ticket) {
    let_next_grid_start();
    *ticket = 0;
}
