// The copy engine, for a range of bytes. Addresses and sizes are multiples of 16.
#pragma once

namespace twin {

// Copy `bytes` bytes from global to shared memory, completing on an mbarrier.
__device__ __forceinline__ void bulk_load(unsigned destination, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// Shared memory into that of a block of the cluster: `to` and `barrier` come from map_to_rank (cluster.cuh).
__device__ __forceinline__ void bulk_to_block(unsigned to, unsigned source, unsigned bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "r"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// Shared into global memory, as part of the thread's current group.
__device__ __forceinline__ void bulk_store(void* to, unsigned source, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(source), "r"(bytes)
                 : "memory");
}

// The same, added to fp32 words: each sum is rounded to nearest even, subnormals kept (measured).
__device__ __forceinline__ void bulk_add(float* to, unsigned source, unsigned bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(source),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Returns when at most kPending groups of this thread still have to read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Returns when what all but kPending groups of this thread wrote can be seen.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace twin
