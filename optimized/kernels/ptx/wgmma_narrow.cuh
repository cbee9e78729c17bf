// wgmma of 16-bit operands in shared memory, as in wgmma.cuh, with B of 8, 16 or 32 rows: few queries of attention as B,
// and keys, or channels of values, as the 64 rows of A.
#pragma once

#include "wgmma.cuh"

namespace twin {

#define TWIN_ACCUMULATORS_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define TWIN_REGISTERS_4 "%0, %1, %2, %3"
TWIN_WGMMA_16(4, 8, "%4, %5", "%6", "%7, %8")
TWIN_WGMMA_16(8, 16, "%8, %9", "%10", "%11, %12")
TWIN_WGMMA_16(16, 32, "%16, %17", "%18", "%19, %20")

}  // namespace twin
