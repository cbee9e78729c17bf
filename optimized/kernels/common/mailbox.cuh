// Buffers in shared memory that one side fills and the other side empties, again and again.
#pragma once

#include "ptx/mbarrier.cuh"

namespace twin {

// A position in a ring of stages. Its parity is that of the use of the stage which is being waited for.
template <int kStages>
struct Stage {
    int index = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance() {
        if (++index == kStages) {
            index = 0;
            parity ^= 1;
        }
    }
};

// The barriers of one buffer. A producer warp waits until it is empty, writes it and says that it is full; a consumer
// warp waits until it is full, reads it and says that it is empty. `parity` alternates from use to use, starting at 0.
struct Mailbox {
    unsigned long long full, empty;  // mbarriers

    // By one thread, before the block's first barrier.
    __device__ __forceinline__ void init(int producer_warps, int consumer_warps) {
        mbarrier_init(shared_address(&full), producer_warps);
        mbarrier_init(shared_address(&empty), consumer_warps);
    }

    __device__ __forceinline__ void wait_empty(unsigned parity) { mbarrier_wait(shared_address(&empty), parity ^ 1); }
    __device__ __forceinline__ void wait_full(unsigned parity) { mbarrier_wait(shared_address(&full), parity); }
    __device__ __forceinline__ void arrive_full() { arrive(full); }
    __device__ __forceinline__ void arrive_empty() { arrive(empty); }

    __device__ __forceinline__ static void arrive(unsigned long long& barrier) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
    }
};

}  // namespace twin
