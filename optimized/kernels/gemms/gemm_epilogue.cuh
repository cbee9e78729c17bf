// The epilogue of a GEMM: scale, bias, one rounding, 16-byte stores.
//
//   out = round(fp32(fp32(acc * scale) + bias))        every step one fp32 rounding, then one to the output type
//
// A thread owns runs of kRun consecutive columns in rows r and r + 8 of its warpgroup's 64, and stores them as whole
// vectors: what wgmma takes for column 8 j + 2 q + e is column 4 kRun g + kRun q + 2 j + e of the output, since the
// rows of B lie in shared memory in that order (gemm_fp8_mainloop.cuh).
#pragma once

#include "gemm_tile.cuh"
#include "common/largest_pair.cuh"
#include "ptx/cvt.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/load.cuh"

namespace twin {

struct FP32 {};

enum BiasType { kNoBias = 0, kBiasBF16 = 1, kBiasFP16 = 2, kBiasFP32 = 3 };

// The type of a bias that has the 16 bits of an output.
template <class Out>
constexpr BiasType kBiasOf = same_type<Out, BF16> ? kBiasBF16 : kBiasFP16;

// Two neighbouring columns as one word of a 16-bit output.
template <class Out>
__device__ __forceinline__ unsigned pack(float low, float high) {
    if constexpr (same_type<Out, BF16>) return cvt_bf16x2(low, high);
    return cvt_f16x2(low, high);
}

// A 16-bit bias in fp32, exact.
__device__ __forceinline__ float widen_bias(unsigned short bits, int type) {
    return type == kBiasBF16 ? __uint_as_float(static_cast<unsigned>(bits) << 16) : cvt_f32_f16(bits);
}

// 2, 4, 8 or 16 bytes, which many threads read: kept in L1.
template <int kBytes>
__device__ __forceinline__ void load_cached(unsigned* words, const void* from) {
    if constexpr (kBytes == 2) *words = __ldg(static_cast<const unsigned short*>(from));
    if constexpr (kBytes == 4) *words = __ldg(static_cast<const unsigned*>(from));
    if constexpr (kBytes == 8) {
        const uint2 two = __ldg(static_cast<const uint2*>(from));
        words[0] = two.x, words[1] = two.y;
    }
    if constexpr (kBytes == 16) {
        const uint4 four = __ldg(static_cast<const uint4*>(from));
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    }
}

// A tile's bias. If a thread loaded each run where it adds it, a GEMM with K = 4096 would take 8 to 13 % longer. So the
// eight lanes 4 i + q, which need the same runs, load them ahead: lane 4 i + q holds runs i, i + 8, ...
template <int kRun, int kCount>
struct Bias {
    static constexpr int kRuns = kCount / (2 * kRun), kHeld = (kRuns + 7) / 8;
    static constexpr int kVector = kRun == 2 ? 1 : 4;  // values loaded together; kRun 2: rows of any length
    int type;
    unsigned words[kHeld][kRun];  // as in memory; in vectors, two 16-bit values to a word

    // `column` is this lane's first of the tile. Columns after the matrix's last repeat it: their results are not
    // stored.
    __device__ __forceinline__ void load(const void* bias, int bias_type, int column, int n) {
        type = bias_type;
        if (type == kNoBias) return;
#pragma unroll
        for (int i = 0; i < kHeld; i++)
#pragma unroll
            for (int v = 0; v < kRun; v += kVector) {
                const int run = min(threadIdx.x % 32 / 4 + 8 * i, kRuns - 1);
                const int c = min(column + 4 * kRun * run + v, n - kVector);
                if (type == kBiasFP32)
                    load_cached<4 * kVector>(words[i] + v, static_cast<const float*>(bias) + c);
                else
                    load_cached<2 * kVector>(words[i] + v, static_cast<const unsigned short*>(bias) + c);
            }
    }

    // The values that this lane holds, in fp32.
    template <int kType>
    __device__ __forceinline__ void widen(float (&values)[kHeld][kRun]) const {
#pragma unroll
        for (int i = 0; i < kHeld * kRun; i++) {
            const int run = i / kRun, c = i % kRun;
            const unsigned word = words[run][kVector == 1 || kType == kBiasFP32 ? c : c / 4 * 4 + c % 4 / 2];
            const int shift = kVector == 1 ? 0 : c % 2 * 16;
            values[run][c] = kType == kBiasFP32 ? __uint_as_float(word)
                                                : widen_bias(static_cast<unsigned short>(word >> shift), kType);
        }
    }

    // In place: acc -> fp32(acc + bias).
    __device__ __forceinline__ void add(float (&acc)[kCount]) const {
        if (type == kNoBias) return;
        float values[kHeld][kRun];
        if (type == kBiasFP32)
            widen<kBiasFP32>(values);
        else if (type == kBiasBF16)
            widen<kBiasBF16>(values);
        else
            widen<kBiasFP16>(values);
#pragma unroll
        for (int run = 0; run < kRuns; run++)
#pragma unroll
            for (int c = 0; c < kRun; c++) {
                const float value = __shfl_sync(0xFFFFFFFF, values[run / 8][c], run % 8 * 4 + threadIdx.x % 4);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float& x = acc[2 * kRun * run + c / 2 * 4 + 2 * h + c % 2];
                    x = __fadd_rn(x, value);
                }
            }
    }
};

// In place: acc -> fp32(acc * scale).
template <int kCount>
__device__ __forceinline__ void scale_tile(float (&acc)[kCount], float scale) {
#pragma unroll
    for (int i = 0; i < kCount; i++) acc[i] = __fmul_rn(acc[i], scale);
}

// Where a thread's results of a tile go: the address of its first column in its two rows, and what exists of them.
struct Destination {
    char* pointer[2];  // row r and row r + 8
    bool valid[2];
    int columns_left;  // of the tile, from the thread's first column on
};

template <int kElementBytes>
__device__ __forceinline__ Destination destination(void* out, int row, int column, int m, int n, int end) {
    Destination d;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        d.pointer[h] = static_cast<char*>(out) + (static_cast<long long>(row + 8 * h) * n + column) * kElementBytes;
        d.valid[h] = row + 8 * h < m;
    }
    d.columns_left = end - column;
    return d;
}

// Element `column` of a row of an output, in fp32.
template <class Out>
__device__ __forceinline__ float stored(const char* row, int column) {
    if constexpr (same_type<Out, FP32>) return reinterpret_cast<const float*>(row)[column];
    return widen_bias(reinterpret_cast<const unsigned short*>(row)[column], kBiasOf<Out>);
}

// In place: acc -> fp32(stored + acc). There are as many loads in flight as the main loop leaves registers for.
template <class Out, int kRun, int kCount>
__device__ __forceinline__ void add_stored(float (&acc)[kCount], const Destination& to) {
    constexpr int kBytes = same_type<Out, FP32> ? 4 : 2, kWords = kRun * kBytes / 4;
    constexpr int kRows = kCount / kRun, kAhead = kRows < 64 / kWords ? kRows : 64 / kWords;  // row halves of runs
    static_assert(kWords <= 4, "a run is one vector");
    unsigned words[kAhead][kWords];
#pragma unroll
    for (int i = 0; i < kRows + kAhead; i++) {
        const int done = i - kAhead;
#pragma unroll
        for (int c = 0; c < kRun && done >= 0; c++) {
            float& x = acc[2 * kRun * (done / 2) + 4 * (c / 2) + 2 * (done % 2) + c % 2];
            x = __fadd_rn(stored<Out>(reinterpret_cast<const char*>(words[done % kAhead]), c), x);
        }
        const int column = 4 * kRun * (i / 2), h = i % 2;
        if (i < kRows)
            load_if(words[i % kAhead], to.pointer[h] + column * kBytes, to.valid[h] && column < to.columns_left);
    }
}

// The tile's results as words of two 16-bit values; words[(kRun g + kRun/2 h) + j] is row half h, columns 2j, 2j+1.
template <class Out, int kRun, int kCount>
__device__ __forceinline__ void pack_tile(unsigned (&words)[kCount / 2], const float (&acc)[kCount]) {
#pragma unroll
    for (int g = 0; g < kCount / (2 * kRun); g++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < kRun / 2; j++) {
                const int i = 2 * kRun * g + 4 * j + 2 * h;
                words[kRun * g + kRun / 2 * h + j] = pack<Out>(acc[i], acc[i + 1]);
            }
}

// Store group g of a packed tile: a run of kRun columns in both rows. Each word that is stored goes to `also`, too.
template <int kRun, int kWords, class Also = Nothing>
__device__ __forceinline__ void store_packed(const unsigned (&words)[kWords], int g, const Destination& to,
                                             const Also& also = {}) {
    static_assert(kRun == 8 || kRun == 4, "runs are 16 or 8 bytes of 16-bit values");
    if (4 * kRun * g >= to.columns_left) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int w = kRun * g + kRun / 2 * h;
        char* pointer = to.pointer[h] + 4 * kRun * g * 2;
        if (!to.valid[h]) continue;
        if constexpr (kRun == 8)
            *reinterpret_cast<uint4*>(pointer) = make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
        else
            *reinterpret_cast<uint2*>(pointer) = make_uint2(words[w], words[w + 1]);
#pragma unroll
        for (int j = 0; j < kRun / 2; j++) also(words[w + j]);
    }
}

// The number of steps in which a packed tile is stored, and one of them.
template <int kRun, int kCount>
constexpr int kStoreSteps = kCount / (2 * kRun) < 8 ? kCount / (2 * kRun) : 8;

template <int kRun, int kWords, class Also = Nothing>
__device__ __forceinline__ void store_step(const unsigned (&words)[kWords], int step, const Destination& to,
                                           const Also& also = {}) {
    constexpr int kGroups = kWords / kRun, kSteps = kStoreSteps<kRun, 2 * kWords>;
#pragma unroll
    for (int g = step * kGroups / kSteps; g < (step + 1) * kGroups / kSteps; g++)
        store_packed<kRun>(words, g, to, also);
}

template <int kRun, int kWords, class Also = Nothing>
__device__ __forceinline__ void store_packed_tile(const unsigned (&words)[kWords], const Destination& to,
                                                  const Also& also = {}) {
#pragma unroll
    for (int g = 0; g < kWords / kRun; g++) store_packed<kRun>(words, g, to, also);
}

// Store a whole tile in fp32.
template <int kRun, int kCount>
__device__ __forceinline__ void store_fp32(const float (&acc)[kCount], const Destination& to) {
#pragma unroll
    for (int g = 0; g < kCount / (2 * kRun); g++) {
        if (4 * kRun * g >= to.columns_left) return;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (!to.valid[h]) continue;
            float4* pointer = reinterpret_cast<float4*>(to.pointer[h] + 4 * kRun * g * 4);
#pragma unroll
            for (int v = 0; v < kRun / 4; v++) {
                const int i = 2 * kRun * g + 8 * v + 2 * h;
                pointer[v] = make_float4(acc[i], acc[i + 1], acc[i + 4], acc[i + 5]);
            }
        }
    }
}

// The epilogue of FP8 GEMMs. kDeferred: a tile waits in registers and is stored beside the next tile's k-blocks.
// kAccumulate: out = round(fp32(out) + fp32(acc * scale)), without a bias.
template <class Out, int kRun, int kAcc, bool kMayDefer, bool kAccumulate>
struct ScaleBiasStore {
    static constexpr int kSteps = kStoreSteps<kRun, kAcc>;
    static constexpr bool kFP32 = same_type<Out, FP32>, kDeferred = kMayDefer && !kFP32;
    static constexpr bool kBiasAhead = kDeferred && kRun == 8;  // else there are no registers for it

    using Loaded = Bias<kRun, kAcc>;

    void* out;
    const void* bias;
    int bias_type, m, n;
    float scale;
    int row, column;  // of a tile, the thread's first
    Destination to;
    unsigned words[kAcc / 2];
    bool pending;  // a tile waits in `words`

    __device__ __forceinline__ ScaleBiasStore(void* out, const void* bias, int bias_type, int m, int n)
        : out(out), bias(bias), bias_type(bias_type), m(m), n(n), pending(false) {
        const int lane = threadIdx.x % 32;
        row = threadIdx.x / 32 * 16 + lane / 4;
        column = lane % 4 * kRun;
    }

    __device__ __forceinline__ void load_bias(Loaded& loaded, int first) {
        if constexpr (!kAccumulate) loaded.load(bias, bias_type, first, n);
    }
    __device__ __forceinline__ void load_ahead(Loaded& loaded, const Tile& tile) {
        if constexpr (kBiasAhead) load_bias(loaded, tile.column + column);
    }
    __device__ __forceinline__ void step(int s) const { store_step<kRun>(words, s, to); }

    __device__ __forceinline__ void take(float (&acc)[kAcc], Loaded& loaded, const Tile& tile) {
        const int first = tile.column + column;
        if constexpr (!kBiasAhead) load_bias(loaded, first);
        scale_tile(acc, scale);
        to = destination<kFP32 ? 4 : 2>(out, tile.row + row, first, m, n, tile.end);
        if constexpr (kAccumulate)
            add_stored<Out, kRun>(acc, to);
        else
            loaded.add(acc);
        if constexpr (kFP32) {
            store_fp32<kRun>(acc, to);
        } else {
            pack_tile<Out, kRun>(words, acc);
            pending = kDeferred;
            if constexpr (!kDeferred) store_packed_tile<kRun>(words, to);
        }
    }

    __device__ __forceinline__ void finish() const {
        if (pending) store_packed_tile<kRun>(words, to);
    }
};

// The same of a `Store` that is deferred; a thread also keeps the largest number that it has stored.
template <class Store, class Out, int kRun>
struct KeepingLargest : Store {
    static_assert(Store::kDeferred, "the maximum is that of words");
    LargestPair<same_type<Out, BF16> ? 1 : 2> largest;

    using Store::Store;

    __device__ __forceinline__ void step(int s) {
        store_step<kRun>(this->words, s, this->to, [&](unsigned pair) { largest.take(pair); });
    }
    __device__ __forceinline__ void finish() {
        if (!this->pending) return;
        store_packed_tile<kRun>(this->words, this->to, [&](unsigned pair) { largest.take(pair); });
    }
};

}  // namespace twin
