// Attention forward of FP8 codes.   out = softmax(q k^T scale) v, blocked online softmax, per head
//
// q [b, h, sq, d], k [b, hkv, skv, d] and v transposed [b, hkv, d, skv], E4M3, through tensor maps (any strides); their
// factors fp32 [1]; out [b, h, sq, d] of bf16 or fp16; m and inv fp32 [b, h, sq]. Definition, order and rounding points:
// reference/ops/attention_fp8.py.
//
// The plan is attention.cu's: a tile is 192 queries of one head, 64 for each of three consumer warpgroups, while a
// producer keeps keys and values coming, 128 of each at a time; blocks stay and take tiles by tickets; where d > 128 a
// tile has one of two chunks of N_OUT columns of d. Here is what is different:
//   * the weights become E4M3 codes, and neighbouring lanes trade them: the scores' accumulators have two neighbouring
//     keys in a lane, an FP8 operand wants four;
//   * each block's P v is a chain of its own, which fma adds to O.
//
// Defines: FORMAT (BF16 | FP16, out's), D_CHUNKS (d in chunks of 128: 1, 2), D_STEPS (of 32: 2, 4, 8), N_OUT (64 | 128),
// STAGES, Q_STAGES, DROPOUT (0 | 1).
#include "attention_softmax.cuh"
#include "ptx/grid.cuh"

using namespace twin;

constexpr int kConsumers = 3;            // warpgroups
constexpr int kQueries = 64 * kConsumers;  // of a tile
constexpr int kChunk = kTileRows * 128, kQueryChunk = kQueries * 128, kValues = N_OUT * 128;  // bytes
constexpr int kHeadroom = 7;  // m lies so far below: weights reach up to 2^8

// Queries from `first` of a head, columns from `column` of d, and the blocks of keys that they visit. Without a head
// (-1), there is no tile.
struct Tile {
    int first, batch, head, column;
    Range blocks;
};

struct __align__(1024) Shared {
    unsigned char q[Q_STAGES][D_CHUNKS * kQueryChunk];
    unsigned char k[STAGES][D_CHUNKS * kChunk];
    unsigned char v[STAGES][kValues];
    Mailbox q_box[Q_STAGES], k_box[STAGES], v_box[STAGES], tile_box[2];
    Tile tile[2];  // what the consumers do next
};
static_assert(sizeof(Shared) <= 232448, "a block has at most 227 KB of shared memory");

// The blocks of keys that the block of queries with this one visits; none if there is no such query.
__device__ __forceinline__ Range visited_by(const Arguments& a, int query) {
    return query < a.sq ? visited(a, query & -kTileRows) : Range{0, 0};
}

// Those that one of a tile's queries visits: of its first query's block, or of its last one's.
__device__ __forceinline__ Range visited_by_tile(const Arguments& a, int first) {
    const Range one = visited_by(a, first);
    const Range other = visited_by(a, min(first + kQueries, a.sq) - 1);
    if (!other.any()) return one;
    return one.any() ? Range{min(one.from, other.from), max(one.to, other.to)} : other;
}

// The tile of a rank. Heads are taken `together` at a time, so that their keys stay in L2, and of those the last queries
// first, which have most to do.
__device__ __forceinline__ Tile tile_of(const Arguments& a, int rank) {
    const int query_blocks = (a.sq + kQueries - 1) / kQueries, columns = (a.d + N_OUT - 1) / N_OUT;
    const int all_heads = a.batches * a.heads, width = query_blocks * columns;
    if (rank >= all_heads * width) return {0, 0, -1, 0, {0, 0}};
    const int before = rank / (a.together * width) * a.together;
    const int heads = min(a.together, all_heads - before), place = rank - before * width;
    const int head = before + place % heads, block = place / heads;
    const int first = (query_blocks - 1 - block / columns) * kQueries;
    return {first, head / a.heads, head % a.heads, block % columns * N_OUT, visited_by_tile(a, first)};
}

__device__ __forceinline__ void produce(Shared& shared, const CUtensorMap* q, const CUtensorMap* k,
                                        const CUtensorMap* v, const Arguments& a, int* ticket) {
    Stage<Q_STAGES> queries;
    Stage<STAGES> stage;
    Stage<2> tiles;
    for (int rank = blockIdx.x, next;; rank = next, queries.advance(), tiles.advance()) {
        shared.tile_box[tiles.index].wait_empty(tiles.parity);
        const Tile tile = shared.tile[tiles.index] = tile_of(a, rank);
        mbarrier_arrive(shared_address(&shared.tile_box[tiles.index].full));
        if (tile.head < 0) break;
        next = ticket == nullptr ? 0x7FFFFFFF : gridDim.x + atomicAdd(ticket, 1);
        const int key_head = tile.head / a.group;
        const auto load_rows = [&](Mailbox& box, unsigned parity, unsigned char* to, const CUtensorMap* map, int bytes,
                                   int row, int head) {
            const unsigned full = shared_address(&box.full);
            box.wait_empty(parity);
            mbarrier_arrive_expect_tx(full, D_CHUNKS * bytes);
            for (int c = 0; c < D_CHUNKS; c++)
                load_chunk(shared_address(to) + c * bytes, map, full, 128 * c, row, head, tile.batch);
        };
        const int s = queries.index;
        load_rows(shared.q_box[s], queries.parity, shared.q[s], q, kQueryChunk, tile.first, tile.head);
        for (int j = tile.blocks.from; j < tile.blocks.to; j++, stage.advance()) {
            const int n = stage.index;
            load_rows(shared.k_box[n], stage.parity, shared.k[n], k, kChunk, j * kTileRows, key_head);
            const unsigned full = shared_address(&shared.v_box[n].full);
            shared.v_box[n].wait_empty(stage.parity);
            mbarrier_arrive_expect_tx(full, kValues);
            load_chunk(shared_address(shared.v[n]), v, full, j * kTileRows, tile.column, key_head, tile.batch);
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
    for (int step = 0; step < D_STEPS; step++)
        wgmma_k32<E4M3, E4M3>(s, along_k(q, kQueryChunk, step), along_k(k, kChunk, step), step > 0);
}

// Two neighbouring keys' codes of each of two groups of eight keys, and the same 16 keys on, to four neighbouring keys'
// codes. Lane q (of four) has keys 2 q, 2 q + 1 and 8 + 2 q, 9 + 2 q of 16, and gets keys 4 q .. 4 q + 3: first an even
// lane gives its upper pairs for the lower ones of its neighbour, then lanes 1 and 2 change places.
struct Trade {
    unsigned give, first, second;  // selectors of bytes
    int source;

    __device__ __forceinline__ Trade() {
        const int lane = threadIdx.x % 4;
        const bool odd = lane % 2 != 0;
        give = odd ? 0x5410 : 0x7632;
        first = odd ? 0x3254 : 0x5410;
        second = odd ? 0x3276 : 0x7610;
        source = lane == 1 ? 2 : lane == 2 ? 1 : lane;
    }

    __device__ __forceinline__ void operator()(unsigned& one, unsigned& other) const {
        const unsigned got = __shfl_xor_sync(0xFFFFFFFF, __byte_perm(one, other, give), 1);
        one = __shfl_sync(0xFFFFFFFF, __byte_perm(one, got, first), source, 4);
        other = __shfl_sync(0xFFFFFFFF, __byte_perm(other, got, second), source, 4);
    }
};

// Weights of 32 keys as an A operand.
__device__ __forceinline__ void pack_codes(unsigned (&a)[4], const float (&s)[64], int step, const Trade& trade) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = 16 * step + 8 * half + 2 * r;
            a[2 * half + r] = cvt_e4m3x2(s[i], s[i + 1]) | cvt_e4m3x2(s[i + 4], s[i + 5]) << 16;
        }
        trade(a[r], a[2 + r]);
    }
}

// o = fma(o, alpha, p v), 64 columns at a time: with all 128 at once a thread would need more registers than it has.
__device__ __forceinline__ void add_values(float (&o)[N_OUT / 2], const float (&alpha)[2], const unsigned (&p)[4][4],
                                           unsigned v) {
#pragma unroll
    for (int part = 0; part < N_OUT / 64; part++) {
        float product[32];
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; step++)
            wgmma_k32(product, p[step], along_k(v + part * (64 * 128), 0, step), step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(product);
#pragma unroll
        for (int i = 0; i < 32; i++) o[32 * part + i] = __fmaf_rn(o[32 * part + i], alpha[i / 2 % 2], product[i]);
    }
}

__device__ __forceinline__ void store(const float (&o)[N_OUT / 2], const Rows& rows, const Arguments& a, float of_values,
                                      unsigned short* out, float* m, float* inv, int row, const Tile& tile) {
    float last[2];
    finish(last, rows, a, m, inv, tile.batch, tile.head, row, tile.column == 0);
    out += tile.batch * a.out_b + tile.head * a.out_h + row * a.out_s + tile.column;
    store_rows(o, __fmul_rn(last[0], of_values), __fmul_rn(last[1], of_values), out, a.out_s, a.sq - row,
               a.d - tile.column);
}

__device__ __forceinline__ void consume(Shared& shared, const Arguments& a, float of_scores, float of_values,
                                        unsigned short* out, float* m, float* inv, int warpgroup) {
    Generator generator{};
    if constexpr (DROPOUT) generator = read_state_once(a.rng_state);
    const Trade trade;
    Stage<Q_STAGES> queries;
    Stage<STAGES> keys;
    Stage<2> tiles;
    for (;; queries.advance(), tiles.advance()) {
        shared.tile_box[tiles.index].wait_full(tiles.parity);
        const Tile tile = shared.tile[tiles.index];
        shared.tile_box[tiles.index].arrive_empty();
        if (tile.head < 0) break;
        const int warp_row = tile.first + threadIdx.x / 32 * 16, row = warp_row + threadIdx.x % 32 / 4;
        const unsigned q = shared_address(shared.q[queries.index]) + warpgroup * (64 * 128);
        const unsigned char* mask = head_mask(a, tile.batch, tile.head);
        Rows rows{{kLowest, kLowest}, {0.0f, 0.0f}};
        float o[N_OUT / 2];
#pragma unroll
        for (int i = 0; i < N_OUT / 2; i++) o[i] = 0.0f;
        const auto counter = DROPOUT ? tile_counter(a, tile.batch * a.heads + tile.head, warp_row / 16, 0) : 0;
        const auto soften = [&](float(&s)[64], float(&alpha)[2], int j) {
            const int key = j * kTileRows + 2 * (threadIdx.x % 4);
            if ((j + 1) * kTileRows > key_limit(a, warp_row)) hide_after(s, a, row, key);
            if (j * kTileRows < key_from(a, warp_row + 15)) hide_before(s, a, row, key);
            if (mask != nullptr && !hides_nothing(a, mask, j * kTileRows)) hide_masked(s, a, mask, row, key);
            weigh<kHeadroom>(s, rows, alpha, of_scores);
            if constexpr (DROPOUT) drop(s, generator, counter + 256 * j, a.threshold);
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
        const Range blocks = visited_by(a, tile.first + 64 * warpgroup);
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
                soften(s, alpha, j);
#pragma unroll
                for (int step = 0; step < 4; step++) pack_codes(p[step], s, step, trade);
            }
            shared.v_box[keys.index].wait_full(keys.parity);
            add_values(o, alpha, p, shared_address(shared.v[keys.index]));
            shared.v_box[keys.index].arrive_empty();
        }
        shared.q_box[queries.index].arrive_empty();
        store(o, rows, a, of_values, out, m, inv, row, tile);
        skip(tile.blocks.to - (blocks.any() ? blocks.to : tile.blocks.from));
    }
}

extern "C" __global__ void __launch_bounds__(128 * (kConsumers + 1), 1)
    attention_fp8(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
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
