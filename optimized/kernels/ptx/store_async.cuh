// st.async: a store into the shared memory of a block of the cluster, which a barrier there counts, as it does the
// bytes of a bulk copy. Address and barrier are of map_to_rank (cluster.cuh). Who waits on that barrier sees the bytes:
// no fence. An illegal instruction in a launch without clusters.
#pragma once

namespace twin {

__device__ __forceinline__ void store_async(unsigned address, float value, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
                 "r"(__float_as_uint(value)), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void store_async(unsigned address, uint2 words, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
                     address),
                 "r"(words.x), "r"(words.y), "r"(barrier)
                 : "memory");
}

}  // namespace twin
