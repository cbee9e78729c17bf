// kernels/ptx/wgmma_ones.cuh on a CPU.
#pragma once

#include "wgmma_registers.cuh"  // has every N
