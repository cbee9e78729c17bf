// A cluster of two blocks that works on one thing: one ticket, and buffers that both blocks fill for each other.
#pragma once

#include "attention_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/store_async.cuh"

namespace twin {

// The next ticket, in both blocks: the first one takes it and tells the second, in whose `told` it arrives. Of `box` the
// second block uses `full` and the first one `empty`, with one arrival each.
__device__ __forceinline__ int take_ticket(Mailbox& box, int& told, unsigned* counter, unsigned parity, int block) {
    const unsigned full = shared_address(&box.full), empty = shared_address(&box.empty);
    if (block == 0) {
        const int ticket = static_cast<int>(atomicAdd(counter, 1));
        mbarrier_wait(empty, parity ^ 1);
        store_async(map_to_rank(shared_address(&told), 1), __int_as_float(ticket), map_to_rank(full, 1));
        return ticket;
    }
    mbarrier_arrive_expect_tx(full, 4);
    mbarrier_wait(full, parity);
    const int ticket = *static_cast<volatile int*>(&told);
    mbarrier_arrive_cluster(map_to_rank(empty, 0));
    return ticket;
}

// `chunks` of 64 channels from `x`, as many rows as the map's box from `row`: into both blocks, of which each loads half of
// the chunks. `full` and `to` are places in both, and each `full` has to expect all bytes.
__device__ __forceinline__ void load_for_both(unsigned char* to, const CUtensorMap* map, unsigned full, int chunks,
                                              int chunk_bytes, int x, int row, int head, int batch, int block) {
    for (int i = 0; i < chunks / 2; i++) {
        const int c = chunks / 2 * block + i;
        tma_load_5d_multicast(shared_address(to) + c * chunk_bytes, map, full, 3, x + 64 * c, row, head, batch, 0);
    }
}

// This warp has read a buffer: tell the threads of both blocks that fill it.
__device__ __forceinline__ void empty_for_both(Mailbox& box) {
    __syncwarp();
    if (threadIdx.x % 32 < 2) mbarrier_arrive_cluster(map_to_rank(shared_address(&box.empty), threadIdx.x % 32));
}

}  // namespace twin
