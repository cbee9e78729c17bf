// The bulk tensor copy engine (tma.cuh) in the other direction.
#pragma once

#include "tma.cuh"

namespace twin {

// A box of shared memory into global memory, as part of the thread's current group (bulk.cuh). Elements outside the
// tensor are not stored.
__device__ __forceinline__ void tma_store_2d(const CUtensorMap* map, unsigned source, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(source), "r"(x), "r"(y)
                 : "memory");
}

}  // namespace twin
