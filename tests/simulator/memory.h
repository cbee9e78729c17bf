// Shared memory by its addresses, and words that the lanes of a warp exchange.
#pragma once

#include "machine.h"

namespace simulator {

unsigned to_shared(const void* pointer) {
    const Block& block = *fiber()->block;
    const ptrdiff_t offset = static_cast<const unsigned char*>(pointer) - block.base;
    if (offset < 0 || offset >= static_cast<ptrdiff_t>(block.size)) fail("a pointer is not to the block's shared memory");
    return static_cast<unsigned>(offset);
}

namespace {

Block& block_of(unsigned address) {
    Block* block = fiber()->block;
    const unsigned rank = address >> 24;
    if (rank != 0) {
        if (rank > block->slot->group->slots.size()) fail("address %#x is of no block of the cluster", address);
        block = &block->slot->group->slots[rank - 1]->block;
    }
    return *block;
}

}  // namespace

unsigned char* from_shared(unsigned address, size_t bytes) {
    const Block& block = block_of(address);
    const size_t offset = address & 0xFFFFFF;
    if (offset + bytes > block.size) fail("shared memory at %#x, %zu bytes, is outside of the block's", address, bytes);
    return block.base + offset;
}

// --- warps ------------------------------------------------------------------------------------------------------------

const uint64_t* exchange(unsigned mask, uint64_t word) {
    Fiber* one = fiber();
    if (!(mask >> one->lane & 1)) fail("a lane that is not in its own mask %#x", mask);
    Exchange* found = nullptr;
    for (Exchange& other : one->warp->exchanges)
        if (other.mask == mask) found = &other;
    if (found == nullptr) {
        one->warp->exchanges.emplace_back();
        found = &one->warp->exchanges.back();
        found->mask = mask;
    }
    const uint64_t round = found->round;
    found->words[round % 2][one->lane] = word;
    found->arrived |= 1u << one->lane;
    machine->progress++;
    if (found->arrived == mask) {
        found->arrived = 0;
        found->round++;
    } else {
        while (found->round == round) yield("the other threads of the warp");
    }
    return found->words[round % 2];
}

}  // namespace simulator
