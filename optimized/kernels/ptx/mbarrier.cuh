// mbarrier: the barrier in shared memory on which a bulk copy reports its bytes and warps report their arrival.
// One function per instruction. A barrier is an 8-byte word, named by its 32-bit shared-memory address.
// A wait names the parity of the phase it waits for: the first phase has parity 0.
#pragma once

namespace twin {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrival on a barrier of any block of the cluster; `barrier` is an address of map_to_rank. Unqualified on purpose:
// `.release.cluster` compiles to a fence of the whole GPU, and no ordinary store has to become visible here.
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival, and the phase also waits for `bytes` of bulk copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile(
        "{\n .reg .pred done;\n"
        " mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        " selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

}  // namespace twin
