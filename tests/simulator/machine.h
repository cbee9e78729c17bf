// The simulated machine: what a launch, a cluster, a block, a warp and a thread remember.
#pragma once

#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <vector>

#include "engine.h"
#include "fibers.h"

namespace simulator {

struct Failed {};  // beside the fibers
using Work = std::function<void()>;

// Shared into global memory; `data` is what was read of `source`.
struct Bulk {
    void* to;
    unsigned source, bytes;
    bool adds, read;
    std::vector<unsigned char> data;
};

struct Fiber : Thread {
    Context context;
    unsigned char* stack = nullptr;
    bool done = false, runs = false;
    unsigned linear = 0;        // its number in the block
    const char* waits = "";     // for what
    uint64_t cluster_round = 0;  // of its last arrival
    std::vector<Bulk> queued;   // bulk stores of the open group
    std::deque<std::vector<Bulk>> groups;
    std::vector<Work> copies;   // of 16 bytes, of the open group
    std::deque<std::vector<Work>> copy_groups;
};

struct Exchange {
    unsigned mask = 0, arrived = 0;
    uint64_t round = 0;
    uint64_t words[2][32];
};

// One product of a warp: each lane's registers arrive in its own time.
struct Pending {
    Product product;
    float* d[32];
    unsigned registers[32][4];
    bool from_registers = false;
    unsigned arrived = 0;
    bool done = false;
};

struct Warp {
    std::deque<Exchange> exchanges;
    std::deque<Pending> products;  // not forgotten yet; the first has the number `first`
    uint64_t first = 0;
    uint64_t issued[32] = {};             // by lane: products so far
    std::deque<uint64_t> committed[32];   // by lane: how many products each closed group ends at
};

struct Barrier {
    unsigned arrived = 0;
    uint64_t round = 0;
};

struct Slot;

struct Block {
    Slot* slot = nullptr;
    unsigned alive = 0, threads = 0;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::map<int, Barrier> barriers;
    std::set<unsigned> mbarriers;
    std::deque<Work> late;  // what the copy engine has not done yet
    unsigned char* base = nullptr;  // of its shared memory
    size_t size = 0;
};

struct Group;

struct Machine;
inline Machine* machine = nullptr;

// A place for a block, with its thread of the operating system.
struct Slot {
    Group* group = nullptr;
    unsigned rank = 0;
    Block block;
    Context scheduler;
    std::thread thread;
    bool running = false;   // has a block
    bool finished = false;  // and there will be no more
};

// The slots of a cluster.
struct Group {
    std::vector<Slot*> slots;
    unsigned done = 0;   // blocks of this cluster that have ended
    unsigned ended = 0;  // and threads
    long long cluster = -1;
    uint64_t cluster_round = 0;
    unsigned cluster_arrived = 0;
};

struct Machine {
    void (*entry)(void**);
    void (*bind)(unsigned char**, size_t*);
    void** args;
    uint3_ grid, size;
    unsigned cluster;
    When when;
    std::mt19937_64 random;
    std::vector<Slot*> slots;
    std::vector<Group> groups;
    long long next_cluster = 0, clusters = 0;
    uint64_t progress = 0;
    size_t idle_turns = 0;
    bool aborting = false;
    std::string error;
    std::mutex mutex;
    std::condition_variable turned;
    size_t turn = 0;
    size_t unfinished = 0;
};

inline Fiber* fiber() { return static_cast<Fiber*>(self); }

inline std::string name_of(const Thread* thread) {
    char text[128];
    snprintf(text, sizeof text, "block (%u, %u, %u) thread (%u, %u, %u)", thread->block_index.x, thread->block_index.y,
             thread->block_index.z, thread->index.x, thread->index.y, thread->index.z);
    return text;
}

inline void leave() { swap(fiber()->context, fiber()->block->slot->scheduler); }

void leave_stores();  // copies.h

inline void start_thread() {
    machine->entry(machine->args);
    Fiber* one = fiber();
    leave_stores();
    one->done = true;
    one->block->alive--;
    one->block->slot->group->ended++;
    machine->progress++;
    for (;;) leave();
}

// Whether what the hardware is to do now happens at once.
inline bool at_once() {
    return machine->when == kAtOnce || (machine->when == kAtRandom && machine->random() % 2 == 0);
}

inline void later_or_now(Work work) {
    if (at_once()) work();
    else fiber()->block->late.push_back(std::move(work));
    machine->progress++;
}

}  // namespace simulator
