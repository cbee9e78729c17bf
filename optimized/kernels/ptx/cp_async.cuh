// cp.async: 16 bytes a thread from global to shared memory, past the registers. One function per instruction.
//
// PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy". What a thread copied, it may read itself after
// wait_group; other threads need a barrier as well.
#pragma once

// Queue a copy of 16 bytes, both addresses 16-byte aligned; past L1.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

// Close a group: the copies queued since the last one (possibly none).
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most N of this thread's groups, the latest, are unfinished.
template <int N>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
