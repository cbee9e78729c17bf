// The functions of kernels/common/elementary.cuh and log.cuh one by one; FUNCTION names the one that is compiled in.
//
//   apply      out[i] = FUNCTION(in[i]), fp32
//   digest     one 64-bit sum of mixed (input word, result word) pairs for each 2^24 consecutive input words
//   probe      COUNT elements a thread and nothing else: its SASS is counted, it is never run
#include "../../optimized/kernels/common/elementary.cuh"
#include "../../optimized/kernels/common/log.cuh"

#ifndef COUNT
#define COUNT 8
#endif

namespace twin {
__device__ __forceinline__ float identity(float x) { return x; }
}  // namespace twin

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

extern "C" __global__ void probe(const float* __restrict__ in, float* __restrict__ out) {
    float v[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) v[i] = in[i * 256 + threadIdx.x];
#pragma unroll
    for (int i = 0; i < COUNT; i++) out[i * 256 + threadIdx.x] = twin::FUNCTION(v[i]);
}
