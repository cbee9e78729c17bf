// Attention forward.   out = softmax(q k^T scale) v, blocked online softmax, per head
//
// q [b, h, sq, d], k and v [b, hkv, skv, d] of bf16 or fp16 through tensor maps (any strides); out the same; m and
// inv fp32 [b, h, sq]. Definition, order and rounding points: reference/ops/attentions/attention.py.
//
// A tile is 192 queries of one head: 64 for each of three consumer warpgroups, while a producer keeps keys and values
// coming, 128 of each at a time. A warpgroup multiplies, weighs, multiplies, one after the other; the three are at
// different steps, which keeps the tensor cores busy. Scores, weights and the accumulator stay in registers: the weights
// are the A operand of the second GEMM just as they lie. A tile has queries of two of the definition's blocks of 128;
// each warpgroup takes the keys that its own block visits.
//
// Blocks stay, one on each multiprocessor, and take tile after tile, by tickets, from longer to shorter ones; the
// producer is ahead of the consumers, in the next tile as well. Without tickets, there is a block for each tile.
// A tile has one of the chunks of N_OUT columns of d: all, as heads of more than 128 take attention_wide.cu.
//
// Defines: FORMAT (BF16 | FP16), D_CHUNKS (d in chunks of 64: 1, 2), N_OUT (64 | 128), STAGES, Q_STAGES, DROPOUT
// (0 | 1), BIAS (0 | 1), SINK (0 | 1), LENGTHS (0 | 1), PACKED (0 | 1), PAGED (0 | 1), PLACED (0 | 1 | 2), SEGMENT (0 | keys
// of a segment), AMAX (0 | 1; attention_amax.cuh), whose word `attention_ticket` clears.
#include "attention_segments.cuh"
#include "attention_amax.cuh"
#include "ptx/grid.cuh"

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

#ifdef AMAX
constexpr bool kAmax = true;
#define TWIN_AMAX , unsigned* amax_word
#define TWIN_AMAX_WORD amax_word
#else
constexpr bool kAmax = false;
#define TWIN_AMAX
#define TWIN_AMAX_WORD nullptr
#endif

struct Config : AttentionDefaults {
    using Format = FORMAT;
    static constexpr int kPlaced = PLACED;
    static constexpr bool kDropout = DROPOUT, kBias = BIAS, kSink = SINK, kLengths = LENGTHS, kPacked = PACKED,
                          kPaged = PAGED;
    static constexpr int kChunks = D_CHUNKS, kChannels = N_OUT, kStages = STAGES, kQueryStages = Q_STAGES;
};
using Format = Config::Format;
using Arguments = AttentionArguments<Config>;
using Limits = AttentionLimits<Config>;

constexpr int kChunks = Config::kChunks, kChannels = Config::kChannels, kAcc = kChannels / 2;
constexpr int kStages = Config::kStages, kQueryStages = Config::kQueryStages;
constexpr int kConsumers = 3;              // warpgroups
constexpr int kQueries = 64 * kConsumers;  // of a tile
constexpr int kChunk = kTileRows * 128, kQueryChunk = kQueries * 128;
constexpr int kSegmentBlocks = SEGMENT / kTileRows;
static_assert(SEGMENT % kTileRows == 0, "a segment has whole blocks of keys");

// Queries from `first` of a head, columns from `column` of d, and the blocks of keys that they visit. Without a head
// (-1), there is no tile.
struct Place {
    int first, batch, head, column;
    Range blocks;
};
struct Tile : Place, OwnLimits<Config> {};

struct __align__(1024) Shared {
    unsigned char q[kQueryStages][kChunks * kQueryChunk];
    unsigned char k[kStages][kChunks * kChunk];
    unsigned char v[kStages][kChannels / 64 * kChunk];
    Mailbox q_box[kQueryStages], k_box[kStages], v_box[kStages], tile_box[2];
    Tile tile[2];  // what the consumers do next
};
static_assert(sizeof(Shared) <= 232448, "a block has at most 227 KB of shared memory");

// The blocks of keys that the block of queries with this one visits; none if there is no such query.
__device__ __forceinline__ Range visited_by(const Limits& a, int query) {
    return query < a.sq ? visited(a, query & -kTileRows) : Range{0, 0};
}

// Those that one of a tile's queries visits: of its first query's block, or of its last one's.
__device__ __forceinline__ Range visited_by_tile(const Limits& a, int first) {
    if (Config::kLengths && first >= a.sq) return {0, 0};
    const Range one = visited_by(a, first);
    const Range other = visited_by(a, min(first + kQueries, a.sq) - 1);
    if (!other.any()) return one;
    return one.any() ? Range{min(one.from, other.from), max(one.to, other.to)} : other;
}

// The tile of a rank. Heads are taken `together` at a time, so that their keys stay in L2, and of those the last queries
// first, which have most to do.
__device__ __forceinline__ Tile tile_of(const Arguments& a, int rank) {
    const int query_blocks = (a.sq + kQueries - 1) / kQueries, columns = (a.d + kChannels - 1) / kChannels;
    const int all_heads = a.batches * a.heads, width = query_blocks * columns;
    if (rank >= all_heads * width) return {{0, 0, -1, 0, {0, 0}}};
    const int before = rank / (a.together * width) * a.together;
    const int heads = min(a.together, all_heads - before), place = rank - before * width;
    const int head = before + place % heads, block = place / heads;
    const int first = (query_blocks - 1 - block / columns) * kQueries;
    const Limits& limits = limits_of(a, head / a.heads);
    Tile tile{{first, head / a.heads, head % a.heads, block % columns * kChannels, visited_by_tile(limits, first)}};
    tile.carry(limits);
    return tile;
}

__device__ __forceinline__ void produce(Shared& shared, const CUtensorMap* q, const CUtensorMap* k,
                                        const CUtensorMap* v, const Arguments& a, int* ticket) {
    Stage<kQueryStages> queries;
    Stage<kStages> stage;
    Stage<2> tiles;
    for (int rank = blockIdx.x, next;; rank = next, queries.advance(), tiles.advance()) {
        shared.tile_box[tiles.index].wait_empty(tiles.parity);
        const Tile tile = shared.tile[tiles.index] = tile_of(a, rank);
        mbarrier_arrive(shared_address(&shared.tile_box[tiles.index].full));
        if (tile.head < 0) break;
        next = ticket == nullptr ? 0x7FFFFFFF : gridDim.x + atomicAdd(ticket, 1);
        const auto load = [&](Mailbox& box, unsigned parity, unsigned char* to, const CUtensorMap* map, int chunks,
                              int bytes, int x, int row, int head) {
            const unsigned full = shared_address(&box.full);
            box.wait_empty(parity);
            mbarrier_arrive_expect_tx(full, chunks * bytes);
            for (int c = 0; c < chunks; c++)
                load_chunk<Config>(shared_address(to) + c * bytes, map, full, x + 64 * c, row, head, tile.batch);
        };
        const int key_head = tile.head / a.group, s = queries.index;
        const int q_chunks = Config::kLengths && !tile.blocks.any() ? 0 : kChunks;
        const int first = tile.first + q_start(limits_of(a, tile));
        load(shared.q_box[s], queries.parity, shared.q[s], q, q_chunks, kQueryChunk, 0, first, tile.head);
        for (int j = tile.blocks.from; j < tile.blocks.to; j++, stage.advance()) {
            const int n = stage.index, key = key_row(a, limits_of(a, tile), tile.batch, j * kTileRows);
            load(shared.k_box[n], stage.parity, shared.k[n], k, kChunks, kChunk, 0, key, key_head);
            load(shared.v_box[n], stage.parity, shared.v[n], v, kChannels / 64, kChunk, tile.column, key, key_head);
        }
    }
}

// Issue s = q kᵀ.
__device__ __forceinline__ void score(float (&s)[64], unsigned q, unsigned k) {
#pragma unroll
    for (int step = 0; step < 4 * kChunks; step++)
        wgmma_k16<Format, 0, 0>(s, along_d(q, kQueryChunk, step), along_d(k, kChunk, step), step > 0);
}

// Issue o += p v.
__device__ __forceinline__ void add_values(float (&o)[kAcc], const unsigned (&p)[8][4], unsigned v) {
#pragma unroll
    for (int step = 0; step < 8; step++) wgmma_k16<Format, 1>(o, p[step], along_rows(v, kChunk, step), 1);
}

__device__ __forceinline__ void store(const float (&o)[kAcc], const Rows& rows, const Arguments& a, unsigned short* out,
                                      float* m, float* inv, unsigned* amax_word, int row, const Tile& tile) {
    float last[2];
    finish(last, rows, a, m, inv, tile.batch, tile.head, row, tile.column == 0);
    const Limits& limits = limits_of(a, tile);
    out += tile.batch * a.out_b + tile.head * a.out_h + (row + q_start(limits)) * a.out_s + tile.column;
    Amax<Format, kAmax> amax;
    store_rows<Format>(o, last[0], last[1], out, a.out_s, q_written(a, limits) - row, a.d - tile.column, amax.also());
    amax.leave_of_warp(amax_word);
}

__device__ __forceinline__ void consume(Shared& shared, const Arguments& a, unsigned short* out, float* m, float* inv,
                                        float* totals, unsigned* amax_word, int warpgroup) {
    Generator generator{};
    if constexpr (Config::kDropout) generator = read_state_once(a.rng_state);
    Stage<kQueryStages> queries;
    Stage<kStages> keys, values;
    Stage<2> tiles;
    for (;; queries.advance(), tiles.advance()) {
        shared.tile_box[tiles.index].wait_full(tiles.parity);
#if LENGTHS
        const Tile& tile = shared.tile[tiles.index];  // read from there each time, as registers are few
        const Limits& limits = tile.limits;
#else
        const Tile tile = shared.tile[tiles.index];
        const Limits& limits = a;  // `limits_of` would give four configurations with a bias other machine code
#endif
        if (!Config::kLengths) shared.tile_box[tiles.index].arrive_empty();
        if (tile.head < 0) break;
        const int warp_row = tile.first + threadIdx.x / 32 * 16, row = warp_row + threadIdx.x % 32 / 4;
        const unsigned q = shared_address(shared.q[queries.index]) + warpgroup * (64 * 128);
        const unsigned char* mask = head_mask(a, tile.batch, tile.head);
        Rows rows{{kLowest, kLowest}, {0.0f, 0.0f}};
        float o[kAcc];
#pragma unroll
        for (int i = 0; i < kAcc; i++) o[i] = 0.0f;
        const auto counter =
            Config::kDropout ? tile_counter<Config::kPlaced>(a, tile.batch * a.heads + tile.head, warp_row / 16, 0) : 0;
        const auto soften = [&](float (&s)[64], float (&alpha)[2], int j) {
            const int key = j * kTileRows + 2 * (threadIdx.x % 4);
            add_bias<false>(s, a, limits, tile.batch, tile.head, row, key);
            const bool ends = Config::kLengths && warp_row + 16 > limits.sq;
            if ((j + 1) * kTileRows > key_limit(limits, warp_row) || ends) hide_after(s, limits, row, key);
            if (j * kTileRows < key_from(limits, warp_row + 15)) hide_before(s, limits, row, key);
            if (mask != nullptr && !hides_nothing(a, mask, j * kTileRows)) hide_masked(s, a, mask, row, key);
            weigh(s, rows, alpha, factor(a));
            if constexpr (Config::kDropout) drop(s, generator, counter + 256 * j, a.threshold);
        };

        // Blocks of keys that other warpgroups visit and this one does not.
        const auto skip = [&](int count) {
            for (; count > 0; count--, keys.advance(), values.advance()) {
                shared.k_box[keys.index].wait_full(keys.parity);
                shared.k_box[keys.index].arrive_empty();
                shared.v_box[values.index].wait_full(values.parity);
                shared.v_box[values.index].arrive_empty();
            }
        };
        const Range blocks = visited_by(limits, tile.first + 64 * warpgroup);
        if (blocks.any()) skip(blocks.from - tile.blocks.from);
        unsigned p[8][4];
        float s[64], alpha[2];
        shared.q_box[queries.index].wait_full(queries.parity);
        const auto walk = [&](int from, int to) {
            for (int j = from; j < to; j++, keys.advance(), values.advance()) {
                shared.k_box[keys.index].wait_full(keys.parity);
                wgmma_fence();
                score(s, q, shared_address(shared.k[keys.index]));
                wgmma_commit();
                wgmma_wait<0>();
                wgmma_hold(s);
                shared.k_box[keys.index].arrive_empty();
                soften(s, alpha, j);
                if (__any_sync(0xFFFFFFFF, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
                    for (int i = 0; i < kAcc; i++) o[i] = __fmul_rn(o[i], alpha[i / 2 % 2]);
                }
#pragma unroll
                for (int step = 0; step < 8; step++) pack_operand<Format>(p[step], s, step);
                shared.v_box[values.index].wait_full(values.parity);
                if (Config::kPacked && (j + 1) * kTileRows > limits.skv) {
                    unsigned char* const v = shared.v[values.index];
                    clear_rows<kChannels / 64>(v, kChunk, limits.skv - j * kTileRows, kTileRows, warpgroup);
                }
                wgmma_fence();
                add_values(o, p, shared_address(shared.v[values.index]));
                wgmma_commit();
                wgmma_wait<0>();
                wgmma_hold(o);
                shared.v_box[values.index].arrive_empty();
            }
        };
        walk_segments<kSegmentBlocks, 128 * kConsumers>(walk, blocks, o, rows, totals);
        shared.q_box[queries.index].arrive_empty();
        store(o, rows, a, out, m, inv, amax_word, row, tile);
        skip(tile.blocks.to - (blocks.any() ? blocks.to : tile.blocks.from));
        if (Config::kLengths) shared.tile_box[tiles.index].arrive_empty();
    }
}

extern "C" __global__ void __launch_bounds__(128 * (kConsumers + 1), 1)
    attention(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
              const __grid_constant__ CUtensorMap v, const __grid_constant__ Arguments a, int* ticket,
              unsigned short* out, float* m, float* inv TWIN_TOTALS TWIN_AMAX) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (Mailbox& box : shared.q_box) box.init(1, 4 * kConsumers);
        for (Mailbox& box : shared.k_box) box.init(1, 4 * kConsumers);
        for (Mailbox& box : shared.v_box) box.init(1, 4 * kConsumers);
        for (Mailbox& box : shared.tile_box) box.init(1, 4 * kConsumers);
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_grid_before();

    const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    if (warpgroup == kConsumers) {
        setmaxnreg_dec<32>();
        if (threadIdx.x == 128 * kConsumers) produce(shared, &q, &k, &v, a, ticket);
    } else {
        setmaxnreg_inc<160>();
#if !SEGMENT
        float* const totals = nullptr;
#endif
        consume(shared, a, out, m, inv, totals, TWIN_AMAX_WORD, warpgroup);
    }
}

// No ticket has been taken.
extern "C" __global__ void attention_ticket(int* ticket TWIN_AMAX) {
    let_next_grid_start();
    *ticket = 0;
#ifdef AMAX
    *amax_word = 0;
#endif
}
