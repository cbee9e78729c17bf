// Blocks, warps and threads of a launch on a CPU: a thread of a kernel is a fiber, a block a thread of the operating
// system (so that `__shared__` can be its thread-local memory), and one fiber runs at a time.
//
// A fiber runs until it has to wait. Whoever waits asks again each time it is its turn; a round of a block's fibers in
// which nothing changed hands on to the next block, and when no block changes anything, the launch is stuck: an error.
// What the hardware does in its own time (copies, products of the tensor cores) happens at once, or as late as the
// kernel allows, or at random: a kernel that does not wait for it gives different results.
#include "copies.h"
#include "machine.h"
#include "products.h"

namespace simulator {

__thread Thread* self;
const int* powers;
const float* activations[8];

namespace {

// Dynamic shared memory of the one launch that runs: where it begins in a block's shared memory, bytes that the launch
// asks for, and how many of them, from the first on, a block has written.
struct {
    size_t begin, asked, written;
} dynamic;
constexpr size_t kDynamic = 232448;  // bytes of it that are there, as in kernel.h

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

// Of a block that has ended. What still has the words of `set_up` after the last other byte was not written.
void look_at_dynamic(const Block& block) {
    const unsigned char* const bytes = block.base + dynamic.begin;
    constexpr uint64_t kNobody = ~uint64_t{0};
    size_t end = kDynamic;
    while (end > 0 && memcmp(bytes + end - 8, &kNobody, 8) == 0) end -= 8;
    while (end > 0 && bytes[end - 1] == 0xFF) end--;
    dynamic.written = std::max(dynamic.written, end);
    if (end <= dynamic.asked || machine->aborting) return;
    machine->error = "a block wrote byte " + std::to_string(end - 1) + " of its dynamic shared memory, of which the " +
                     "launch asks for " + std::to_string(dynamic.asked) + " bytes.";
    machine->aborting = true;
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
            look_at_dynamic(block);
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

}  // namespace simulator

// --- a launch ---------------------------------------------------------------------------------------------------------

extern "C" void simulator_tables(const int* powers, const float* const* activations) {
    simulator::powers = powers;
    for (int i = 0; i < 8; i++) simulator::activations[i] = activations[i];
}

// Runs a kernel. `entry` calls it in one thread, `bind` tells where a block's shared memory is. `begin`: where in it
// the dynamic one begins. `bytes`: how much of that the launch asks for; then, how much the blocks have written.
// Returns 0, or 1 with an error in `message`, of `room` bytes.
extern "C" int simulator_launch(void (*entry)(void**), void (*bind)(unsigned char**, size_t*), void** args,
                                const unsigned* grid, const unsigned* size, unsigned cluster, unsigned at_once,
                                int when, uint64_t seed, size_t begin, size_t* bytes, char* message, size_t room) {
    using namespace simulator;
    dynamic = {begin, *bytes, 0};
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
    *bytes = dynamic.written;
    snprintf(message, room, "%s", here.error.c_str());
    return here.aborting;
}
