// What the attention kernels share: their configuration, their arguments, tiles in shared memory, the mask, dropout.
//
// Operands are [rows][d] tiles in shared memory: chunks of 64 values of d, each [rows][128 bytes], swizzled by 128
// bytes, as the copy engine leaves them. A chunk serves as a K-major operand (the GEMM runs over d) and as an
// MN-major one (it runs over rows). What lies outside a tensor arrives as zeros.
//
// Arithmetic: reference/ops/attentions/attention.py and attention_backward.py.
#pragma once

#include "common/elementary.cuh"
#include "common/mailbox.cuh"
#include "common/nothing.cuh"
#include "common/philox.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cvt.cuh"
#include "ptx/fence.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma_registers.cuh"
#include "common/transpose.cuh"

namespace twin {

constexpr int kTileRows = 128;                                     // queries, or keys, of a block
constexpr int kWarpgroups = 2;                                     // of the backward, with 64 rows each
#define TWIN_HIDDEN __int_as_float(static_cast<int>(0xFF800000u))  // the score of a hidden pair, -inf
constexpr float kLowest = -1.2676506002282294e30f;                 // -2^100

// A configuration is a struct with these names and, without a default, Format (BF16 | FP16) and those that a kernel's
// file says.
struct AttentionDefaults {
    static constexpr bool kDropout = false;
    static constexpr bool kBias = false;     // scores have a bias (attention_bias.cuh)
    static constexpr bool kSink = false;     // heads have a sink
    static constexpr bool kLengths = false;  // entries of the batch have lengths (attention_lengths.py)
    static constexpr bool kPacked = false;   // entries lie one after the other in [tokens, heads, d]; they have lengths
    static constexpr int kPlaced = 0;        // of which larger tensor dropout draws (tile_counter)
    static constexpr bool kPaged = false;    // keys and values are in pages (attention_paged.py); entries are packed
};

// A part of a struct that only some configurations have.
template <class Part, bool kHas>
struct Optional {};
template <class Part>
struct Optional<Part, true> : Part {};

template <bool kFirst, class First, class Second>
struct Choice {
    using Type = First;
};
template <class First, class Second>
struct Choice<false, First, Second> {
    using Type = Second;
};

struct CommonArguments {
    const unsigned long long* rng_state;
    const unsigned char* mask;
    long long mask_b, mask_h, mask_i, mask_j;  // strides, 0 where the mask is broadcast
    long long out_b, out_h, out_s;             // strides of the tensor(s) written, in elements
    int batches, heads, group, sq, skv, d;
    int together;        // heads that the kernels take at a time
    int lower, upper;    // query i sees key j if i + lower <= j <= i + upper; -2^30 and 2^30 are no limits; see Limits
    unsigned threshold;  // of dropout
    float c, kept, scale;
};

struct BiasArguments {
    const void* bias;                  // null for ALiBi
    const float* slopes;               // of ALiBi
    long long bias_b, bias_h, bias_i;  // strides of the bias, in elements; a row's elements are neighbours
    long long slope_b;
    int bias_is_fp32, diagonal;  // ALiBi's bias is 0 where key = query + diagonal
};

struct SinkArguments {
    const float* sinks;  // [heads]
};

struct LengthArguments {
    const int *q_lengths, *kv_lengths;  // [batches]; null: all of sq, all of skv
    int ends_align;  // whether the diagonal ends at an entry's last query and key, not starts at (0, 0)
};

struct PackedArguments {
    const int *q_lengths, *kv_lengths;
    int ends_align;
    int q_rows, kv_rows;              // of the tensors
    const int *q_starts, *kv_starts;  // [batches]: an entry's first rows; sq and skv are the longest entries'
};

struct PageArguments {
    const int* page_table;  // [batches, pages]
    int pages, page_size;   // of an entry; keys of a page, a multiple of kTileRows
};

// The fields of optimized/ops/attentions/attention.py's structured array, in its order.
template <class Config_>
struct AttentionArguments : CommonArguments,
                            Optional<BiasArguments, Config_::kBias>,
                            Optional<SinkArguments, Config_::kSink>,
                            Optional<LengthArguments, Config_::kLengths && !Config_::kPacked>,
                            Optional<PackedArguments, Config_::kPacked>,
                            Optional<PageArguments, Config_::kPaged> {
    using Config = Config_;
    static_assert(Config::kLengths || !Config::kPacked, "packed entries have lengths");
    static_assert(Config::kPacked || !Config::kPaged, "queries of entries with pages are packed");
};

// One struct for each, as structs with several bases are not copied as a whole.
template <bool kBias, bool kPacked>
struct LimitFields {
    int sq, skv, lower, upper;
};
template <>
struct LimitFields<true, false> {
    int sq, skv, lower, upper, diagonal;
};
template <>
struct LimitFields<false, true> {
    int sq, skv, lower, upper, q_start, kv_start;
};
template <>
struct LimitFields<true, true> {
    int sq, skv, lower, upper, diagonal, q_start, kv_start;
};

template <class Config_>
struct EntryLimits : LimitFields<Config_::kBias, Config_::kPacked> {
    using Config = Config_;
};

// The queries and keys that an entry of the batch has, and which of them see each other: a part of the arguments, or
// what lengths leave of it.
template <class Config>
using AttentionLimits = typename Choice<Config::kLengths, EntryLimits<Config>, AttentionArguments<Config>>::Type;

template <class Config>
__device__ __forceinline__
    typename Choice<Config::kLengths, EntryLimits<Config>, const AttentionArguments<Config>&>::Type
    limits_of(const AttentionArguments<Config>& a, int batch) {
    if constexpr (Config::kLengths) {
        EntryLimits<Config> of;
        if constexpr (Config::kPacked) {
            of.q_start = min(max(__ldg(a.q_starts + batch), 0), a.q_rows);
            of.kv_start = Config::kPaged ? 0 : min(max(__ldg(a.kv_starts + batch), 0), a.kv_rows);
            of.sq = min(min(max(__ldg(a.q_lengths + batch), 0), a.sq), a.q_rows - of.q_start);
            of.skv =
                min(min(max(__ldg(a.kv_lengths + batch), 0), a.skv), Config::kPaged ? a.skv : a.kv_rows - of.kv_start);
        } else {
            of.sq = a.q_lengths == nullptr ? a.sq : min(max(__ldg(a.q_lengths + batch), 0), a.sq);
            of.skv = a.kv_lengths == nullptr ? a.skv : min(max(__ldg(a.kv_lengths + batch), 0), a.skv);
        }
        const int shift = a.ends_align ? of.skv - of.sq : 0;
        of.lower = a.lower + shift, of.upper = a.upper + shift;
        if constexpr (Config::kBias) of.diagonal = shift;
        return of;
    } else {
        return a;
    }
}

// What a tile or a work carries with it of its entry's lengths.
template <class Config, bool = Config::kLengths>
struct OwnLimits {
    EntryLimits<Config> limits;

    __device__ __forceinline__ void carry(const EntryLimits<Config>& own) { limits = own; }
};
template <class Config>
struct OwnLimits<Config, false> {
    __device__ __forceinline__ void carry(const AttentionArguments<Config>&) {}
};

template <class Config>
__device__ __forceinline__ const AttentionLimits<Config>& limits_of(const AttentionArguments<Config>& a,
                                                                    const OwnLimits<Config>& own) {
    if constexpr (Config::kLengths)
        return own.limits;
    else
        return a;
}

// The rows of a tensor at which an entry's queries and keys begin, and up to which results are written.
template <class Limits>
__device__ __forceinline__ int q_start(const Limits& limits) {
    if constexpr (Limits::Config::kPacked) return limits.q_start;
    return 0;
}
template <class Limits>
__device__ __forceinline__ int kv_start(const Limits& limits) {
    if constexpr (Limits::Config::kPacked) return limits.kv_start;
    return 0;
}
template <class Limits>
__device__ __forceinline__ int q_written(const CommonArguments& a, const Limits& limits) {
    return Limits::Config::kPacked ? limits.sq : a.sq;
}
template <class Limits>
__device__ __forceinline__ int kv_written(const CommonArguments& a, const Limits& limits) {
    return Limits::Config::kPacked ? limits.skv : a.skv;
}

// The row at which an entry's key `key`, the first of a block, lies.
template <class Config, class Limits>
__device__ __forceinline__ int key_row(const AttentionArguments<Config>& a, const Limits& limits, int batch, int key) {
    if constexpr (Config::kPaged)
        return __ldg(a.page_table + batch * a.pages + key / a.page_size) * a.page_size + key % a.page_size;
    else
        return key + kv_start(limits);
}

// What a weight's exponent has of a score, which `add_bias` of attention_bias.cuh has multiplied where there is a bias.
template <class Config>
__device__ __forceinline__ float factor(const AttentionArguments<Config>& a) {
    return Config::kBias ? 1.0f : a.c;
}

// A head's [sequence, d] matrix: 64 values of d from `x`, and as many rows as the map's box, from `row`. Of packed entries
// it brings rows of the next one, too: `clear_rows`.
template <class Config>
__device__ __forceinline__ void load_chunk(unsigned destination, const CUtensorMap* map, unsigned full, int x, int row,
                                           int head, int batch) {
    tma_load_5d(destination, map, full, x, row, head, Config::kPacked ? 0 : batch, 0);
}

// Rows of a tile from `from` on, up to `count`, become zeros, because 0 times the next entry's NaN or infinity is NaN. By
// one warpgroup, before it reads them; if another one reads them, it does the same.
template <int kChunks>
__device__ __forceinline__ void clear_rows(unsigned char* tile, int chunk_bytes, int from, int count, int warpgroup) {
#pragma unroll 1
    for (int at = from * 128 + threadIdx.x % 128 * 16; at < count * 128; at += 128 * 16) {
#pragma unroll
        for (int c = 0; c < kChunks; c++)
            *reinterpret_cast<uint4*>(tile + c * chunk_bytes + at) = make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async();
    barrier_sync<128>(1 + warpgroup);
}

// Descriptors. A row is 128 bytes, so 16 values of d are 2 units of 16 bytes, and 16 rows are 128 units.
__device__ __forceinline__ unsigned long long along_d(unsigned tile, int chunk_bytes, int step) {
    return wgmma_descriptor(tile + step / 4 * chunk_bytes, chunk_bytes, 1024) + step % 4 * 2;
}

__device__ __forceinline__ unsigned long long along_rows(unsigned tile, int chunk_bytes, int step) {
    return wgmma_descriptor(tile, chunk_bytes, 1024) + step * 128;
}

// Two neighbouring values of one row as a word.
template <class T>
__device__ __forceinline__ unsigned pack_pair(float low, float high) {
    if constexpr (same_type<T, BF16>) return cvt_bf16x2(low, high);
    return cvt_f16x2(low, high);
}

// Accumulators of 16 columns as an A operand.
template <class T, int kCount>
__device__ __forceinline__ void pack_operand(unsigned (&a)[4], const float (&d)[kCount], int step) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = pack_pair<T>(d[8 * step + 2 * i], d[8 * step + 2 * i + 1]);
}

// out[row of this lane and the one 8 below, columns] = round(acc * scale), of accumulators 4 t + 2 r + e. Four lanes
// trade, so that each stores 16 bytes of a row instead of 4. `rows`, `channels`: how many there are from here on. Each
// word that is stored goes to `also`, too.
template <class T, int kCount, class Also = Nothing>
__device__ __forceinline__ void store_rows(const float (&acc)[kCount], float low_scale, float high_scale,
                                           unsigned short* out, long long stride, int rows, int channels,
                                           const Also& also = {}) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float scale = r == 0 ? low_scale : high_scale;
#pragma unroll
        for (int t = 0; t < kCount / 4; t += 4) {
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                words[i] = pack_pair<T>(__fmul_rn(acc[4 * (t + i) + 2 * r], scale),
                                        __fmul_rn(acc[4 * (t + i) + 2 * r + 1], scale));
            transpose_lanes<1>(words[0], words[1], words[2], words[3]);
            const int column = 8 * (t + threadIdx.x % 4);
            if (8 * r < rows && column < channels) {
                *reinterpret_cast<uint4*>(out + 8 * r * stride + column) =
                    make_uint4(words[0], words[1], words[2], words[3]);
#pragma unroll
                for (int i = 0; i < 4; i++) also(words[i]);
            }
        }
    }
}

// A query sees keys from this one, which may be negative, ...
template <class Limits>
__device__ __forceinline__ int key_from(const Limits& a, int query) {
    return query + a.lower;
}

// ... up to this one, not included.
template <class Limits>
__device__ __forceinline__ int key_limit(const Limits& a, int query) {
    return min(a.skv, query + a.upper + 1);
}

// Whether a query does not see a key, or there is no such key. One comparison for both limits: below `lower` wraps.
template <class Limits>
__device__ __forceinline__ bool unseen(const Limits& a, int query, int key) {
    const unsigned lower = static_cast<unsigned>(a.lower);
    return key >= a.skv || static_cast<unsigned>(key - query) - lower > static_cast<unsigned>(a.upper) - lower;
}

// Blocks of 128 rows, or rows: from one up to the other, not included.
struct Range {
    int from, to;

    __device__ __forceinline__ bool any() const { return from < to; }
};

// Key blocks that the block of queries from `first` on visits.
template <class Limits>
__device__ __forceinline__ Range visited(const Limits& a, int first) {
    if (Limits::Config::kLengths && first >= a.sq) return {0, 0};
    const int from = max(key_from(a, first), 0), limit = key_limit(a, min(first + kTileRows, a.sq) - 1);
    return {from / kTileRows, from < limit ? (limit + kTileRows - 1) / kTileRows : 0};
}

// Queries whose blocks visit the block of keys from `first` on.
template <class Limits>
__device__ __forceinline__ Range visitors(const Limits& a, int first) {
    if (Limits::Config::kLengths && first >= a.skv) return {0, 0};
    const int from = first - a.upper, limit = min(first + kTileRows, a.skv) - a.lower;
    return {from >= a.sq ? a.sq : max(from, 0) & -kTileRows, min(a.sq, (max(limit, 0) + kTileRows - 1) & -kTileRows)};
}

// The mask's entry for a pair that exists; true where it is hidden.
__device__ __forceinline__ bool masked(const CommonArguments& a, const unsigned char* mask, int query, int key) {
    return __ldg(mask + query * a.mask_i + key * a.mask_j) != 0;
}

__device__ __forceinline__ const unsigned char* head_mask(const CommonArguments& a, int batch, int head) {
    return a.mask == nullptr ? nullptr : a.mask + batch * a.mask_b + head * a.mask_h;
}

// 2^x where t = x + 384 has been rounded to a multiple of 2^-15 (as adding 384 does).
__device__ __forceinline__ float weight(float score, float c, float base) {
    return ex2_approx(__fmaf_rn(score, c, base) - kGrid15);
}

// Philox index of the 16 x 16 pairs at (tile_i, tile_j) of a head, for lane 0 of the forward's layout. `kPlaced`: these are
// pairs of a larger tensor. Numbers after the state's two say which of its heads are here, with 2 also which queries and
// keys (reference/ops/attentions/attention.py).
template <int kPlaced>
__device__ __forceinline__ unsigned long long tile_counter(const CommonArguments& a, int head, int tile_i, int tile_j) {
    if constexpr (kPlaced == 0) {
        const unsigned long long tiles_i = (a.sq + 15) / 16, tiles_j = (a.skv + 15) / 16;
        return ((head * tiles_i + tile_i) * tiles_j + tile_j) * 32;
    }
    const unsigned long long* place = a.rng_state + 2;
    const unsigned here = static_cast<unsigned>(place[0]);
    const unsigned long long of_all = head / here * place[1] + place[2] + head % here;
    unsigned long long i = tile_i, tiles_i = (a.sq + 15) / 16, j = tile_j, tiles_j = (a.skv + 15) / 16;
    if constexpr (kPlaced > 1) {
        i += (place[3] + 15) / 16, tiles_i = (place[4] + 15) / 16;
        j += (place[5] + 15) / 16, tiles_j = (place[6] + 15) / 16;
    }
    return ((of_all * tiles_i + i) * tiles_j + j) * 32;
}

}  // namespace twin
