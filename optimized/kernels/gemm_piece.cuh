// Pieces: how what follows an FP8 product sees its tile. A piece is 16 rows, those of a consumer warp, x 32 columns.
//
// Lane 4 i + q holds rows i and i + 8 of eight columns of it: 8 q .. 8 q + 7, or with RUN 4 two fours, 4 q .. and
// 16 + 4 q .. ; so it can write 16 bytes of a row of 16-bit values, and 8 of FP8 codes.
#pragma once

#include "gemm_fp8_mainloop.cuh"
#include "wide.cuh"

namespace twin {

constexpr int kPieces = kBlockN / 32;
constexpr int kSecond = kRun == 8 ? 4 : 16;  // from a lane's first four columns to the others
static_assert(kPieces % kHalves == 0, "both halves of a gated tile are whole pieces");

// Where a lane's part of a piece lies in a matrix, and what of it exists.
struct Place {
    int row, column;  // of the first row and of the first four columns
    bool rows[2];     // row and row + 8
    bool second;      // the other four columns; the first four do
};

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

// Row half r of piece `piece` of a packed tile (pack_tile), a lane's eight columns.
__device__ __forceinline__ Vector<8> packed_row(const unsigned (&words)[kAcc / 2], int piece, int r) {
    Vector<8> row;
#pragma unroll
    for (int j = 0; j < 4; j++) row.words[j] = words[8 * piece + (kRun == 8 ? 4 * r + j : 4 * (j / 2) + 2 * r + j % 2)];
    return row;
}

// Such a row with zeros where nothing exists.
__device__ __forceinline__ Vector<8> existing(Vector<8> row, int r, const Place& at) {
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (!at.rows[r] || (j >= 2 && !at.second)) row.words[j] = 0;
    return row;
}

// A block's last tile waits in shared memory, where the stages were: what follows it has no k-block to stand beside, and a
// loop over its pieces, which registers do not allow, is a tenth of the instructions to fetch. Row half r of piece p is
// row 2 p + r; behind the tile's rows is room for others.
__device__ __forceinline__ uint4* parked(unsigned char* memory, int row) {
    return reinterpret_cast<uint4*>(memory) + row * (128 * WARPGROUPS) + threadIdx.x;
}
__device__ __forceinline__ void park_row(unsigned char* memory, int row, const Vector<8>& v) {
    *parked(memory, row) = make_uint4(v.words[0], v.words[1], v.words[2], v.words[3]);
}
__device__ __forceinline__ Vector<8> parked_row(unsigned char* memory, int row) {
    const uint4 v = *parked(memory, row);
    return {v.x, v.y, v.z, v.w};
}
__device__ __forceinline__ void park(unsigned char* memory, const unsigned (&words)[kAcc / 2]) {
    asm volatile("bar.sync 1, %0;" ::"n"(128 * WARPGROUPS) : "memory");  // no consumer reads a stage any more
#pragma unroll
    for (int i = 0; i < 2 * kPieces; i++) park_row(memory, i, packed_row(words, i / 2, i % 2));
}

}  // namespace twin
