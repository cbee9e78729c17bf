// The bulk tensor copy engine (TMA): a box of a tensor in global memory, into shared memory, completing on an
// mbarrier. Elements outside the tensor arrive as zeros and count towards the bytes. Coordinates are in
// elements, innermost dimension first.
#pragma once

// <cuda.h> does not compile under NVRTC; the map is opaque here and is encoded on the host.
struct alignas(64) CUtensorMap {
    unsigned long long opaque[16];
};

namespace twin {

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// L2 fetches `bytes` bytes of global memory; both are multiples of 16.
__device__ __forceinline__ void prefetch_l2(const void* address, unsigned bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

__device__ __forceinline__ void tma_load_2d(unsigned destination, const CUtensorMap* map, unsigned barrier, int x,
                                            int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

__device__ __forceinline__ void tma_load_5d(unsigned destination, const CUtensorMap* map, unsigned barrier, int x0,
                                            int x1, int x2, int x3, int x4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
        : "memory");
}

// The same box into every block of the cluster whose bit is set in `blocks`, at the same address of its shared
// memory, completing on its barrier of the same address.
__device__ __forceinline__ void tma_load_2d_multicast(unsigned destination, const CUtensorMap* map, unsigned barrier,
                                                      unsigned short blocks, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(destination),
        "l"(map), "r"(barrier), "h"(blocks), "r"(x), "r"(y)
        : "memory");
}

__device__ __forceinline__ void tma_load_5d_multicast(unsigned destination, const CUtensorMap* map, unsigned barrier,
                                                      unsigned short blocks, int x0, int x1, int x2, int x3, int x4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(destination),
        "l"(map), "r"(barrier), "h"(blocks), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
        : "memory");
}

}  // namespace twin
