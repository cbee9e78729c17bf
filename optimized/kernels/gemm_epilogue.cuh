// From accumulators to the output of a GEMM: scale, bias, one rounding, 16-byte stores.
//
//   out = round(fp32(fp32(acc * scale) + bias))        every step one fp32 rounding, then one to the output type
//
// A thread owns, in rows r and r + 8 of its warpgroup's 64, runs of `kRun` consecutive columns: acc[8 run..] of
// wgmma (columns 8 j + 2 q + e) become columns 4 kRun g + kRun q + 2 j + e because the copy engine has put the
// rows of B into shared memory in that order (see gemm_fp8.cu). So results go from registers to global memory
// in whole vectors, with no detour through shared memory.
#pragma once

#include "ptx/cvt.cuh"
#include "ptx/wgmma.cuh"

namespace twin {

struct FP32 {};

enum BiasType { kNoBias = 0, kBiasBF16 = 1, kBiasFP16 = 2, kBiasFP32 = 3 };

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

// kCount consecutive values of the bias, widened to fp32. `bias` is 16-byte aligned, `column` a multiple of kCount.
template <int kCount>
__device__ __forceinline__ void load_bias(float (&values)[kCount], const void* bias, int type, int column) {
    static_assert(kCount % 4 == 0, "the bias is read in vectors of four");
    if (type == kBiasFP32) {
        const float4* source = reinterpret_cast<const float4*>(static_cast<const float*>(bias) + column);
#pragma unroll
        for (int i = 0; i < kCount / 4; i++) {
            const float4 four = __ldg(source + i);
            values[4 * i] = four.x, values[4 * i + 1] = four.y;
            values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
        }
        return;
    }
    const uint2* source = reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(bias) + column);
#pragma unroll
    for (int i = 0; i < kCount / 4; i++) {
        const uint2 four = __ldg(source + i);
#pragma unroll
        for (int e = 0; e < 4; e++)
            values[4 * i + e] = widen_bias(static_cast<unsigned short>((e < 2 ? four.x : four.y) >> (e % 2 * 16)), type);
    }
}

// In place: acc -> fp32(fp32(acc * scale) + bias). `column` is the thread's first column of the tile; with kHalves 2 the
// second half of its groups are the same columns n / 2 further.
template <int kRun, int kHalves = 1, int kCount>
__device__ __forceinline__ void scale_and_bias(float (&acc)[kCount], float scale, const void* bias, int bias_type,
                                               int column, int n) {
#pragma unroll
    for (int i = 0; i < kCount; i++) acc[i] = __fmul_rn(acc[i], scale);
    if (bias_type == kNoBias) return;
#pragma unroll
    for (int g = 0; g < kCount / (2 * kRun); g++) {
        constexpr int kGroups = kCount / (2 * kRun) / kHalves;
        const int c = column + 4 * kRun * (g % kGroups);
        if (c >= n / kHalves) continue;
        float values[kRun];
        load_bias(values, bias, bias_type, c + g / kGroups * (n / kHalves));
#pragma unroll
        for (int j = 0; j < kRun / 2; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& x = acc[2 * kRun * g + 4 * j + i];
                x = __fadd_rn(x, values[2 * j + i % 2]);
            }
    }
}

// Where a thread's results of one tile go: its first column in its two rows, and what of it exists.
struct Destination {
    char* pointer[2];  // row r and row r + 8
    bool valid[2];
    int columns_left;  // of the tile, from the thread's first on
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
    return widen_bias(reinterpret_cast<const unsigned short*>(row)[column],
                      same_type<Out, BF16> ? kBiasBF16 : kBiasFP16);
}

// In place: acc -> fp32(stored + acc), for a product that is added to what `to` holds.
template <class Out, int kRun, int kCount>
__device__ __forceinline__ void add_stored(float (&acc)[kCount], const Destination& to) {
#pragma unroll
    for (int g = 0; g < kCount / (2 * kRun); g++) {
        if (4 * kRun * g >= to.columns_left) return;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (!to.valid[h]) continue;
#pragma unroll
            for (int i = 0; i < kRun; i++) {
                float& x = acc[2 * kRun * g + 4 * (i / 2) + 2 * h + i % 2];
                x = __fadd_rn(stored<Out>(to.pointer[h], 4 * kRun * g + i), x);
            }
        }
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

// Store group g (the thread's run of kRun columns in both rows) of a packed tile.
template <int kRun, int kWords>
__device__ __forceinline__ void store_packed(const unsigned (&words)[kWords], int g, const Destination& to) {
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
    }
}

// Behind how many k-blocks a packed tile is stored, and what of it behind one of them.
template <int kRun, int kCount>
constexpr int kStoreSteps = kCount / (2 * kRun) < 8 ? kCount / (2 * kRun) : 8;

template <int kRun, int kWords>
__device__ __forceinline__ void store_step(const unsigned (&words)[kWords], int step, const Destination& to) {
    constexpr int kGroups = kWords / kRun, kSteps = kStoreSteps<kRun, 2 * kWords>;
#pragma unroll
    for (int g = step * kGroups / kSteps; g < (step + 1) * kGroups / kSteps; g++) store_packed<kRun>(words, g, to);
}

template <int kRun, int kWords>
__device__ __forceinline__ void store_packed_tile(const unsigned (&words)[kWords], const Destination& to) {
#pragma unroll
    for (int g = 0; g < kWords / kRun; g++) store_packed<kRun>(words, g, to);
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

}  // namespace twin
