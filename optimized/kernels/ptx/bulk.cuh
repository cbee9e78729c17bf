// The copy engine, for a range of bytes.
#pragma once

namespace twin {

// Copy `bytes` bytes from global to shared memory, completing on an mbarrier. Addresses and size: multiples of 16.
__device__ __forceinline__ void bulk_load(unsigned destination, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

}  // namespace twin
