// Attention forward of FP8 codes.   out = softmax(q k^T scale) v, blocked online softmax, per head
//
// q [b, h, sq, d], k [b, hkv, skv, d] and v transposed [b, hkv, d, skv], E4M3, through tensor maps (any strides); their
// factors fp32 [1]; out [b, h, sq, d] of bf16 or fp16; m and inv fp32 [b, h, sq]. Definition, order and rounding points:
// reference/ops/attentions/attention_fp8.py.
//
// The plan is attention.cu's: a tile is 192 queries of one head, 64 for each of three consumer warpgroups, while a
// producer keeps keys and values coming, 128 of each at a time; blocks stay and take tiles by tickets; where d > 128 a
// tile has one of two chunks of N_OUT columns of d. Here is what is different:
//   * the weights become E4M3 codes, four neighbouring keys in a lane: K's tensor map permutes a block's keys so that the
//     scores' accumulators have them there (attention_fp8_softmax.cuh);
//   * each block's P v is a chain of its own, which fma adds to O;
//   * l is one more column of O: behind each stage's values lie eight rows of ones, so that the last product of P v has
//     72 columns. With dropout l counts what is dropped, and has a product of eight columns before.
//
// Packed sequences lie in q and k [tokens, heads, d]. The map of keys counts rows in fours, and a sequence begins at any
// row: so there are four such maps, the first of row 0, the next of row 1, and so on. Values are those that
// attention_fp8_values.cu moves to multiples of 128 columns.
//
// Defines: FORMAT (BF16 | FP16, out's), D_CHUNKS (d in chunks of 128: 1, 2), D_STEPS (of 32: 2, 4, 8), N_OUT (64 | 128),
// STAGES, Q_STAGES, DROPOUT (0 | 1), LENGTHS (0 | 1), PACKED (0 | 1), PLACED (0 | 1).
#include "attention_fp8_softmax.cuh"
#include "attention_fp8_values.cuh"
#include "ptx/grid.cuh"

#ifndef PLACED
#define PLACED 0
#endif

using namespace twin;

struct Config : AttentionDefaults {
    using Format = FORMAT;
    static constexpr int kPlaced = PLACED;
    static constexpr bool kDropout = DROPOUT, kLengths = LENGTHS, kPacked = PACKED;
    static constexpr int kChunks = D_CHUNKS, kSteps = D_STEPS, kChannels = N_OUT;
    static constexpr int kStages = STAGES, kQueryStages = Q_STAGES;
};
using Arguments = AttentionArguments<Config>;
using Limits = AttentionLimits<Config>;

constexpr bool kDropout = Config::kDropout, kLengths = Config::kLengths, kPacked = Config::kPacked;
constexpr int kChunks = Config::kChunks, kSteps = Config::kSteps, kChannels = Config::kChannels, kAcc = kChannels / 2;
constexpr int kStages = Config::kStages, kQueryStages = Config::kQueryStages;
constexpr int kConsumers = 3;                                                                     // warpgroups
constexpr int kQueries = 64 * kConsumers;                                                         // of a tile
constexpr int kChunk = kTileRows * 128, kQueryChunk = kQueries * 128, kValues = kChannels * 128;  // bytes
constexpr unsigned kOnes = 0x38383838;                                                            // four codes of 1

// Queries from `first` of a head, columns from `column` of d, and the blocks of keys that they visit. Without a head
// (-1), there is no tile.
struct Place {
    int first, batch, head, column;
    Range blocks;
};
struct Limited : Place {
    EntryLimits<Config> limits;
};
using Tile = Choice<kLengths, Limited, Place>::Type;

// With `OwnLimits` and `limits_of` calls without lengths would have other machine code.
__device__ __forceinline__ const Arguments& own_limits(const Arguments& a, const Place&) { return a; }
__device__ __forceinline__ const EntryLimits<Config>& own_limits(const Arguments&, const Limited& tile) {
    return tile.limits;
}
__device__ __forceinline__ void keep(Place&, const Arguments&) {}
__device__ __forceinline__ void keep(Limited& tile, const EntryLimits<Config>& limits) { tile.limits = limits; }

// Maps of keys: one; of packed sequences four, by the remainder of the row at which they begin.
struct KeyMaps {
    CUtensorMap from[kPacked ? 4 : 1];
};
__device__ __forceinline__ const CUtensorMap* map_of(const KeyMaps* k, int start) {
    return k->from + (kPacked ? start % 4 : 0);
}

struct Values {
    unsigned char codes[kValues];  // [kChannels][128 keys]
    unsigned char ones[8 * 128];   // eight rows more, after which the operand's ninth group of 8 rows lies
};

struct __align__(1024) Shared {
    unsigned char q[kQueryStages][kChunks * kQueryChunk];
    unsigned char k[kStages][kChunks * kChunk];
    Values v[kStages];
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
    if (kLengths && first >= a.sq) return {0, 0};
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
    if (rank >= all_heads * width) return {0, 0, -1, 0, {0, 0}};
    const int before = rank / (a.together * width) * a.together;
    const int heads = min(a.together, all_heads - before), place = rank - before * width;
    const int head = before + place % heads, block = place / heads;
    const int first = (query_blocks - 1 - block / columns) * kQueries;
    const Limits& limits = limits_of(a, head / a.heads);
    Tile tile{first, head / a.heads, head % a.heads, block % columns * kChannels, visited_by_tile(limits, first)};
    keep(tile, limits);
    return tile;
}

__device__ __forceinline__ void produce(Shared& shared, const CUtensorMap* q, const KeyMaps* k, const CUtensorMap* v,
                                        const Arguments& a, int* ticket) {
    Stage<kQueryStages> queries;
    Stage<kStages> stage;
    Stage<2> tiles;
    for (int rank = blockIdx.x, next;; rank = next, queries.advance(), tiles.advance()) {
        shared.tile_box[tiles.index].wait_empty(tiles.parity);
        const Tile tile = shared.tile[tiles.index] = tile_of(a, rank);
        mbarrier_arrive(shared_address(&shared.tile_box[tiles.index].full));
        if (tile.head < 0) break;
        next = ticket == nullptr ? 0x7FFFFFFF : gridDim.x + atomicAdd(ticket, 1);
        const int key_head = tile.head / a.group;
        const int s = queries.index;
        const int first = tile.first + (kPacked ? q_start(own_limits(a, tile)) : 0);
        const int start = kPacked ? kv_start(own_limits(a, tile)) : 0;
        const int value = kPacked ? values_from(tile.batch, start) : 0;
        shared.q_box[s].wait_empty(queries.parity);
        const unsigned q_full = shared_address(&shared.q_box[s].full);
        mbarrier_arrive_expect_tx(q_full, kChunks * kQueryChunk);
        for (int c = 0; c < kChunks; c++)
            load_chunk<Config>(shared_address(shared.q[s]) + c * kQueryChunk, q, q_full, 128 * c, first, tile.head,
                               tile.batch);
        for (int j = tile.blocks.from; j < tile.blocks.to; j++, stage.advance()) {
            const int n = stage.index;
            const unsigned k_full = shared_address(&shared.k_box[n].full),
                           v_full = shared_address(&shared.v_box[n].full);
            shared.k_box[n].wait_empty(stage.parity);
            mbarrier_arrive_expect_tx(k_full, kChunks * kChunk);
            for (int i = 0; i < 2 * kChunks; i++)  // keys 4 n and 4 n + 1, then 4 n + 2 and 4 n + 3
                tma_load_5d(shared_address(shared.k[n]) + i * (kChunk / 2), map_of(k, start), k_full, i / 2 * 128,
                            i % 2 * 2, j * (kTileRows / 4) + start / 4, key_head, kPacked ? 0 : tile.batch);
            shared.v_box[n].wait_empty(stage.parity);
            mbarrier_arrive_expect_tx(v_full, kValues);
            load_chunk<Config>(shared_address(shared.v[n].codes), v, v_full, j * kTileRows + value, tile.column,
                               key_head, tile.batch);
        }
    }
}

// A step of 32 values along K of a K-major tile: 2 units of 16 bytes; chunks have 4 steps.
__device__ __forceinline__ unsigned long long along_k(unsigned tile, int chunk_bytes, int step) {
    return wgmma_descriptor(tile + step / 4 * chunk_bytes, 0, 1024) + step % 4 * 2;
}

// Issue s = q kᵀ.
__device__ __forceinline__ void score(float (&s)[64], unsigned q, unsigned k) {
#pragma unroll
    for (int step = 0; step < kSteps; step++)
        wgmma_k32<E4M3, E4M3>(s, along_k(q, kQueryChunk, step), along_k(k, kChunk, step), step > 0);
}

// Products of P with rows of 128 keys, a chain from zero: values, or ones.
template <int kCount>
__device__ __forceinline__ void multiply_codes(float (&product)[kCount], const unsigned (&p)[4][4], unsigned rows) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) wgmma_k32(product, p[step], along_k(rows, 0, step), step > 0);
    wgmma_commit();
}

// l = fma(l, alpha, the sum of codes), of eight equal columns.
__device__ __forceinline__ void add_sums(Rows& rows, const float (&alpha)[2], float low, float high) {
    rows.sum[0] = __fmaf_rn(rows.sum[0], alpha[0], low);
    rows.sum[1] = __fmaf_rn(rows.sum[1], alpha[1], high);
}

// O = fma(O, alpha, P v), 64 columns at a time: with all 128 at once a thread would need more registers than it has.
__device__ __forceinline__ void add_values(float (&o)[kAcc], Rows& rows, const float (&alpha)[2],
                                           const unsigned (&p)[4][4], unsigned v) {
    const auto add = [&](const float* product, int first) {
#pragma unroll
        for (int i = 0; i < 32; i++) o[first + i] = __fmaf_rn(o[first + i], alpha[i / 2 % 2], product[i]);
    };
    if constexpr (kChannels == 128) {
        float product[32];
        multiply_codes(product, p, v);
        wgmma_wait<0>();
        wgmma_hold(product);
        add(product, 0);
    }
    float product[kDropout ? 32 : 36];  // the ones are the last eight columns
    multiply_codes(product, p, v + (kChannels - 64) * 128);
    wgmma_wait<0>();
    wgmma_hold(product);
    add(product, kAcc - 32);
    if constexpr (!kDropout) add_sums(rows, alpha, product[32], product[34]);
}

__device__ __forceinline__ void store(const float (&o)[kAcc], const Rows& rows, const Arguments& a, float of_values,
                                      unsigned short* out, float* m, float* inv, int row, const Tile& tile) {
    float last[2];
    finish_codes(last, rows, a, m, inv, tile.batch, tile.head, row, tile.column == 0);
    const Limits& limits = own_limits(a, tile);
    out += tile.batch * a.out_b + tile.head * a.out_h + (row + q_start(limits)) * a.out_s + tile.column;
    store_rows<Config::Format>(o, __fmul_rn(last[0], of_values), __fmul_rn(last[1], of_values), out, a.out_s,
                               q_written(a, limits) - row, a.d - tile.column);
}

__device__ __forceinline__ void consume(Shared& shared, const Arguments& a, float of_scores, float of_values,
                                        unsigned short* out, float* m, float* inv, int warpgroup) {
    Generator generator{};
    if constexpr (kDropout) generator = read_state_once(a.rng_state);
    Stage<kQueryStages> queries;
    Stage<kStages> keys;
    Stage<2> tiles;
    for (;; queries.advance(), tiles.advance()) {
        shared.tile_box[tiles.index].wait_full(tiles.parity);
        const Tile& tile = shared.tile[tiles.index];  // read again when it is needed, for want of registers
        if (tile.head < 0) break;
        const int warp_row = tile.first + threadIdx.x / 32 * 16, row = warp_row + threadIdx.x % 32 / 4;
        const unsigned q = shared_address(shared.q[queries.index]) + warpgroup * (64 * 128);
        const unsigned char* mask = head_mask(a, tile.batch, tile.head);
        Rows rows{{kLowest, kLowest}, {0.0f, 0.0f}};
        float o[kAcc];
#pragma unroll
        for (int i = 0; i < kAcc; i++) o[i] = 0.0f;
        const auto counter =
            kDropout ? tile_counter<Config::kPlaced>(a, tile.batch * a.heads + tile.head, warp_row / 16, 0) : 0;
        const Limits& limits = own_limits(a, tile);
        const ClearBlocks clear(limits, warp_row, mask != nullptr);
        const auto hide = [&](float (&s)[64], int j) {
            const int key = j * kTileRows + 4 * (threadIdx.x % 4);
            if (!__any_sync(0xFFFFFFFF, !clear.has(j))) return;
            if ((j + 1) * kTileRows > key_limit(limits, warp_row) || ends_before(limits, warp_row + 16))
                hide_fours_after(s, limits, row, key);
            if (j * kTileRows < key_from(limits, warp_row + 15)) hide_fours_before(s, limits, row, key);
            if (mask != nullptr && !hides_nothing(a, mask, j * kTileRows)) hide_fours_masked(s, a, mask, row, key);
        };

        // Blocks of keys that other warpgroups visit and this one does not.
        const auto skip = [&](int count) {
            for (; count > 0; count--, keys.advance()) {
                shared.k_box[keys.index].wait_full(keys.parity);
                shared.k_box[keys.index].arrive_empty();
                shared.v_box[keys.index].wait_full(keys.parity);
                shared.v_box[keys.index].arrive_empty();
            }
        };
        const Range blocks = visited_by(limits, tile.first + 64 * warpgroup);
        if (blocks.any()) skip(blocks.from - tile.blocks.from);
        shared.q_box[queries.index].wait_full(queries.parity);
        for (int j = blocks.from; j < blocks.to; j++, keys.advance()) {
            unsigned p[4][4];
            float alpha[2];
            {
                float s[64];
                shared.k_box[keys.index].wait_full(keys.parity);
                wgmma_fence();
                score(s, q, shared_address(shared.k[keys.index]));
                wgmma_commit();
                wgmma_wait<0>();
                wgmma_hold(s);
                shared.k_box[keys.index].arrive_empty();
                hide(s, j);
                weigh_codes(s, rows.m, alpha, of_scores);
                pack_codes(p, s);
            }
            shared.v_box[keys.index].wait_full(keys.parity);
            if constexpr (kDropout) {
                float sums[4];
                unsigned keep[2];
                multiply_codes(sums, p, shared_address(shared.v[keys.index].ones));
                draw(keep, generator, counter + 256 * j, a.threshold);
                wgmma_wait<0>();
                wgmma_hold(sums);
                add_sums(rows, alpha, sums[0], sums[2]);
                drop_codes(p, keep);
            }
            add_values(o, rows, alpha, p, shared_address(shared.v[keys.index].codes));
            shared.v_box[keys.index].arrive_empty();
        }
        shared.q_box[queries.index].arrive_empty();
        store(o, rows, a, of_values, out, m, inv, row, tile);
        skip(tile.blocks.to - (blocks.any() ? blocks.to : tile.blocks.from));
        shared.tile_box[tiles.index].arrive_empty();
    }
}

extern "C" __global__ void __launch_bounds__(128 * (kConsumers + 1), 1)
    attention_fp8(const __grid_constant__ CUtensorMap q, const __grid_constant__ KeyMaps k,
                  const __grid_constant__ CUtensorMap v, const float* q_scale_inv, const float* k_scale_inv,
                  const float* v_scale_inv, const __grid_constant__ Arguments a, int* ticket, unsigned short* out,
                  float* m, float* inv) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (Mailbox& box : shared.q_box) box.init(1, 4 * kConsumers);
        for (Mailbox& box : shared.k_box) box.init(1, 4 * kConsumers);
        for (Mailbox& box : shared.v_box) box.init(1, 4 * kConsumers);
        for (Mailbox& box : shared.tile_box) box.init(1, 4 * kConsumers);
        fence_mbarrier_init();
    }
    for (int n = threadIdx.x; n < kStages * (8 * 32); n += 128 * (kConsumers + 1))
        reinterpret_cast<unsigned*>(shared.v[n / (8 * 32)].ones)[n % (8 * 32)] = kOnes;
    fence_proxy_async();
    __syncthreads();
    wait_for_grid_before();

    const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    if (warpgroup == kConsumers) {
        setmaxnreg_dec<32>();
        if (threadIdx.x == 128 * kConsumers) produce(shared, &q, &k, &v, a, ticket);
    } else {
        setmaxnreg_inc<160>();
        const float of_scores = __fmul_rn(a.c, __fmul_rn(__ldg(q_scale_inv), __ldg(k_scale_inv)));
        consume(shared, a, of_scores, __ldg(v_scale_inv), out, m, inv, warpgroup);
    }
}

// No ticket has been taken.
extern "C" __global__ void attention_fp8_ticket(int* ticket) {
    let_next_grid_start();
    *ticket = 0;
}
