// The fence of a block.
#pragma once

namespace twin {

// This thread's loads and stores so far are done, as every thread of the block sees them.
__device__ __forceinline__ void fence_block() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

}  // namespace twin
