// discard: what a line of memory holds is not wanted any more.
#pragma once

namespace twin {

// The 128 bytes at `address`, a multiple of 128, need not go from L2 to memory. What is read there before the next
// write is undefined.
__device__ __forceinline__ void discard_line(const void* address) {
    asm volatile("discard.global.L2 [%0], 128;" ::"l"(address) : "memory");
}

}  // namespace twin
