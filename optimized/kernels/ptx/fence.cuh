// Fences between the ordinary (generic) and the asynchronous view of shared memory.
#pragma once

namespace twin {

// Barrier initialisations become visible to the copy engine (and, in a cluster, to the other blocks).
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Ordinary stores to shared memory become visible to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for all memory, and for what the copy engine has written.
__device__ __forceinline__ void fence_proxy_async_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace twin
