// wgmma with an FP8 A operand from registers, as in wgmma_registers.cuh, and with N that leave room for rows of ones
// behind the rows of B: 8, ones alone, and 72.
#pragma once

#include "wgmma_registers.cuh"

namespace twin {

#define TWIN_ACC_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TWIN_ACCUMULATORS_4 TWIN_ACC_4(0)
#define TWIN_ACCUMULATORS_36 TWIN_ACCUMULATORS_32, TWIN_ACC_4(32)
#define TWIN_REGISTERS_4 "%0, %1, %2, %3"
#define TWIN_REGISTERS_36 TWIN_REGISTERS_32 ", %32, %33, %34, %35"

TWIN_WGMMA_REGISTERS_FP8(4, 8, "%4, %5, %6, %7", "%8", "%9")
TWIN_WGMMA_REGISTERS_FP8(36, 72, "%36, %37, %38, %39", "%40", "%41")

}  // namespace twin
