// Kernels that measure elementary.cuh and its candidates; FUNCTION names the one that is compiled in.
//
//   probe      COUNT elements a thread and nothing else: its SASS is counted, it is never run
//   apply      out[i] = FUNCTION(in[i]), fp32
//   digest     one 64-bit sum of mixed (input word, result word) pairs for each 2^24 consecutive input words
//   cycles     the clock cycles of LOOPS * 4 evaluations a thread, data in registers
//   stream     bf16 -> bf16 (OUT_FP8 0) or E4M3 (OUT_FP8 1), bound by memory: what the function adds
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "elementary_candidates.cuh"

#ifndef FUNCTION
#define FUNCTION identity
#endif
#ifndef COUNT
#define COUNT 8
#endif
#ifndef OUT_FP8
#define OUT_FP8 0
#endif
#ifndef LOOPS
#define LOOPS 512
#endif

extern "C" __global__ void probe(const float* __restrict__ in, float* __restrict__ out) {
    float v[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) v[i] = in[i * 256 + threadIdx.x];
#pragma unroll
    for (int i = 0; i < COUNT; i++) out[i * 256 + threadIdx.x] = twin::FUNCTION(v[i]);
}

extern "C" __global__ void apply(const float* __restrict__ in, float* __restrict__ out, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = twin::FUNCTION(in[i]);
}

// splitmix64's finaliser: every bit of (index, word) reaches every bit of the sum.
__device__ __forceinline__ unsigned long long mixed(unsigned index, float value) {
    const unsigned word = value != value ? 0x7FC00000u : __float_as_uint(value);
    unsigned long long z = (static_cast<unsigned long long>(index) << 32) | word;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// Grid of 2^16 blocks of 256 threads, 256 words each: block b sums words b 2^16 .. and adds to sums[b / 256].
extern "C" __global__ void digest(unsigned long long* __restrict__ sums) {
    unsigned long long sum = 0;
    for (int i = 0; i < 256; i++) {
        const unsigned word = blockIdx.x * 65536u + i * 256u + threadIdx.x;
        sum += mixed(word, twin::FUNCTION(__uint_as_float(word)));
    }
    atomicAdd(&sums[blockIdx.x / 256], sum);  // integers: the order does not matter
}

// Four independent chains a thread; two additions an evaluation keep the compiler from folding them.
extern "C" __global__ void __launch_bounds__(1024, 1) cycles(float first, float step, float* __restrict__ out,
                                                              long long* __restrict__ taken) {
    float x[4], sum[4];
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = first + step * (threadIdx.x + 0.25f * j), sum[j] = 0.0f;
    __syncthreads();
    const long long start = clock64();
#pragma unroll 4
    for (int i = 0; i < LOOPS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sum[j] += twin::FUNCTION(x[j]);
            x[j] += step;
        }
    __syncthreads();
    if (threadIdx.x == 0) taken[blockIdx.x] = clock64() - start;
    out[blockIdx.x * blockDim.x + threadIdx.x] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// 8 elements a thread, 16-byte loads. amax as in every cast kernel, so that the FP8 form pays what it will pay.
extern "C" __global__ void __launch_bounds__(256) stream(const uint4* __restrict__ in, void* __restrict__ out,
                                                         float scale, int* __restrict__ amax) {
    const long long at = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    const uint4 packed = in[at];
    const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
    float v[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = twin::FUNCTION(__uint_as_float(words[i] << 16));
        v[2 * i + 1] = twin::FUNCTION(__uint_as_float(words[i] & 0xFFFF0000u));
    }
#if OUT_FP8
    float top = 0.0f;
    unsigned codes[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        top = fmaxf(top, fmaxf(fabsf(v[2 * i]), fabsf(v[2 * i + 1])));
        const unsigned pair = __nv_cvt_float2_to_fp8x2(make_float2(v[2 * i] * scale, v[2 * i + 1] * scale),
                                                       __NV_SATFINITE, __NV_E4M3);
        codes[i / 2] |= pair << (16 * (i % 2));
    }
    static_cast<uint2*>(out)[at] = make_uint2(codes[0], codes[1]);
    const int block_top = __reduce_max_sync(0xFFFFFFFFu, __float_as_int(top));
    if (threadIdx.x % 32 == 0 && block_top > *amax) atomicMax(amax, block_top);
#else
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
        pairs[i] = *reinterpret_cast<const unsigned*>(&pair);
    }
    static_cast<uint4*>(out)[at] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#endif
}
