// Tiles handed on: the consumers of a GEMM leave a finished tile, in 16 bits, to three other warps of the block.
//
// What follows the product (an activation, casts, a transposition, dropout) costs thousands of instructions a tile. The
// producer's warpgroup has three warps without work: they do all of that while the consumers compute the next tile. A
// consumer scales its accumulators, rounds them, and puts 16 bytes at a time where the same lane of another warp finds
// them, so no layout changes on the way:
//
//   tile     [WARPGROUPS][4 runs of 16 rows][pieces of 32 columns][2 halves][32 lanes] 16 bytes, behind the stages
//   handed   WARPGROUPS mbarriers: the four consumer warps of a warpgroup have written their rows
//   taken    WARPGROUPS mbarriers: the three workers will not read them any more
//
// A piece is 16 rows x 32 columns. Lane 4 i + q holds rows i and i + 8 of eight columns of it: 8 q .. 8 q + 7, or with
// RUN 4 two fours, 4 q .. and 16 + 4 q .. ; so it can write 16 bytes of a row of 16-bit values and 8 of FP8 codes.
#pragma once

#include "gemm_fp8_mainloop.cuh"
#include "transpose.cuh"
#include "wide.cuh"

namespace twin {

constexpr int kWorkers = 3;
constexpr int kPieces = kBlockN / 32;
constexpr int kPieceBytes = 16 * 32 * 2;
constexpr int kRunBytes = kPieces * kPieceBytes;
constexpr int kSecond = kRun == 8 ? 4 : 16;  // from a lane's first four columns to the others
static_assert(kPieces % kHalves == 0, "both halves of a gated tile are whole pieces");

struct HandoffMap {
    static constexpr int kHanded = Map::kBytes;
    static constexpr int kTaken = kHanded + 8 * WARPGROUPS;
    static constexpr int kTile = kTaken + 8 * WARPGROUPS;
    static constexpr int kBytes = kTile + WARPGROUPS * 4 * kRunBytes;
    static_assert(kTile % 16 == 0, "the tile is read and written in vectors of 16 bytes");
    static_assert(kBytes <= 232448, "a block has at most 227 KB of shared memory");
};

// By one thread, before the block's first barrier.
__device__ __forceinline__ void init_handoff(unsigned shared) {
    for (int w = 0; w < WARPGROUPS; w++) {
        mbarrier_init(shared + HandoffMap::kHanded + 8 * w, 4);
        mbarrier_init(shared + HandoffMap::kTaken + 8 * w, kWorkers);
    }
}

// A consumer warp leaves its 16 rows, packed by pack_tile; `parity` alternates from tile to tile, starting at 0.
__device__ __forceinline__ void hand_over(const unsigned (&words)[kAcc / 2], unsigned char* memory, unsigned parity) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned shared = shared_address(memory);
    mbarrier_wait(shared + HandoffMap::kTaken + 8 * (warp / 4), parity ^ 1);
    uint4* to = reinterpret_cast<uint4*>(memory + HandoffMap::kTile + warp * kRunBytes) + lane;
#pragma unroll
    for (int i = 0; i < kAcc / 8; i++)
        to[32 * i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared + HandoffMap::kHanded + 8 * (warp / 4));
}

// Where a lane's part of a piece lies in a matrix, and what of it exists.
struct Place {
    int row, column;  // of the first row and of the first four columns
    bool rows[2];     // row and row + 8
    bool second;      // the other four columns; the first four do
};

// Two rows of eight 16-bit values.
struct Piece {
    Vector<8> rows[2];
};

// A lane's part of a piece that was handed over; zeros where nothing exists. `from` is the piece's first byte.
__device__ __forceinline__ Piece take_piece(const unsigned char* from, const Place& place) {
    const uint4* source = reinterpret_cast<const uint4*>(from) + threadIdx.x % 32;
    const uint4 low = source[0], high = source[32];
    const unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    Piece piece;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const unsigned word = words[kRun == 8 ? 4 * h + j : 4 * (j / 2) + 2 * h + j % 2];
            piece.rows[h].words[j] = place.rows[h] && (j < 2 || place.second) ? word : 0;
        }
    return piece;
}

// Rows of eight values of kBytes bytes in four or two words, in memory: one vector, or two that are apart.
// `pointer` is that of the first four columns.
template <int kWords>
__device__ __forceinline__ void store_eight_columns(void* pointer, const unsigned (&words)[kWords], bool second) {
    constexpr int kBytes = kWords / 2;  // of a value
    if constexpr (kRun == 8 && kWords == 4) {
        *static_cast<uint4*>(pointer) = make_uint4(words[0], words[1], words[2], words[3]);
    } else if constexpr (kRun == 8) {
        *static_cast<uint2*>(pointer) = make_uint2(words[0], words[1]);
    } else if constexpr (kWords == 4) {
        static_cast<uint2*>(pointer)[0] = make_uint2(words[0], words[1]);
        if (second) static_cast<uint2*>(pointer)[kSecond * kBytes / 8] = make_uint2(words[2], words[3]);
    } else {
        static_cast<unsigned*>(pointer)[0] = words[0];
        if (second) static_cast<unsigned*>(pointer)[kSecond * kBytes / 4] = words[1];
    }
}

// Eight 16-bit values of a row in global memory; zeros where `exists` is false.
__device__ __forceinline__ Vector<8> load_eight_columns(const unsigned short* pointer, bool exists, bool second) {
    Vector<8> v = {};
    if (!exists) return v;
    if constexpr (kRun == 8) {
        v = load_once<8>(pointer);
    } else {
        const Vector<4> first = load_once<4>(pointer);
        v.words[0] = first.words[0], v.words[1] = first.words[1];
        if (second) {
            const Vector<4> other = load_once<4>(pointer + kSecond);
            v.words[2] = other.words[0], v.words[3] = other.words[1];
        }
    }
    return v;
}

// L2 fetches the rows of a tile of a 16-bit matrix [m, n]; each worker asks for a third of them.
__device__ __forceinline__ void prefetch_tile(const unsigned short* matrix, int worker, const Tile& tile, int first_column,
                                              int columns, int m, int n) {
    for (int r = 32 * worker + threadIdx.x % 32; r < kBlockM && tile.row + r < m; r += 32 * kWorkers)
        prefetch_l2(matrix + static_cast<size_t>(tile.row + r) * n + first_column, 2 * columns);
}

// The work of the three warps. `finish(tile, warpgroup, piece, from)` does 64 rows of a piece's columns, whose 16-row
// parts lie kRunBytes apart from `from` on; kItems pieces of a tile are worked on (of a gated one, those of x1).
template <int kItems, class Begin, class Finish>
__device__ __forceinline__ void work(const unsigned char* memory, const Tiles& tiles, int worker, const Begin& begin,
                                     const Finish& finish) {
    const unsigned shared = shared_address(memory);
    unsigned parity = 0;
    for (int index = tiles.first(); index < tiles.count(); index += tiles.step(), parity ^= 1) {
        const Tile tile = tiles[index];
        begin(tile);
#pragma unroll 1
        for (int w = 0; w < WARPGROUPS; w++) {
            mbarrier_wait(shared + HandoffMap::kHanded + 8 * w, parity);
            const unsigned char* rows = memory + HandoffMap::kTile + w * 4 * kRunBytes;
            // Items of both warpgroups go round among the workers: item w kItems + p is worker's if equal modulo 3.
#pragma unroll 1
            for (int p = (worker + 2 * w * kItems) % kWorkers; p < kItems; p += kWorkers)
                finish(tile, w, p, rows + p * kPieceBytes);
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(shared + HandoffMap::kTaken + 8 * w);
        }
    }
}

}  // namespace twin
