// Attention of few queries and many keys: the words of attention.cu, with keys shared among blocks of threads.
//
// q of at most ROWS rows a key head (the queries of a group's heads: row = head of the group * sq + query); k and v
// [b, hkv, skv, d] of bf16 or fp16 through tensor maps, or with CODES pages of E4M3 codes and a scale_inv of each head of
// each key. Definition, order and rounding points: reference/ops/attentions/attention.py.
//
// What the written order leaves free. A score is a chain over d, so key blocks are scored side by side. m of a block is
// the largest of exponents up to it, whatever the order in which they are compared, so weights of all blocks, their
// alphas and their sums in a lane need nothing but scores and these exponents. O = (O alpha) + P v is one tensor-core
// chain over all keys, in which every step rounds: it cannot be cut along keys, but each channel of a row is a chain of
// its own. Therefore two kernels:
//
//   attention_scores  blocks of threads for (key head, some of its key blocks): scores and the largest exponent of a row
//                     in a key block, to memory
//   attention_chain   a block of threads for (key head, 64 channels): eight warps weigh, four key blocks at a time, ahead
//                     of one warpgroup that goes along the chain: eight steps of the tensor core a key block
//
// The tensor core multiplies transposed: keys, or channels, are the 64 rows of A, and queries the columns. Products and
// the sum of a step's are the same ones.
//
// With SEGMENT keys are in segments (reference/ops/attentions/attention_segments.py), each with a chain of its own: a block
// of threads for (key head, 64 channels, segment). Each writes what it found, and the last one to come adds all of them.
//
// Defines: FORMAT (BF16 | FP16), ROWS (8 | 16 | 32), CODES (0 | 1; 1 with BF16 alone), SEGMENT (0 | keys of a segment).
#include "attention_segments.cuh"
#include "ptx/count.cuh"
#include "ptx/cvt_fp8.cuh"
#include "ptx/grid.cuh"
#include "ptx/wgmma_narrow.cuh"

#ifndef SEGMENT
#define SEGMENT 0
#endif

using namespace twin;

// Lengths and starts may be missing; then they are those of all entries.
struct Config : AttentionDefaults {
    using Format = FORMAT;
    static constexpr bool kLengths = true, kPacked = true;
};
using Format = Config::Format;
using Limits = EntryLimits<Config>;

constexpr int kRows = ROWS, kAcc = kRows / 2;
constexpr int kChunk = kTileRows * 128;              // bytes of 128 keys and 64 channels
constexpr int kRawChunk = kTileRows * 64;            // and of their codes
constexpr int kLoaded = CODES ? kRawChunk : kChunk;  // and as they are loaded
constexpr int kRowsChunk = kRows * 128;              // bytes of all rows and 64 channels, or keys
constexpr int kScoreStages = 3, kChainStages = 6;    // of loads
constexpr int kTiles = CODES ? 2 : kChainStages;     // of values that the chain reads
constexpr int kGroups = 4, kGroupThreads = 64;       // that weigh
constexpr int kWeighers = 128, kLoader = kWeighers + kGroups * kGroupThreads, kConverters = kLoader + 32;  // threads

// The fields of optimized/ops/attentions/attention_decode.py's structured array, in its order.
struct DecodeArguments {
    const unsigned short* q;
    unsigned short* out;
    float *m, *inv;
    float *scores, *tops;  // [batches * key heads, blocks, rows, 128] and without the last one
    const float* sinks;    // [heads], or null
    const int *q_lengths, *kv_lengths, *q_starts, *kv_starts, *page_table;         // each may be null
    const float *k_scales, *v_scales;                                              // [rows of a cache, key heads]
    const unsigned char* mask;                                                     // null, or as in CommonArguments
    long long mask_b, mask_h, mask_i, mask_j, q_b, q_h, q_s, out_b, out_h, out_s;  // strides in elements
    int heads, group, sq, skv, d, e;
    int lower, upper, ends_align;  // as in CommonArguments and LengthArguments
    int q_rows, kv_rows;           // of packed tensors
    int pages, page_size, blocks;
    float c;
};

struct SegmentArguments {
    float* found;       // [batches * key heads, segments, chunks of channels, kFound, 128]
    unsigned* arrived;  // [batches * key heads, chunks of channels]
    int chunks;         // of 64 channels of values
};
constexpr int kSegmentBlocks = SEGMENT / kTileRows;
static_assert(SEGMENT % kTileRows == 0, "a segment has whole blocks of keys");

struct Arguments : DecodeArguments, Optional<SegmentArguments, (SEGMENT > 0)> {};

// One of a batch's key heads.
struct Head {
    Limits limits;
    Range blocks;
    int batch, key_head, key_heads, rows;

    __device__ __forceinline__ Head(const Arguments& a, int place) {
        key_heads = a.heads / a.group, batch = place / key_heads, key_head = place % key_heads, rows = a.group * a.sq;
        const bool packed = a.q_starts != nullptr, paged = a.page_table != nullptr;
        limits.q_start = packed ? min(max(__ldg(a.q_starts + batch), 0), a.q_rows) : 0;
        limits.kv_start = packed && !paged ? min(max(__ldg(a.kv_starts + batch), 0), a.kv_rows) : 0;
        limits.sq = a.q_lengths == nullptr ? a.sq : min(max(__ldg(a.q_lengths + batch), 0), a.sq);
        limits.skv = a.kv_lengths == nullptr ? a.skv : min(max(__ldg(a.kv_lengths + batch), 0), a.skv);
        if (packed) limits.sq = min(limits.sq, a.q_rows - limits.q_start);
        if (packed && !paged) limits.skv = min(limits.skv, a.kv_rows - limits.kv_start);
        const int shift = a.ends_align ? limits.skv - limits.sq : 0;
        limits.lower = a.lower + shift, limits.upper = a.upper + shift;
        blocks = visited(limits, 0);
    }

    // The row of k and v at which a block of keys begins.
    __device__ __forceinline__ int key_row(const Arguments& a, int block) const {
        const int key = block * kTileRows;
        if (a.page_table == nullptr) return key + limits.kv_start;
        return __ldg(a.page_table + batch * a.pages + key / a.page_size) * a.page_size + key % a.page_size;
    }

    // Where the scales of a block's keys begin. A page that the cache does not have is loaded as zeros; its scales are
    // read from a page that there is.
    __device__ __forceinline__ long long scales_at(const Arguments& a, int block) const {
        const int row = min(max(key_row(a, block), 0), a.kv_rows - kTileRows);
        return static_cast<long long>(row) * key_heads + key_head;
    }

    // The entry that tensor maps are asked for: packed tensors have one.
    __device__ __forceinline__ int map_batch(const Arguments& a) const { return a.q_starts == nullptr ? batch : 0; }
};

// 16 codes as bf16 numbers: two units of 16 bytes.
__device__ __forceinline__ void decode(uint4 (&numbers)[2], const uint4& codes, float scale) {
    const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
    unsigned found[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const unsigned two = cvt_f16x2_e4m3x2(static_cast<unsigned short>(words[i / 2] >> i % 2 * 16));
        found[i] = cvt_bf16x2(__fmul_rn(cvt_f32_f16(static_cast<unsigned short>(two & 0xFFFF)), scale),
                              __fmul_rn(cvt_f32_f16(static_cast<unsigned short>(two >> 16)), scale));
    }
    numbers[0] = make_uint4(found[0], found[1], found[2], found[3]);
    numbers[1] = make_uint4(found[4], found[5], found[6], found[7]);
}

// 128 keys and 64 channels of codes, [128][64 bytes], as a chunk of numbers; keys from `count` on become zeros. By 128
// threads.
__device__ __forceinline__ void decode_chunk(unsigned char* to, const unsigned char* from, const float* scales,
                                             int scale_step, int count) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int at = threadIdx.x % 128 + 128 * n, key = at / 4, unit = at % 4;
        uint4 numbers[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
        if (key < count) decode(numbers, reinterpret_cast<const uint4*>(from)[at], __ldg(scales + key * scale_step));
#pragma unroll
        for (int i = 0; i < 2; i++)
            *reinterpret_cast<uint4*>(to + key * 128 + ((2 * unit + i) ^ key % 8) * 16) = numbers[i];
    }
}

// Queries as B of the first product: [rows][d], swizzled; rows that there are not, and channels, are zeros. By 128 threads.
__device__ __forceinline__ void load_queries(unsigned char* to, const Arguments& a, const Head& head, int chunks) {
    const unsigned short* from =
        a.q + head.batch * a.q_b * (a.q_starts == nullptr) + static_cast<long long>(head.limits.q_start) * a.q_s;
    for (int at = threadIdx.x; at < kRows * chunks * 8; at += 128) {
        const int row = at / (chunks * 8), unit = at % (chunks * 8), query = row % a.sq;
        const int n = head.key_head * a.group + row / a.sq;
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (row < head.rows && query < head.limits.sq && unit * 8 < a.d)
            eight = *reinterpret_cast<const uint4*>(from + n * a.q_h + query * a.q_s + unit * 8);
        *reinterpret_cast<uint4*>(to + unit / 8 * kRowsChunk + row * 128 + (unit % 8 ^ row % 8) * 16) = eight;
    }
}

struct __align__(1024) Scoring {
    unsigned char q[4 * kRowsChunk];
    Mailbox box[kScoreStages];
    float maxima[2][4][kRows];
};
static_assert(sizeof(Scoring) <= 4 * kRowsChunk + 2048, "what the host counts");

// Behind `Scoring` lie a tile of numbers, with CODES, and the ring of loads.
extern "C" __global__ void __launch_bounds__(160)
    attention_scores(const __grid_constant__ CUtensorMap k, const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Scoring& shared = *reinterpret_cast<Scoring*>(memory);
    Mailbox(&box)[kScoreStages] = shared.box;
    if (threadIdx.x == 0) {
        for (Mailbox& one : box) one.init(1, 4);
        fence_mbarrier_init();
    }
    __syncthreads();
    let_next_grid_start();
#if SEGMENT
    if (blockIdx.x == 0 && threadIdx.x < a.chunks) a.arrived[blockIdx.y * a.chunks + threadIdx.x] = 0;
#endif
    const Head head(a, blockIdx.y);
    const int chunks = (a.d + 63) / 64, first = head.blocks.from + blockIdx.x;
    unsigned char* const tile = memory + sizeof(Scoring);
    unsigned char* const ring = tile + (CODES ? chunks * kChunk : 0);
    Stage<kScoreStages> stage;
    if (threadIdx.x >= 128) {
        if (threadIdx.x > 128) return;
        for (int j = first; j < head.blocks.to; j += gridDim.x, stage.advance()) {
            const unsigned full = shared_address(&box[stage.index].full);
            const int row = head.key_row(a, j);
            box[stage.index].wait_empty(stage.parity);
            mbarrier_arrive_expect_tx(full, chunks * kLoaded);
            for (int c = 0; c < chunks; c++)
                tma_load_5d(shared_address(ring) + (stage.index * chunks + c) * kLoaded, &k, full, 64 * c, row,
                            head.key_head, head.map_batch(a), 0);
        }
        return;
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    load_queries(shared.q, a, head, chunks);
    fence_proxy_async();
    barrier_sync<128>(1);
    const unsigned q = shared_address(shared.q);
    int query[kAcc / 2];                  // of column 8 t + 2 (l % 4) + e, at 2 t + e
    const unsigned char* mask[kAcc / 2];  // its row
#pragma unroll
    for (int n = 0; n < kAcc / 2; n++) {
        const int row = n / 2 * 8 + lane % 4 * 2 + n % 2;
        query[n] = row < head.rows ? row % a.sq : a.sq;
        mask[n] =
            a.mask + head.batch * a.mask_b + (head.key_head * a.group + row / a.sq) * a.mask_h + query[n] * a.mask_i;
    }
    for (int j = first, turn = 0; j < head.blocks.to; j += gridDim.x, turn ^= 1, stage.advance()) {
        unsigned char* loaded = ring + stage.index * chunks * kLoaded;
        box[stage.index].wait_full(stage.parity);
        if constexpr (CODES) {
            const long long place = head.scales_at(a, j);
            for (int c = 0; c < chunks; c++)
                decode_chunk(tile + c * kChunk, loaded + c * kRawChunk, a.k_scales + place, head.key_heads,
                             head.limits.skv - j * kTileRows);
            fence_proxy_async();
            box[stage.index].arrive_empty();
            barrier_sync<128>(1);
            loaded = tile;
        }
        const unsigned keys = shared_address(loaded);
        float s[2][kAcc];  // of keys 16 w + l / 4 + 8 (i / 2) and those 64 below
#pragma unroll
        for (int i = 0; i < kAcc; i++) s[0][i] = s[1][i] = 0.0f;
#pragma unroll 1
        for (int c = 0; c < chunks; c++) {
            wgmma_hold(s[0]);
            wgmma_hold(s[1]);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; step++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    wgmma_k16<Format, 0, 0>(s[half], along_d(keys + c * kChunk + half * (64 * 128), kChunk, step),
                                            along_d(q + c * kRowsChunk, kRowsChunk, step), 1);
            wgmma_commit();
            wgmma_wait<0>();
        }
        wgmma_hold(s[0]);
        wgmma_hold(s[1]);
        if constexpr (!CODES) box[stage.index].arrive_empty();
        const long long place = static_cast<long long>(blockIdx.y) * a.blocks + j;
        float* const scores = a.scores + place * head.rows * kTileRows;
#pragma unroll
        for (int n = 0; n < kAcc / 2; n++) {
            const int row = n / 2 * 8 + lane % 4 * 2 + n % 2;
            float top = TWIN_HIDDEN;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = 64 * (i / 2) + 16 * warp + lane / 4 + 8 * (i % 2);
                float& score = s[i / 2][n / 2 * 4 + i % 2 * 2 + n % 2];
                const int place = j * kTileRows + key;
                if (query[n] >= head.limits.sq || unseen(head.limits, query[n], place))
                    score = TWIN_HIDDEN;
                else if (a.mask != nullptr && __ldg(mask[n] + place * a.mask_j) != 0)
                    score = TWIN_HIDDEN;
                top = fmaxf(top, score);
                if (row < head.rows) scores[row * kTileRows + key] = score;
            }
#pragma unroll
            for (int apart = 4; apart < 32; apart *= 2) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, apart));
            if (lane < 4) shared.maxima[turn][warp][row] = top;
        }
        barrier_sync<128>(1);
        if (threadIdx.x < head.rows) {
            float top = TWIN_HIDDEN;
#pragma unroll
            for (int w = 0; w < 4; w++) top = fmaxf(top, shared.maxima[turn][w][threadIdx.x]);
            a.tops[place * head.rows + threadIdx.x] = kGrid15 - __fmaf_rn(-top, a.c, kGrid15);
        }
    }
}

struct __align__(1024) Shared {
    unsigned char v[kTiles][kChunk];
    unsigned char p[kGroups][2 * kRowsChunk];
    unsigned char codes[CODES ? kChainStages : 1][CODES ? kRawChunk : 16];
    Mailbox v_box[kTiles], codes_box[kChainStages], p_box[kGroups];
    float alpha[kGroups][kRows], m[kGroups][kRows], sums[kGroups][kRows][4];
    float last[kRows];
};

// The weights of every fourth key block. Thread 8 r + c of a group has keys 8 t + c of rows r, r + 8, ..
__device__ __forceinline__ void weigh(Shared& shared, const Arguments& a, const Head& head) {
    const int group = (threadIdx.x - kWeighers) / kGroupThreads, thread = threadIdx.x % kGroupThreads;
    const int own = thread / 8, key = thread % 8;
    float m[kRows / 8];
#pragma unroll
    for (int n = 0; n < kRows / 8; n++) m[n] = kLowest;
    unsigned parity = 0;
    for (int j = head.blocks.from + group; j < head.blocks.to; j += kGroups, parity ^= 1) {
        const long long place = static_cast<long long>(blockIdx.y) * a.blocks;
        Mailbox& box = shared.p_box[group];
        bool empty = false;
#pragma unroll
        for (int n = 0; n < kRows / 8; n++) {
            const int row = 8 * n + own;
            const bool exists = row < head.rows;
            const float* const scores = a.scores + ((place + j) * head.rows + row) * kTileRows + key;
            const float* const tops = a.tops + place * head.rows + row;
            float s[16], before = m[n];
#pragma unroll
            for (int t = 0; t < 16; t++) s[t] = exists ? scores[8 * t] : TWIN_HIDDEN;
            float top[kGroups];  // of this key block and of those that other groups have weighed since this one's last
#pragma unroll
            for (int i = 0; i < kGroups; i++)
                top[i] = exists && j - i >= head.blocks.from ? tops[(j - i) * head.rows] : kLowest;
#pragma unroll
            for (int i = 1; i < kGroups; i++) before = fmaxf(before, top[i]);
            m[n] = fmaxf(before, top[0]);
            if (!empty) box.wait_empty(parity);
            empty = true;
            unsigned char* const p = shared.p[group] + row * 128 + key * 2;
            const float base = kGrid15 - m[n];
            float sum = 0.0f;
#pragma unroll
            for (int t = 0; t < 16; t++) {
                const float one = weight(s[t], a.c, base);
                sum = sum + one;
                const unsigned short word = static_cast<unsigned short>(pack_pair<Format>(one, 0.0f));
                *reinterpret_cast<unsigned short*>(p + t / 8 * kRowsChunk + (t % 8 ^ own) * 16) = word;
            }
            sum = sum + __shfl_xor_sync(0xFFFFFFFF, sum, 1);
            if (key % 2 == 0) shared.sums[group][row][key / 2] = sum;
            if (key == 0) shared.alpha[group][row] = exp2_grid(before - m[n]), shared.m[group][row] = m[n];
        }
        fence_proxy_async();
        box.arrive_full();
    }
}

// The segments that a key head visits, and this block's one, of which it visits `blocks`.
struct Segments {
    int first, count;
    Range blocks;

    // Without a key there is one segment, which is empty.
    __device__ __forceinline__ Segments(const Range& all, int number) {
        constexpr int kBlocks = SEGMENT > 0 ? kSegmentBlocks : 1;
        first = all.any() ? all.from / kBlocks : 0;
        count = all.any() ? (all.to - 1) / kBlocks - first + 1 : 1;
        blocks = {max(all.from, number * kBlocks), min(all.to, number * kBlocks + kBlocks)};
    }

    __device__ __forceinline__ bool has(int number) const { return number >= first && number < first + count; }
};

#if SEGMENT
constexpr int kFound = kAcc + 2;  // floats of a thread of the chain: O, m and l

// Adds the segments of a key head, if all have come; false if others are to come. o, m and l as in `chain`.
__device__ __forceinline__ bool add_segments(float (&o)[kAcc], float& m, float& l, const Arguments& a,
                                             const Segments& segments) {
    __shared__ unsigned before;
    const auto of_segment = [&](int n) {
        const long long place = (static_cast<long long>(blockIdx.y) * gridDim.z + n) * gridDim.x + blockIdx.x;
        return a.found + place * (kFound * 128);
    };
    float* const own = of_segment(blockIdx.z) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kAcc; i++) own[i * 128] = o[i];
    own[kAcc * 128] = m, own[(kAcc + 1) * 128] = l;
    barrier_sync<128>(1);
    if (threadIdx.x == 0) before = count_arrival(a.arrived + blockIdx.y * gridDim.x + blockIdx.x);
    barrier_sync<128>(1);
    if (before + 1 < segments.count) return false;
    float tops[kAcc / 2];  // m of the rows of o[i], at i / 4 * 2 + i % 2
    for (int n = segments.first; n < segments.first + segments.count; n++) {
        const float* const of_block = of_segment(n);
        const float* const found = of_block + threadIdx.x;
        const bool is_first = n == segments.first;
        Factors by[kAcc / 2];
#pragma unroll
        for (int i = 0; i < kAcc / 2; i++) {
            const int row = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
            const float top = of_block[kAcc * 128 + 4 * row];  // as its first lane has it
            if (is_first) tops[i] = top;
            by[i] = join_largest(tops[i], top);
        }
#pragma unroll
        for (int i = 0; i < kAcc; i++)
            o[i] = is_first ? found[i * 128] : join_outputs(o[i], found[i * 128], by[i / 4 * 2 + i % 2]);
        const float own_m = found[kAcc * 128], own_l = found[(kAcc + 1) * 128];
        if (is_first) {
            m = own_m, l = own_l;
        } else {
            const Factors of_sums = join_largest(m, own_m);
            l = join_sums(l, own_l, of_sums);
        }
    }
    return true;
}
#endif

// One warpgroup: channels 16 w + l / 4 + 8 (i / 2) of the block's 64 in o[4 t + i], of row 8 t + 2 (l % 4) + i % 2.
__device__ __forceinline__ void chain(Shared& shared, const Arguments& a, const Head& head, const Segments& segments) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float o[kAcc], m = kLowest, l = 0.0f;  // m and l of row threadIdx.x / 4; l of a lane of the definition's
#pragma unroll
    for (int i = 0; i < kAcc; i++) o[i] = 0.0f;
    Stage<kTiles> values;
    Stage<kGroups> weights;
    for (int j = head.blocks.from; j < head.blocks.to; j++, values.advance(), weights.advance()) {
        const int n = weights.index;
        shared.p_box[n].wait_full(weights.parity);
#pragma unroll
        for (int i = 0; i < kAcc; i++) o[i] = __fmul_rn(o[i], shared.alpha[n][i / 4 * 8 + lane % 4 * 2 + i % 2]);
        if (threadIdx.x < 4 * kRows) {
            l = __fmaf_rn(l, shared.alpha[n][threadIdx.x / 4], shared.sums[n][threadIdx.x / 4][threadIdx.x % 4]);
            m = shared.m[n][threadIdx.x / 4];
        }
        shared.v_box[values.index].wait_full(values.parity);
        if (!CODES && a.q_starts != nullptr && (j + 1) * kTileRows > head.limits.skv)
            clear_rows<1>(shared.v[values.index], kChunk, head.limits.skv - j * kTileRows, kTileRows, 0);
        const unsigned v = shared_address(shared.v[values.index]), p = shared_address(shared.p[n]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 8; step++)
            wgmma_k16<Format, 1, 0>(o, along_rows(v, kChunk, step), along_d(p, kRowsChunk, step), 1);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(o);
        shared.v_box[values.index].arrive_empty();
        shared.p_box[n].arrive_empty();
    }
#if SEGMENT
    if (segments.count > 1 && !add_segments(o, m, l, a, segments)) return;
#endif
    if (threadIdx.x < 4 * kRows) {
        const int row = threadIdx.x / 4, query = row % a.sq, n = head.key_head * a.group + row / a.sq;
        l = l + __shfl_xor_sync(0xFFFFFFFF, l, 1);
        l = l + __shfl_xor_sync(0xFFFFFFFF, l, 2);
        if (row < head.rows && a.sinks != nullptr) l = l + exp2_grid(__fmul_rn(__ldg(a.sinks + n), kLog2e) - m);
        const float inverse = l == 0.0f ? 0.0f : __fdiv_rn(1.0f, l);
        if (threadIdx.x % 4 == 0) shared.last[row] = inverse;
        if (threadIdx.x % 4 == 0 && row < head.rows && blockIdx.x == 0) {
            const long long at = static_cast<long long>(head.batch * a.heads + n) * a.sq + query;
            a.m[at] = m, a.inv[at] = inverse;
        }
    }
    barrier_sync<128>(1);
    const int written = a.q_starts == nullptr ? a.sq : head.limits.sq;
#pragma unroll
    for (int i = 0; i < kAcc; i++) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, query = row % a.sq, n = head.key_head * a.group + row / a.sq;
        const int channel = blockIdx.x * 64 + 16 * warp + lane / 4 + i / 2 % 2 * 8;
        if (row >= head.rows || query >= written || channel >= a.e) continue;
        const unsigned short word =
            static_cast<unsigned short>(pack_pair<Format>(__fmul_rn(o[i], shared.last[row]), 0.0f));
        const long long entry = a.q_starts == nullptr ? head.batch * a.out_b : head.limits.q_start * a.out_s;
        a.out[entry + n * a.out_h + query * a.out_s + channel] = word;
    }
}

// Zeros in the rows of out that no packed sequence has: those behind this one, and before the first. In this block's heads
// and channels. By 128 threads.
__device__ __forceinline__ void clear_gaps(const Arguments& a, const Head& head) {
    if (a.q_starts == nullptr) return;
    const int batches = gridDim.y / head.key_heads;
    const auto clear = [&](int from, int to) {
        for (int n = threadIdx.x; n < (to - from) * a.group * 8; n += 128) {
            const int row = from + n / (8 * a.group), channel = 64 * blockIdx.x + n % 8 * 8;
            const int query = head.key_head * a.group + n / 8 % a.group;
            if (channel >= a.e) continue;
            *reinterpret_cast<uint4*>(a.out + row * a.out_s + query * a.out_h + channel) = make_uint4(0, 0, 0, 0);
        }
    };
    const int next = head.batch + 1 < batches ? min(max(__ldg(a.q_starts + head.batch + 1), 0), a.q_rows) : a.q_rows;
    clear(head.limits.q_start + head.limits.sq, next);
    if (head.batch == 0) clear(0, head.limits.q_start);
}

extern "C" __global__ void __launch_bounds__(kConverters + 128 * CODES)
    attention_chain(const __grid_constant__ CUtensorMap v, const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (Mailbox& box : shared.v_box) box.init(CODES ? 4 : 1, 4);
        for (Mailbox& box : shared.codes_box) box.init(1, 4);
        for (Mailbox& box : shared.p_box) box.init(kGroupThreads / 32, 4);
        fence_mbarrier_init();
    }
    __syncthreads();
    Head head(a, blockIdx.y);
    const Segments segments(head.blocks, blockIdx.z);
    if constexpr (SEGMENT > 0) {
        if (!segments.has(blockIdx.z)) return;
        head.blocks = segments.blocks;
    }
    if (threadIdx.x == kLoader) {  // what it reads is older than the scores
        Stage<kChainStages> stage;
        Mailbox* const boxes = CODES ? shared.codes_box : shared.v_box;
        for (int j = head.blocks.from; j < head.blocks.to; j++, stage.advance()) {
            const unsigned full = shared_address(&boxes[stage.index].full);
            boxes[stage.index].wait_empty(stage.parity);
            mbarrier_arrive_expect_tx(full, kLoaded);
            tma_load_5d(shared_address(CODES ? shared.codes[stage.index * CODES] : shared.v[stage.index % kTiles]), &v,
                        full, 64 * blockIdx.x, head.key_row(a, j), head.key_head, head.map_batch(a), 0);
        }
    } else if (CODES && threadIdx.x >= kConverters) {
        Stage<kChainStages> stage;
        Stage<kTiles> values;
        for (int j = head.blocks.from; j < head.blocks.to; j++, stage.advance(), values.advance()) {
            const long long place = head.scales_at(a, j);
            shared.codes_box[stage.index].wait_full(stage.parity);
            shared.v_box[values.index].wait_empty(values.parity);
            decode_chunk(shared.v[values.index], shared.codes[stage.index * CODES], a.v_scales + place, head.key_heads,
                         head.limits.skv - j * kTileRows);
            fence_proxy_async();
            shared.codes_box[stage.index].arrive_empty();
            shared.v_box[values.index].arrive_full();
        }
    } else if (threadIdx.x < kLoader) {
        wait_for_grid_before();
        if (threadIdx.x < kWeighers) {
            if (blockIdx.z == segments.first) clear_gaps(a, head);
            chain(shared, a, head, segments);
        } else
            weigh(shared, a, head);
    }
}
