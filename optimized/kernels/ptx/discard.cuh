// discard: nobody reads a line of memory again.
#pragma once

namespace twin {

// L2 need not write the 128 bytes at `address`, a multiple of 128, to memory. What a read before the next write gives
// is undefined.
__device__ __forceinline__ void discard_line(const void* address) {
    asm volatile("discard.global.L2 [%0], 128;" ::"l"(address) : "memory");
}

}  // namespace twin
