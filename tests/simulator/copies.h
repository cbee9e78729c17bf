// The copy engine: boxes of tensors, ranges of bytes, in both directions.
#pragma once

#include "machine.h"
#include "barriers.h"

namespace simulator {

namespace {

// Else a GPU stops with an illegal instruction.
void check_start(int x, unsigned element) {
    if (static_cast<long long>(x) * element % 16)
        fail("a box begins at element %d of a row, of %u bytes each: not a multiple of 16 bytes", x, element);
}

unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// What `_encode` of __init__.py writes in place of the driver's 128 bytes.
struct Map {
    const unsigned char* pointer;
    uint64_t strides[4];
    uint32_t last[5];  // extent - 1
    uint16_t box[5];
    uint8_t element, swizzle, rank;
};
static_assert(sizeof(Map) <= 128);

void copy_box(unsigned destination, const Map& map, const int* x) {
    unsigned offset = 0;
    const unsigned width = map.box[0] * map.element;
    unsigned at[5] = {0, 0, 0, 0, 0};
    unsigned char* base = from_shared(destination & ~0xFFFFFFu, 1);
    const unsigned first = destination & 0xFFFFFF;
    unsigned rows = 1;
    for (int i = 1; i < map.rank; i++) rows *= map.box[i];
    from_shared(destination, rows * width);
    for (unsigned row = 0; row < rows; row++, offset += width) {
        const unsigned char* from = map.pointer;
        bool inside = true;
        for (int i = 1; i < map.rank; i++) {
            const long long here = static_cast<long long>(x[i]) + at[i];
            inside &= here >= 0 && here <= map.last[i];
            from += here * static_cast<long long>(map.strides[i - 1]);
        }
        for (unsigned piece = 0; piece < width; piece += map.element) {
            const long long here = static_cast<long long>(x[0]) + piece / map.element;
            unsigned to = first + offset + piece;
            if (map.swizzle) to = swizzled(to);
            if (inside && here >= 0 && here <= map.last[0]) memcpy(base + to, from + here * map.element, map.element);
            else memset(base + to, 0, map.element);
        }
        for (int i = 1; i < map.rank; i++) {
            if (++at[i] < map.box[i]) break;
            at[i] = 0;
        }
    }
}

}  // namespace

void load_box(unsigned destination, const void* opaque, unsigned barrier, const int* x, int rank, unsigned blocks) {
    Map map;
    memcpy(&map, opaque, sizeof map);
    if (rank != map.rank) fail("a load of %d dimensions through a map of %d", rank, map.rank);
    check_start(x[0], map.element);
    if (destination % (map.swizzle ? 1024 : 128)) fail("a box is to be loaded to %#x, which is not aligned", destination);
    unsigned bytes = map.element;
    for (int i = 0; i < rank; i++) bytes *= map.box[i];
    std::vector<int> where(x, x + rank);
    for (unsigned other = 0; other < 16; other++) {
        if (blocks != 0 ? !(blocks >> other & 1) : other != 0) continue;
        const unsigned window = blocks != 0 ? (other + 1) << 24 : 0;
        later_or_now([=] {
            copy_box(destination | window, map, where.data());
            arrive_bytes(barrier | window, bytes);
        });
    }
}

void bulk_load(unsigned destination, const void* from, unsigned bytes, unsigned barrier) {
    if (destination % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16)
        fail("bulk_load of %u bytes to %#x: not multiples of 16", bytes, destination);
    later_or_now([=] {
        memcpy(from_shared(destination, bytes), from, bytes);
        arrive_bytes(barrier, bytes);
    });
}

void store_async(unsigned address, const unsigned* words, int count, unsigned barrier) {
    const unsigned first = words[0], second = count > 1 ? words[1] : 0;
    later_or_now([=] {
        const unsigned all[2] = {first, second};
        memcpy(from_shared(address, 4 * count), all, 4 * count);
        arrive_bytes(barrier, 4 * count);
    });
}

namespace {

void do_store(const Bulk& bulk) {
    const unsigned char* from = bulk.read ? bulk.data.data() : from_shared(bulk.source, bulk.bytes);
    if (!bulk.adds) memcpy(bulk.to, from, bulk.bytes);
    else
        for (unsigned i = 0; i < bulk.bytes / 4; i++) {
            float one;
            memcpy(&one, from + 4 * i, 4);
            static_cast<float*>(bulk.to)[i] += one;
        }
    machine->progress++;
}

}  // namespace

// Those that a thread has not waited for are made all the same.
void leave_stores() {
    bulk_commit();
    for (auto& group : fiber()->groups)
        for (Bulk& bulk : group) later_or_now([bulk = std::move(bulk)] { do_store(bulk); });
}

void bulk_store(void* to, unsigned source, unsigned bytes, bool adds) {
    if (source % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16)
        fail("bulk_store of %u bytes from %#x: not multiples of 16", bytes, source);
    Bulk bulk{to, source, bytes, adds, false, {}};
    if (at_once()) do_store(bulk);
    else fiber()->queued.push_back(std::move(bulk));
}

// By pieces of 16 bytes, which the swizzle does not take apart.
void store_box(const void* opaque, unsigned source, const int* x, int rank) {
    Map map;
    memcpy(&map, opaque, sizeof map);
    if (rank != map.rank || rank != 2) fail("a store of %d dimensions through a map of %d", rank, map.rank);
    check_start(x[0], map.element);
    if (source % (map.swizzle ? 1024 : 128)) fail("a box is to be stored from %#x, which is not aligned", source);
    const unsigned width = map.box[0] * map.element;
    for (unsigned row = 0; row < map.box[1]; row++)
        for (unsigned piece = 0; piece < width; piece += 16) {
            const long long column = static_cast<long long>(x[0]) + piece / map.element;
            const long long line = static_cast<long long>(x[1]) + row;
            const long long left = (map.last[0] + 1ll - column) * map.element;
            if (column < 0 || line < 0 || line > map.last[1] || left <= 0) continue;
            const unsigned from = source + row * width + piece;
            unsigned char* to = const_cast<unsigned char*>(map.pointer) + line * static_cast<long long>(map.strides[0]) +
                                column * map.element;
            bulk_store(to, map.swizzle ? swizzled(from) : from, left < 16 ? left : 16, false);
        }
}

void bulk_commit() {
    fiber()->groups.push_back(std::move(fiber()->queued));
    fiber()->queued.clear();
}

void bulk_wait(int pending, bool read) {
    auto& groups = fiber()->groups;
    if (read) {
        for (int i = 0; i < static_cast<int>(groups.size()) - pending; i++)
            for (Bulk& bulk : groups[i])
                if (!bulk.read) {
                    const unsigned char* from = from_shared(bulk.source, bulk.bytes);
                    bulk.data.assign(from, from + bulk.bytes);
                    bulk.read = true;
                }
        return;
    }
    while (static_cast<int>(groups.size()) > pending) {
        for (Bulk& bulk : groups.front()) do_store(bulk);
        groups.pop_front();
    }
}

void copy_16(void* shared, const void* global, bool there) {
    const auto work = [=] {
        if (there) memcpy(shared, global, 16);
        else memset(shared, 0, 16);
    };
    to_shared(shared);
    if (reinterpret_cast<uintptr_t>(shared) % 16 || (there && reinterpret_cast<uintptr_t>(global) % 16))
        fail("cp.async of addresses that are not multiples of 16");
    if (at_once()) work();
    else fiber()->copies.push_back(work);
}

void copy_commit() {
    fiber()->copy_groups.push_back(std::move(fiber()->copies));
    fiber()->copies.clear();
}

void copy_wait(int pending) {
    auto& groups = fiber()->copy_groups;
    while (static_cast<int>(groups.size()) > pending) {
        for (Work& work : groups.front()) work();
        groups.pop_front();
    }
}

}  // namespace simulator
