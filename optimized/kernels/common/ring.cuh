// A ring of buffers ("stages") in shared memory, which producers fill and consumers empty, each with two mbarriers.
//
//   producer: wait_empty, expect(bytes), copies that report to full() -> advance
//   consumer: wait_full, read -> release(empty()) when it has read, one arrival a warp -> advance
//
// full(s) completes when the bytes of stage s have arrived, empty(s) when its readers have: a warp each of the block,
// or of each block of a cluster. A thread that takes part has a Ring of its own, with its place in it.
#pragma once

#include "mailbox.cuh"
#include "ptx/cluster.cuh"

namespace twin {

// kStride: from a stage's barriers to the next one's; kEmpty: from `full` to `empty`. As they stand: all `full`, then
// all `empty`. MailboxRing is for an array of Mailbox.
template <int kStages_, int kStride = 8, int kEmpty = 8 * kStages_>
struct Ring {
    static constexpr int kStages = kStages_;
    static constexpr int kBytes = 16 * kStages;  // of the barriers
    unsigned barriers;                           // their address in shared memory
    Stage<kStages> stage{};

    __device__ __forceinline__ explicit Ring(unsigned barriers) : barriers(barriers) {}

    __device__ __forceinline__ unsigned full(int index) const { return barriers + kStride * index; }
    __device__ __forceinline__ unsigned empty(int index) const { return barriers + kEmpty + kStride * index; }
    __device__ __forceinline__ unsigned full() const { return full(stage.index); }
    __device__ __forceinline__ unsigned empty() const { return empty(stage.index); }
    __device__ __forceinline__ void advance() { stage.advance(); }

    // By one thread, before the block's first barrier. `readers`: arrivals that empty a stage.
    __device__ __forceinline__ void init(int readers) const {
        for (int s = 0; s < kStages; s++) {
            mbarrier_init(full(s), 1);
            mbarrier_init(empty(s), readers);
        }
    }

    // By a producer's thread.
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty(), stage.parity ^ 1); }
    __device__ __forceinline__ void expect(unsigned bytes) const { mbarrier_arrive_expect_tx(full(), bytes); }

    // By consumers.
    __device__ __forceinline__ void wait_full() const { mbarrier_wait(full(), stage.parity); }

    // This warp has read the stage of `empty`: tell every block of the cluster, since each copies into it.
    template <int kCluster = 1>
    static __device__ __forceinline__ void release(unsigned empty) {
        const unsigned lane = threadIdx.x % 32;
        if constexpr (kCluster == 1) {
            if (lane == 0) mbarrier_arrive(empty);
        } else {
            if (lane < kCluster) mbarrier_arrive_cluster(map_to_rank(empty, lane));
        }
    }
};

template <int kStages>
using MailboxRing = Ring<kStages, sizeof(Mailbox), sizeof(Mailbox::full)>;

}  // namespace twin
