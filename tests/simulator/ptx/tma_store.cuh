// kernels/ptx/tma_store.cuh on a CPU.
#pragma once

#include "tma.cuh"

namespace twin {

inline void tma_store_2d(const CUtensorMap* map, unsigned source, int x, int y) {
    const int at[] = {x, y};
    simulator::store_box(map, source, at, 2);
}

}  // namespace twin
