// word_sums: digests of many tensors, sums of integers modulo 2^64 (reference/ops/digests/word_sums.py).
//
// A block of threads takes kBlocks neighbouring blocks of 64 x 64 words of a tensor and reads each word once. A thread has
// the same four rows and four columns of each: its words' sums by row and by column are multiplied by the constants of
// those, and the sums of these by the constants of the block. The next block's words are on their way meanwhile. What the
// threads have is added up at the end, in any order: these are integers.
//
// Bound by memory: some ten instructions a word are about half of what a multiprocessor can do meanwhile. Tensors that do
// not start at a multiple of 16 bytes, and the last block of each, are read word by word or byte by byte, by way of
// shared memory.
#include "common/multi_tensor.cuh"
#include "ptx/load.cuh"

using namespace twin;

using u64 = unsigned long long;

constexpr int kSide = 64;
constexpr int kWords = kSide * kSide;
constexpr int kBytes = 4 * kWords;
constexpr int kBlocks = 8;
constexpr int kEach = 4;                    // rows and columns of a thread
constexpr int kAcross = kSide / kEach;      // threads of a row
constexpr int kApart = kThreads / kAcross;  // rows between two of a thread's
constexpr int kSums = 3;
constexpr int kWarps = kThreads / 32;
constexpr u64 kRow = 1ull << 32, kColumn = 1ull << 33;
static_assert(kApart * kEach == kSide);
static_assert(2 * (kSide + kBlocks) <= kThreads);

struct Entry {
    const unsigned char* x;
    long long count;  // of bytes
    int first_block, aligned;
};

struct Table {
    Entry tensors[CAPACITY];
};

// splitmix64(j), made odd.
__device__ __forceinline__ u64 constant(u64 j) {
    u64 z = (j + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (z ^ (z >> 31)) | 1;
}

struct Constants {
    u64 row[kEach], column[kEach];  // of a thread's rows and columns
};

// A thread's words: four neighbours in each of four rows.
using Words = unsigned[kEach][kEach];

__device__ __forceinline__ int first_word(int row) {
    return kSide * kApart * row + kEach * static_cast<int>(threadIdx.x);
}

__device__ __forceinline__ void load(Words& w, const unsigned char* x) {
#pragma unroll
    for (int i = 0; i < kEach; i++) load_read_only(w[i][0], w[i][1], w[i][2], w[i][3], x + 4 * first_word(i));
}

__device__ __forceinline__ unsigned from_bytes(const unsigned char* x, int count) {
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < count) word |= static_cast<unsigned>(x[i]) << 8 * i;
    return word;
}

// The block that begins at x, of which `bytes` exist, in shared memory; what does not exist is zero.
__device__ __forceinline__ void stage(unsigned (&words)[kWords], const unsigned char* x, long long bytes) {
    const int whole = static_cast<int>(min(static_cast<long long>(kWords), bytes / 4));
    const int thread = static_cast<int>(threadIdx.x);
    if (reinterpret_cast<u64>(x) % 4 == 0) {
#pragma unroll 4
        for (int i = thread; i < kWords; i += kThreads)
            words[i] = i < whole ? reinterpret_cast<const unsigned*>(x)[i] : 0;
    } else {
#pragma unroll 2
        for (int i = thread; i < kWords; i += kThreads) words[i] = i < whole ? from_bytes(x + 4 * i, 4) : 0;
    }
    if (whole < kWords && thread == whole % kThreads)  // this thread has written a zero there
        words[whole] = from_bytes(x + 4 * whole, static_cast<int>(bytes % 4));
}

// Add a block's words, whose constants are of_rows and of_columns.
__device__ __forceinline__ void add(u64 (&sum)[kSums], const Words& w, const Constants& of, u64 of_rows,
                                    u64 of_columns) {
    u64 by_row = 0, by_column = 0;
    long long columns[kEach] = {};
#pragma unroll
    for (int i = 0; i < kEach; i++) {
        long long row = 0;
#pragma unroll
        for (int j = 0; j < kEach; j++) {
            const long long word = static_cast<int>(w[i][j]);
            row += word;
            columns[j] += word;
        }
        sum[0] += static_cast<u64>(row);
        by_row += static_cast<u64>(row) * of.row[i];
    }
#pragma unroll
    for (int j = 0; j < kEach; j++) by_column += static_cast<u64>(columns[j]) * of.column[j];
    sum[1] += by_row * of_rows;
    sum[2] += by_column * of_columns;
}

__device__ __forceinline__ u64 warp_sum(u64 value) {
#pragma unroll
    for (int half = 16; half > 0; half /= 2) value += __shfl_down_sync(0xFFFFFFFF, value, half);
    return value;
}

extern "C" __global__ void __launch_bounds__(kThreads, 3)
    word_sums(const __grid_constant__ Table table, int tensors, u64* digests) {
    const Entry& t = tensor_of_block<CAPACITY>(table.tensors, tensors);
    const long long first = static_cast<long long>(static_cast<int>(blockIdx.x) - t.first_block) * kBlocks;
    const int thread = static_cast<int>(threadIdx.x);

    __shared__ u64 of_side[2 * kSide], of_block[2 * kBlocks];
    if (thread < 2 * kSide) {
        of_side[thread] = constant(thread);
    } else if (thread < 2 * (kSide + kBlocks)) {
        const int i = thread - 2 * kSide;
        of_block[i] = constant((i < kBlocks ? kRow : kColumn) + first + i % kBlocks);
    }
    __syncthreads();
    Constants of;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
        of.row[i] = of_side[thread / kAcross + kApart * i];
        of.column[i] = of_side[kSide + thread % kAcross * kEach + i];
    }

    const unsigned char* x = t.x + first * kBytes;
    const long long bytes = t.count - first * kBytes;  // from x on
    const int whole = t.aligned ? static_cast<int>(min(static_cast<long long>(kBlocks), bytes / kBytes)) : 0;
    u64 sum[kSums] = {};
    Words w, next;
    if (whole > 0) load(next, x);
#pragma unroll 1
    for (int block = 0; block < whole; block++) {
#pragma unroll
        for (int i = 0; i < kEach; i++)
#pragma unroll
            for (int j = 0; j < kEach; j++) w[i][j] = next[i][j];
        if (block + 1 < whole) load(next, x + (block + 1) * kBytes);
        add(sum, w, of, of_block[block], of_block[kBlocks + block]);
    }
    alignas(16) __shared__ unsigned words[kWords];
#pragma unroll 1
    for (int block = whole; block < kBlocks && static_cast<long long>(block) * kBytes < bytes; block++) {
        __syncthreads();
        stage(words, x + block * kBytes, bytes - static_cast<long long>(block) * kBytes);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kEach; i++)
#pragma unroll
            for (int j = 0; j < kEach; j++) w[i][j] = words[first_word(i) + j];
        add(sum, w, of, of_block[block], of_block[kBlocks + block]);
    }

    __shared__ u64 of_warp[kSums][kWarps];
#pragma unroll
    for (int k = 0; k < kSums; k++) {
        const u64 whole = warp_sum(sum[k]);
        if (thread % 32 == 0) of_warp[k][thread / 32] = whole;
    }
    __syncthreads();
    if (thread < kSums) {
        u64 whole = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; warp++) whole += of_warp[thread][warp];
        atomicAdd(digests + (&t - table.tensors) * kSums + thread, whole);
    }
}
