// cp.async: 16 bytes a thread from global to shared memory, past the registers. One function per instruction.
//
// PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy". What a thread copied, it may read itself after
// wait_group; other threads need a barrier as well.
#pragma once

namespace twin {

// Queue a copy of 16 bytes; both addresses are multiples of 16. The copy bypasses L1 or goes through it, which is
// faster where the kernel leaves L1 about 64 KB (docs/log/activation.md).
template <bool kThroughL1 = false>
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    if constexpr (kThroughL1)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
    else
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

// The same through L1. If not `there`, nothing is read and zeros are written.
__device__ __forceinline__ void cp_async_16_or_zeros(void* shared, const void* global, bool there) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared)), size = there ? 16 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(size) : "memory");
}

// The same, bypassing L1, with a policy of l2_policy.cuh.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, unsigned long long policy) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "l"(policy)
                 : "memory");
}

// Close a group: the copies queued since the last one (possibly none).
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most kCount of this thread's groups, the latest, are unfinished.
template <int kCount>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kCount) : "memory");
}

}  // namespace twin
