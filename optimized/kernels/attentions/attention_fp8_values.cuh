// Where values of packed sequences lie for attention in FP8 (attention_fp8_values.cu).
#pragma once

#include "attention_tile.cuh"

namespace twin {

// The column at which an entry's values begin: a multiple of 128, and not before the end of the entry before it, whose
// columns are a multiple of 128, too. `start`: the entry's first token.
__device__ __forceinline__ int values_from(int entry, int start) { return (start & -kTileRows) + entry * kTileRows; }

}  // namespace twin
