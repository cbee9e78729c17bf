// bar.sync: a barrier among some warps of a block. __syncthreads is barrier 0 among all of them.
#pragma once

namespace twin {

// kThreads threads, whole warps, wait for each other at barrier `id` (0 .. 15).
template <int kThreads>
__device__ __forceinline__ void barrier_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace twin
