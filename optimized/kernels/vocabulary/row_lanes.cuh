// What a row of logits is to the lanes that share it: its maximum, that one's first place, and a sum.
#pragma once

#include "common/row_sum.cuh"

namespace twin {

__device__ __forceinline__ float lowest() { return __int_as_float(static_cast<int>(0xFF800000u)); }
// What is subtracted before exp: 0 for a maximum of -inf.
__device__ __forceinline__ float origin_of(float top) { return top == lowest() ? 0.0f : top; }

// The largest logit that is no NaN, and its first place; 0 where none is above -inf.
struct Top {
    float value;
    int place;

    __device__ __forceinline__ void join(float other, int at) {
        if (other > value || (other == value && at < place)) value = other, place = at;
    }
};

__device__ __forceinline__ void join_lanes(Top& top) {
#pragma unroll
    for (int h = 16; h > 0; h /= 2)
        top.join(__shfl_xor_sync(kAllLanes, top.value, h), __shfl_xor_sync(kAllLanes, top.place, h));
}

// The halving tree over the 32 lanes of each warp, then over kCount warps; thread 0 has it. `sums` is kCount long.
template <int kCount>
__device__ __forceinline__ float add_lanes(float sum, float* sums) {
#pragma unroll
    for (int h = 16; h > 0; h /= 2) sum = sum + __shfl_xor_sync(kAllLanes, sum, h);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return 0.0f;
    float total = threadIdx.x < kCount ? sums[threadIdx.x] : 0.0f;
#pragma unroll
    for (int h = kCount / 2; h > 0; h /= 2) total = total + __shfl_xor_sync(kAllLanes, total, h);
    return total;
}

}  // namespace twin
