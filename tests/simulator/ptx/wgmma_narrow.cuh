// kernels/ptx/wgmma_narrow.cuh on a CPU: wgmma.cuh has any number of columns.
#pragma once

#include "wgmma.cuh"
