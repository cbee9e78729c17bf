// Barriers of a block and of a cluster, and mbarriers.
#pragma once

#include "machine.h"
#include "memory.h"

namespace simulator {

void block_barrier(int id, unsigned threads) {
    Block& block = *fiber()->block;
    Barrier& barrier = block.barriers[id];
    const uint64_t round = barrier.round;
    barrier.arrived++;
    machine->progress++;
    while (barrier.round == round) {
        if (barrier.arrived >= (threads == 0 ? block.alive : threads)) {
            barrier.arrived = 0;
            barrier.round++;
            machine->progress++;
            return;
        }
        yield("a barrier of the block");
    }
}

void cluster_arrive() {
    Fiber* one = fiber();
    Group& group = *one->block->slot->group;
    one->cluster_round = group.cluster_round;
    group.cluster_arrived++;
    machine->progress++;
}

// Threads that have ended have arrived.
void cluster_wait() {
    Fiber* one = fiber();
    Group& group = *one->block->slot->group;
    while (group.cluster_round == one->cluster_round) {
        if (group.cluster_arrived + group.ended >= machine->cluster * one->block->threads) {
            group.cluster_arrived = 0;
            group.cluster_round++;
            machine->progress++;
            return;
        }
        yield("a barrier of the cluster");
    }
}

unsigned cluster_rank() { return fiber()->block->slot->rank; }

namespace {

// The word of an mbarrier: arrivals of this phase that are missing, its parity, arrivals of each phase, missing bytes.
struct Mbarrier {
    uint16_t missing : 15, parity : 1;
    uint16_t arrivals;
    int32_t bytes;
};
static_assert(sizeof(Mbarrier) == 8);

Mbarrier& mbarrier_at(unsigned address) {
    if (!block_of(address).mbarriers.count(address & 0xFFFFFF)) fail("no mbarrier was initialised at %#x", address);
    return *reinterpret_cast<Mbarrier*>(from_shared(address, 8));
}

void complete(Mbarrier& barrier) {
    machine->progress++;
    if (barrier.missing != 0 || barrier.bytes != 0) return;
    barrier.missing = barrier.arrivals;
    barrier.parity ^= 1;
}

void arrive_bytes(unsigned address, unsigned bytes) {
    Mbarrier& barrier = mbarrier_at(address);
    barrier.bytes -= static_cast<int32_t>(bytes);
    complete(barrier);
}

}  // namespace

void mbarrier_init(unsigned address, unsigned arrivals) {
    if (address % 8 || arrivals == 0 || arrivals > 32767) fail("mbarrier_init(%#x, %u)", address, arrivals);
    fiber()->block->mbarriers.insert(address);
    auto& barrier = *reinterpret_cast<Mbarrier*>(from_shared(address, 8));
    barrier.missing = arrivals;
    barrier.arrivals = arrivals;
    barrier.parity = 0;
    barrier.bytes = 0;
}

void mbarrier_arrive(unsigned address, unsigned expected_bytes) {
    Mbarrier& barrier = mbarrier_at(address);
    if (barrier.missing == 0) fail("more arrivals at the mbarrier at %#x than its %u", address, barrier.arrivals);
    barrier.bytes += static_cast<int32_t>(expected_bytes);
    barrier.missing--;
    complete(barrier);
}

bool mbarrier_try_wait(unsigned address, unsigned parity) {
    if (mbarrier_at(address).parity != (parity & 1)) return true;
    yield("an mbarrier");
    return mbarrier_at(address).parity != (parity & 1);
}

}  // namespace simulator
