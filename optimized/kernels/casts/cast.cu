// cast: to FP8, noting the amax.
//
//     q[i]      = satfinite_rne(fp32(x[i]) * scale[0])   one fp32 rounding, then one to FP8; NaN -> 0x7F
//     scale_inv = 1 / scale[0]                           IEEE division
//     amax[0]   = max(amax[0], max |x[i]|)               x not scaled, NaN ignored; skipped if amax is null
//
// x [count] fp32, bf16 or fp16, count a multiple of 16; q [count] FP8.
//
// With PACKED x is [rows, cols], and a row that is in no sequence has codes 0 and no part in the amax.
//
// Bound by memory: 3 bytes an element in bf16. A thread has two 16-byte loads in flight. A block reads 16 KB and ends:
// blocks that loop are up to 5 % slower.
//
// Defines: WIDE (0 fp32, 1 bf16, 2 fp16), FP8 (0 E4M3, 1 E5M2), LEADS (if defined, the next kernel may begin early),
// PACKED (0 | 1, 0 where it is not defined).
#include "common/wide.cuh"
#include "common/quantize.cuh"
#include "ptx/grid.cuh"
#ifndef PACKED
#define PACKED 0
#endif
#if PACKED
#include "sequences.cuh"
#endif

using namespace twin;

constexpr int kThreads = 512;
constexpr int kUnroll = 2;

__device__ __forceinline__ void store_words(unsigned char* q, const unsigned (&words)[kLanes / 4]) {
#if WIDE == 0
    *reinterpret_cast<unsigned*>(q) = words[0];
#else
    *reinterpret_cast<uint2*>(q) = make_uint2(words[0], words[1]);
#endif
}

__device__ __forceinline__ void store_codes(unsigned char* q, const Vector<kLanes>& v, float scale, float& amax) {
    unsigned words[kLanes / 4];
#pragma unroll
    for (int i = 0; i < kLanes; i += 4) {
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[j] = widen(v, i + j);
            amax = amax_of(amax, x[j]);
        }
        words[i / 4] = quantize4(x, scale);
    }
    store_words(q, words);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    cast(const wide_t* __restrict__ x, const float* __restrict__ scale_slot, float* amax_slot,
         unsigned char* __restrict__ q, float* __restrict__ scale_inv, long long count
#if PACKED
         ,
         const int* lengths, const int* starts, int sequences, int rows, int cols
#endif
    ) {
#ifdef LEADS
    let_next_grid_start();  // a product, which loads its weights meanwhile (optimized/cuda/launch.py, `leading`)
#endif
    const float scale = *scale_slot;
    const long long vectors = count / kLanes;
    const long long first = static_cast<long long>(blockIdx.x) * kThreads * kUnroll + threadIdx.x;
    float amax = 0.0f;
    Vector<kLanes> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
        const long long i = first + u * kThreads;
        if (i < vectors) v[u] = load_once<kLanes>(x + i * kLanes);
    }
#if PACKED
    constexpr int kElements = kThreads * kUnroll * kLanes;  // of a block
    __shared__ unsigned seen[kElements / 16 / 32 + 1];      // of its rows, which have at least 16 columns
    const long long at = static_cast<long long>(blockIdx.x) * kElements;
    const unsigned before = at % cols;  // columns of the block's first row that are not the block's
    Sequences{lengths, starts, sequences}.mark(seen, static_cast<int>(at / cols), rows);
#endif
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
        const long long i = first + u * kThreads;
#if PACKED
        const unsigned row = (before + (u * kThreads + threadIdx.x) * kLanes) / cols;
        if (!(seen[row / 32] >> row % 32 & 1)) {
            if (i < vectors) store_words(q + i * kLanes, {});
            continue;
        }
#endif
        if (i < vectors) store_codes(q + i * kLanes, v[u], scale, amax);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
    if (amax_slot != nullptr) commit_amax<kThreads / 32>(amax, amax_slot);
}
