// Blocks, warps and threads of a launch on a CPU: a thread of a kernel is a fiber, a block a thread of the operating
// system (so that `__shared__` can be its thread-local memory), and one fiber runs at a time.
//
// A fiber runs until it has to wait. Whoever waits asks again each time it is its turn; a round of a block's fibers in
// which nothing changed hands on to the next block, and when no block changes anything, the launch is stuck: an error.
// What the hardware does in its own time (copies, products of the tensor cores) happens at once, or as late as the
// kernel allows, or at random: a kernel that does not wait for it gives different results.
#include "engine.h"

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

#include "tensor_core.h"

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace simulator {

__thread Thread* self;
const int* powers;
const float* activations[8];

namespace {

constexpr size_t kStack = 1 << 20;
enum When { kAtOnce, kLate, kAtRandom };

// --- fibers -----------------------------------------------------------------------------------------------------------
#ifdef __x86_64__
extern "C" void simulator_switch(void** save, void* to);
asm(R"(
.text
.globl simulator_switch
.type simulator_switch, @function
simulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
using Context = void*;
void swap(Context& save, Context& to) { simulator_switch(&save, to); }
void prepare(Context& context, unsigned char* stack, void (*entry)()) {
    auto* top = reinterpret_cast<uintptr_t*>(stack + kStack);
    *--top = 0;  // so that at the entry the stack is 8 bytes off a multiple of 16, as after a call
    *--top = reinterpret_cast<uintptr_t>(entry);
    for (int i = 0; i < 6; i++) *--top = 0;
    context = top;
}
#else
using Context = ucontext_t;
void swap(Context& save, Context& to) { swapcontext(&save, &to); }
void prepare(Context& context, unsigned char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
#endif

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

}  // namespace

struct Warp {
    std::deque<Exchange> exchanges;
    std::deque<Pending> products;  // not forgotten yet; the first has the number `first`
    uint64_t first = 0;
    uint64_t issued[32] = {};             // by lane: products so far
    std::deque<uint64_t> committed[32];   // by lane: how many products each closed group ends at
};

namespace {

struct Barrier {
    unsigned arrived = 0;
    uint64_t round = 0;
};

}  // namespace

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

namespace {

struct Group;

struct Machine;
Machine* machine = nullptr;

}  // namespace

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

namespace {

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

Fiber* fiber() { return static_cast<Fiber*>(self); }

std::string name_of(const Thread* thread) {
    char text[128];
    snprintf(text, sizeof text, "block (%u, %u, %u) thread (%u, %u, %u)", thread->block_index.x, thread->block_index.y,
             thread->block_index.z, thread->index.x, thread->index.y, thread->index.z);
    return text;
}

void leave() { swap(fiber()->context, fiber()->block->slot->scheduler); }

void leave_stores();

void start_thread() {
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
bool at_once() {
    return machine->when == kAtOnce || (machine->when == kAtRandom && machine->random() % 2 == 0);
}

void later_or_now(Work work) {
    if (at_once()) work();
    else fiber()->block->late.push_back(std::move(work));
    machine->progress++;
}

// --- a block ----------------------------------------------------------------------------------------------------------

void set_up(Slot& slot, unsigned number) {
    Block& block = slot.block;
    const uint3_ grid = machine->grid, size = machine->size;
    const unsigned threads = size.x * size.y * size.z;
    machine->bind(&block.base, &block.size);
    memset(block.base, 0xFF, block.size);  // NaN, or -1: nobody has written here
    block.slot = &slot;
    block.alive = block.threads = threads;
    block.barriers.clear();
    block.mbarriers.clear();
    block.late.clear();
    block.warps.clear();
    block.warps.resize((threads + 31) / 32);
    std::vector<unsigned char*> stacks;
    for (Fiber& old : block.fibers) stacks.push_back(old.stack);
    block.fibers.clear();
    block.fibers.resize(threads);
    for (unsigned i = 0; i < threads; i++) {
        Fiber& one = block.fibers[i];
        if (i < stacks.size()) one.stack = stacks[i];
        else {
            one.stack = static_cast<unsigned char*>(mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        }
        one.index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
        one.linear = i;
        one.lane = i % 32;
        one.warp = &block.warps[i / 32];
        one.block = &block;
        one.block_index = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
        one.block_size = size;
        one.grid_size = grid;
        prepare(one.context, one.stack, start_thread);
    }
    slot.running = true;
}

// Rounds of the block's fibers until one changes nothing.
void run(Slot& slot) {
    Block& block = slot.block;
    for (;;) {
        const uint64_t before = machine->progress;
        for (Fiber& one : block.fibers) {
            if (one.done) continue;
            self = &one;
            one.runs = true;
            swap(slot.scheduler, one.context);
            one.runs = false;
            self = nullptr;
            if (machine->aborting) return;
        }
        if (!block.late.empty() && (machine->when == kAtRandom || machine->progress == before)) {
            const size_t pick = machine->when == kAtRandom ? machine->random() % block.late.size() : 0;
            Work work = std::move(block.late[pick]);
            block.late.erase(block.late.begin() + pick);
            self = &block.fibers[0];
            try {
                work();
            } catch (const Failed&) {
                return;
            }
            self = nullptr;
            machine->progress++;
        }
        if (block.alive == 0 && block.late.empty()) {
            slot.running = false;
            slot.group->done++;
            machine->progress++;
            return;
        }
        if (machine->progress == before) return;
    }
}

// The next cluster of a group whose blocks have all ended; false if there is none.
bool advance(Group& group) {
    if (machine->next_cluster >= machine->clusters) return false;
    group.cluster = machine->next_cluster++;
    group.done = group.ended = group.cluster_arrived = 0;
    return true;
}

void report_stuck() {
    std::map<std::string, std::pair<unsigned, std::string>> found;
    for (Slot* slot : machine->slots) {
        if (!slot->running) continue;
        for (Fiber& one : slot->block.fibers)
            if (!one.done) {
                auto& [count, first] = found[one.waits];
                if (count++ == 0) first = name_of(&one);
            }
    }
    machine->error = "stuck: no thread goes on.";
    for (auto& [reason, which] : found)
        machine->error += " " + std::to_string(which.first) + " wait for " + reason + " (first: " + which.second + ").";
    machine->aborting = true;
}

void slot_main(Slot* slot, size_t index) {
    std::unique_lock lock(machine->mutex);
    long long mine = -1;  // cluster whose block this slot has begun
    for (;;) {
        machine->turned.wait(lock, [&] { return machine->turn == index; });
        if (!slot->finished) {
            const uint64_t before = machine->progress;
            if (!machine->aborting) {
                Group& group = *slot->group;
                if (!slot->running) {
                    if (group.cluster == mine && (group.cluster < 0 || group.done == machine->cluster)) {
                        if (!advance(group)) slot->finished = true;
                    }
                    if (group.cluster != mine) {
                        mine = group.cluster;
                        set_up(*slot, static_cast<unsigned>(mine * machine->cluster + slot->rank));
                        machine->progress++;
                    }
                }
                if (slot->running) run(*slot);
            }
            if (machine->aborting) slot->finished = true;
            if (slot->finished) machine->unfinished--, machine->progress++;
            machine->idle_turns = machine->progress == before ? machine->idle_turns + 1 : 0;
            if (!machine->aborting && machine->idle_turns > 2 * machine->slots.size()) report_stuck();
        }
        const bool ended = slot->finished;
        size_t next = index;
        if (machine->unfinished == 0) next = machine->slots.size();  // the launching thread
        else
            do next = (next + 1) % machine->slots.size();
            while (machine->slots[next]->finished);
        if (next != index) {
            machine->turn = next;
            machine->turned.notify_all();
        }
        if (ended) return;
    }
}

}  // namespace

void progressed() { machine->progress++; }

void yield(const char* reason) {
    fiber()->waits = reason;
    leave();
}

void fail(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (machine->error.empty()) machine->error = name_of(self) + ": " + text;
    machine->aborting = true;
    if (!fiber()->runs) throw Failed();  // a copy of the copy engine's
    for (;;) leave();
}

// --- shared memory ----------------------------------------------------------------------------------------------------

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

// --- barriers ---------------------------------------------------------------------------------------------------------

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

// --- the copy engine --------------------------------------------------------------------------------------------------

namespace {

unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// What tests/simulator/machine.py writes in place of the driver's 128 bytes.
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
    // No read of less than all of a box counts.
}

}  // namespace

void load_box(unsigned destination, const void* opaque, unsigned barrier, const int* x, int rank, unsigned blocks) {
    Map map;
    memcpy(&map, opaque, sizeof map);
    if (rank != map.rank) fail("a load of %d dimensions through a map of %d", rank, map.rank);
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

// Those that a thread has not waited for are made all the same.
void leave_stores() {
    bulk_commit();
    for (auto& group : fiber()->groups)
        for (Bulk& bulk : group) later_or_now([bulk = std::move(bulk)] { do_store(bulk); });
}

}  // namespace

void bulk_store(void* to, unsigned source, unsigned bytes, bool adds) {
    if (source % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16)
        fail("bulk_store of %u bytes from %#x: not multiples of 16", bytes, source);
    Bulk bulk{to, source, bytes, adds, false, {}};
    if (at_once()) do_store(bulk);
    else fiber()->queued.push_back(std::move(bulk));
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

// --- the tensor core --------------------------------------------------------------------------------------------------

namespace {

Matrix operand(Format format, uint64_t descriptor, bool transposed, int first, int rows, int k) {
    const bool half = format == kBF16 || format == kFP16;
    const std::vector<Code>& codes = codes_of(format);
    const unsigned start = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4;
    const unsigned stride = (descriptor >> 32 & 0x3FFF) << 4;
    if (descriptor >> 62 != 1) fail("a descriptor of another swizzle than 128 bytes: %#llx", (unsigned long long)descriptor);
    const unsigned char* base = from_shared(0, 1);
    const size_t size = fiber()->block->size;
    Matrix matrix{rows, k, {}};
    matrix.codes.resize(static_cast<size_t>(rows) * k);
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < k; i++) {
            const unsigned r = first + row;
            const unsigned at = transposed ? start + r / 64 * leading + i / 8 * stride + i % 8 * 128 + r % 64 * 2
                                           : start + r / 8 * stride + r % 8 * 128 + i * (half ? 2 : 1);
            const unsigned to = swizzled(at);
            if (to + 2 > size) fail("an operand of the tensor core is outside of shared memory: %#x", to);
            matrix.codes[row * k + i] = &codes[half ? base[to] | base[to + 1] << 8 : base[to]];
        }
    return matrix;
}

void execute(Pending& pending) {
    const Product& product = pending.product;
    const bool half = product.a_format == kBF16 || product.a_format == kFP16;
    const int k = half ? 16 : 32, rank = fiber()->linear / 32 % 4;
    Matrix a{16, k, {}};
    if (pending.from_registers) {
        const std::vector<Code>& codes = codes_of(product.a_format);
        a.codes.resize(16 * k);
        const int each = half ? 2 : 4;  // values of a register
        for (int row = 0; row < 16; row++)
            for (int i = 0; i < k; i++) {
                const int half_k = i / (4 * each), lane = row % 8 * 4 + i % (4 * each) / each;
                const unsigned word = pending.registers[lane][2 * half_k + row / 8];
                a.codes[row * k + i] = &codes[half ? word >> 16 * (i % 2) & 0xFFFF : word >> 8 * (i % 4) & 0xFF];
            }
    } else
        a = operand(product.a_format, product.a, product.a_transposed, 16 * rank, 16, k);
    const Matrix b = operand(product.b_format, product.b, product.b_transposed, 0, product.columns, k);
    static thread_local float d[16][256];
    const auto place = [&](int row, int column) -> float& {
        return pending.d[row % 8 * 4 + column % 8 / 2][column / 8 * 4 + row / 8 * 2 + column % 2];
    };
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < product.columns; column++)
            d[row][column] = product.accumulates ? place(row, column) : 0.0f;
    multiply_rows(a, b, half, d);
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < product.columns; column++) place(row, column) = d[row][column];
    pending.done = true;
    machine->progress++;
}

}  // namespace

void multiply(const Product& product, float* d, const unsigned* registers) {
    Fiber* one = fiber();
    Warp& warp = *one->warp;
    const uint64_t number = warp.issued[one->lane]++ - warp.first;
    if (number == warp.products.size()) {
        warp.products.emplace_back();
        warp.products.back().product = product;
    }
    Pending& pending = warp.products[number];
    if (!(pending.product == product)) fail("the threads of a warp multiply different operands");
    pending.d[one->lane] = d;
    pending.from_registers = registers != nullptr;
    if (registers != nullptr) memcpy(pending.registers[one->lane], registers, sizeof pending.registers[0]);
    pending.arrived |= 1u << one->lane;
    machine->progress++;
    if (pending.arrived == 0xFFFFFFFF && at_once())
        for (Pending& other : warp.products) {
            if (other.arrived != 0xFFFFFFFF) break;
            if (!other.done) execute(other);
        }
}

void multiply_commit() { fiber()->warp->committed[fiber()->lane].push_back(fiber()->warp->issued[fiber()->lane]); }

void multiply_wait(int pending) {
    Fiber* one = fiber();
    Warp& warp = *one->warp;
    auto& groups = warp.committed[one->lane];
    uint64_t target = 0;
    while (static_cast<int>(groups.size()) > pending) {
        target = groups.front();
        groups.pop_front();
    }
    exchange(0xFFFFFFFF, target);
    for (uint64_t number = warp.first; number < target; number++) {
        Pending& other = warp.products[number - warp.first];
        if (!other.done) execute(other);
    }
    while (!warp.products.empty() && warp.products.front().done) {
        warp.products.pop_front();
        warp.first++;
    }
}

}  // namespace simulator

// --- a launch ---------------------------------------------------------------------------------------------------------

extern "C" void simulator_tables(const int* powers, const float* const* activations) {
    simulator::powers = powers;
    for (int i = 0; i < 8; i++) simulator::activations[i] = activations[i];
}

// Runs a kernel. `entry` calls it in one thread, `bind` tells where a block's shared memory is. Returns 0, or 1 with an
// error in `message`, of `room` bytes.
extern "C" int simulator_launch(void (*entry)(void**), void (*bind)(unsigned char**, size_t*), void** args,
                                const unsigned* grid, const unsigned* size, unsigned cluster, unsigned at_once,
                                int when, uint64_t seed, char* message, size_t room) {
    using namespace simulator;
    Machine here;
    here.entry = entry;
    here.bind = bind;
    here.args = args;
    here.grid = {grid[0], grid[1], grid[2]};
    here.size = {size[0], size[1], size[2]};
    here.cluster = cluster;
    here.when = static_cast<When>(when);
    here.random.seed(seed);
    const long long blocks = static_cast<long long>(grid[0]) * grid[1] * grid[2];
    here.clusters = blocks / cluster;
    if (grid[0] % cluster != 0) {
        snprintf(message, room, "a grid of %u blocks in clusters of %u", grid[0], cluster);
        return 1;
    }
    const size_t groups = std::min<long long>(std::max(1u, at_once / cluster), here.clusters);
    if (groups == 0) return 0;
    here.groups.resize(groups);
    for (Group& group : here.groups)
        for (unsigned rank = 0; rank < cluster; rank++) {
            Slot* slot = new Slot;
            slot->group = &group;
            slot->rank = rank;
            group.slots.push_back(slot);
            here.slots.push_back(slot);
        }
    here.unfinished = here.slots.size();
    here.turn = here.slots.size();
    machine = &here;
    for (size_t i = 0; i < here.slots.size(); i++) here.slots[i]->thread = std::thread(slot_main, here.slots[i], i);
    {
        std::unique_lock lock(here.mutex);
        here.turn = 0;
        here.turned.notify_all();
        here.turned.wait(lock, [&] { return here.turn == here.slots.size() && here.unfinished == 0; });
    }
    for (Slot* slot : here.slots) {
        slot->thread.join();
        for (Fiber& one : slot->block.fibers)
            if (one.stack != nullptr) munmap(one.stack, kStack);
        delete slot;
    }
    machine = nullptr;
    snprintf(message, room, "%s", here.error.c_str());
    return here.aborting;
}
