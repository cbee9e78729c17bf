// st.async: a store into the shared memory of a block of the cluster. An mbarrier there counts its bytes like those of
// a bulk copy, and a thread that waits on it sees them without a fence. Address and barrier come from map_to_rank
// (cluster.cuh). An illegal instruction in a launch without clusters.
#pragma once

namespace twin {

__device__ __forceinline__ void store_async(unsigned address, float value, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
                 "r"(__float_as_uint(value)), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void store_async(unsigned address, uint2 words, unsigned barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(address),
        "r"(words.x), "r"(words.y), "r"(barrier)
        : "memory");
}

}  // namespace twin
