// kernels/ptx/tma.cuh on a CPU.
#pragma once

struct alignas(64) CUtensorMap {
    unsigned long long opaque[16];
};

namespace twin {

inline void prefetch_tensor_map(const CUtensorMap*) {}
inline void prefetch_l2(const void*, unsigned) {}
inline void tma_load_2d(unsigned destination, const CUtensorMap* map, unsigned barrier, int x, int y) {
    const int at[] = {x, y};
    simulator::load_box(destination, map, barrier, at, 2, 0);
}
inline void tma_load_5d(unsigned destination, const CUtensorMap* map, unsigned barrier, int x0, int x1, int x2, int x3,
                        int x4) {
    const int at[] = {x0, x1, x2, x3, x4};
    simulator::load_box(destination, map, barrier, at, 5, 0);
}
inline void tma_load_2d_multicast(unsigned destination, const CUtensorMap* map, unsigned barrier, unsigned short blocks,
                                  int x, int y) {
    const int at[] = {x, y};
    simulator::load_box(destination, map, barrier, at, 2, blocks);
}
inline void tma_load_5d_multicast(unsigned destination, const CUtensorMap* map, unsigned barrier, unsigned short blocks,
                                  int x0, int x1, int x2, int x3, int x4) {
    const int at[] = {x0, x1, x2, x3, x4};
    simulator::load_box(destination, map, barrier, at, 5, blocks);
}

}  // namespace twin
