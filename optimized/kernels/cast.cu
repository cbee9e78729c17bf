// cast: to FP8, noting the amax.
//
//     q[i]      = satfinite_rne(fp32(x[i]) * scale[0])   one fp32 rounding, then one to FP8; NaN -> 0x7F
//     scale_inv = 1 / scale[0]                           IEEE division
//     amax[0]   = max(amax[0], max |x[i]|)               x not scaled, NaN ignored; skipped if amax is null
//
// x [count] fp32, bf16 or fp16 (WIDE), count a multiple of 16; q [count] FP8 (FP8).
//
// Bound by memory: 3 bytes an element in bf16. A thread loads twice 16 bytes before it uses the first; a block reads
// 16 KB and is done, because blocks that loop are up to 5 % slower. Stores are 8 bytes a thread (fp32: 4), 256 in a
// row a warp.
#include "wide.cuh"
#include "quantize.cuh"

constexpr int THREADS = 512;
constexpr int UNROLL = 2;

__device__ __forceinline__ void store_codes(unsigned char* q, const Vector<LANES>& v, float scale, float& amax) {
    unsigned words[LANES / 4];
#pragma unroll
    for (int i = 0; i < LANES; i += 4) {
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            x[j] = widen(v, i + j);
            amax = amax_of(amax, x[j]);
        }
        words[i / 4] = quantize2(x[0], x[1], scale) | quantize2(x[2], x[3], scale) << 16;
    }
#if WIDE == 0
    *reinterpret_cast<unsigned*>(q) = words[0];
#else
    *reinterpret_cast<uint2*>(q) = make_uint2(words[0], words[1]);
#endif
}

extern "C" __global__ __launch_bounds__(THREADS) void cast(
    const wide_t* __restrict__ x, const float* __restrict__ scale_slot, float* amax_slot,
    unsigned char* __restrict__ q, float* __restrict__ scale_inv, long long count) {
    const float scale = *scale_slot;
    const long long vectors = count / LANES;
    const long long first = static_cast<long long>(blockIdx.x) * THREADS * UNROLL + threadIdx.x;
    float amax = 0.0f;
    Vector<LANES> v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const long long i = first + u * THREADS;
        if (i < vectors) v[u] = load_once<LANES>(x + i * LANES);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const long long i = first + u * THREADS;
        if (i < vectors) store_codes(q + i * LANES, v[u], scale, amax);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
    if (amax_slot != nullptr) commit_amax<THREADS / 32>(amax, amax_slot);
}
