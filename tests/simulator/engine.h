// What the engine gives to kernels that were compiled for the CPU: who runs, waiting, and asynchronous copies.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simulator {

struct uint3_ {
    unsigned x, y, z;
};

struct Block;
struct Warp;

// A thread of a kernel.
struct Thread {
    uint3_ index;
    unsigned lane;
    Warp* warp;
    Block* block;
    uint3_ block_index, block_size, grid_size;
};

extern __thread Thread* self;

// The running thread lets the others go on. `reason` is what a report of a deadlock says of it.
void yield(const char* reason);
// Something has changed that a waiting thread may wait for.
void progressed();
// Ends the launch with an error that names the running thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The recorded words of ex2.approx on multiples of 2^-15 (reference.numbers.elementary.powers_of_two).
extern const int* powers;
// And those of gelu, dgelu, silu and dsilu of every bf16 value, and of every fp16 value.
extern const float* activations[8];

// --- shared memory: an address is an offset in the block's; rank + 1 of another block of the cluster in bits 24 up ---
unsigned to_shared(const void* pointer);
unsigned char* from_shared(unsigned address, size_t bytes);

// --- threads of a warp: each lane of `mask` gives a word and gets all words, by lane ---------------------------------
const uint64_t* exchange(unsigned mask, uint64_t word);

// --- barriers ---------------------------------------------------------------------------------------------------------
void block_barrier(int id, unsigned threads);  // 0 threads: all of the block that have not ended
void cluster_arrive();
void cluster_wait();
unsigned cluster_rank();
void mbarrier_init(unsigned address, unsigned arrivals);
void mbarrier_arrive(unsigned address, unsigned expected_bytes);
bool mbarrier_try_wait(unsigned address, unsigned parity);

// --- the copy engine --------------------------------------------------------------------------------------------------
void load_box(unsigned destination, const void* map, unsigned barrier, const int* x, int rank, unsigned blocks);
void bulk_load(unsigned destination, const void* from, unsigned bytes, unsigned barrier);
void store_box(const void* map, unsigned source, const int* x, int rank);
void bulk_store(void* to, unsigned source, unsigned bytes, bool adds);
void bulk_commit();
void bulk_wait(int pending, bool read);  // `read`: until shared memory has been read
void copy_16(void* shared, const void* global, bool there);
void copy_commit();
void copy_wait(int pending);
void store_async(unsigned address, const unsigned* words, int count, unsigned barrier);

// --- the tensor core --------------------------------------------------------------------------------------------------
enum Format { kE4M3, kE5M2, kBF16, kFP16 };

// One instruction: d, of `columns` / 2 words of each of the warpgroup's threads, += a b. Without `registers` a is a
// descriptor.
struct Product {
    Format a_format, b_format;
    int columns;
    bool a_transposed, b_transposed, accumulates;
    uint64_t a, b;
    bool operator==(const Product& other) const {
        return a == other.a && b == other.b && columns == other.columns && accumulates == other.accumulates;
    }
};
void multiply(const Product& product, float* d, const unsigned* registers);
void multiply_commit();
void multiply_wait(int pending);

}  // namespace simulator
