// Pieces of a tile, for epilogues fused into an FP8 GEMM: 16 rows, those of a consumer warp, x 32 columns.
//
// Lane 4 i + q holds rows i and i + 8 of eight columns: 8 q .. 8 q + 7, or with kRun 4 those from 4 q and from 16 + 4 q
// on, four each. With kRun 8 it stores 16 bytes of a row of 16-bit values, or 8 FP8 codes, at once.
#pragma once

#include "gemm_fp8_mainloop.cuh"
#include "ptx/barrier.cuh"

namespace twin {

// Eight 16-bit values of a row, as four words.
struct Packed {
    unsigned words[4];
};

// Value i (a constant after unrolling) of words of two 16-bit values, in fp32, exact.
template <class T>
__device__ __forceinline__ float unpack(const unsigned* words, int i) {
    const unsigned word = words[i / 2];
    if constexpr (same_type<T, BF16>) return __uint_as_float(i & 1 ? word & 0xFFFF0000 : word << 16);
    return cvt_f32_f16(static_cast<unsigned short>(i & 1 ? word >> 16 : word & 0xFFFF));
}

template <class Gemm>
struct Pieces {
    static constexpr int kRun = Gemm::kRun, kAcc = Gemm::kAcc;
    static constexpr int kPieces = Gemm::kBlockN / 32;
    static constexpr int kSecond = kRun == 8 ? 4 : 16;  // from a lane's first four columns to the others
    static_assert(kPieces % Gemm::kBHalves == 0, "both halves of a gated tile are whole pieces");

    // Where a lane's part of a piece lies in a matrix, and which rows and columns exist.
    struct Place {
        int row, column;  // of the first row and of the first four columns
        bool rows[2];     // row and row + 8
        bool second;      // whether the other four columns exist; the first four do
    };

    // Store eight values of a row, given as four words or two: one vector, or two that are apart. `pointer`: the first
    // four.
    template <int kWords>
    static __device__ __forceinline__ void store_eight_columns(void* pointer, const unsigned (&words)[kWords],
                                                               bool second) {
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

    // Row half r of piece `piece` of a packed tile (pack_tile), a lane's eight columns.
    static __device__ __forceinline__ Packed packed_row(const unsigned (&words)[kAcc / 2], int piece, int r) {
        Packed row;
#pragma unroll
        for (int j = 0; j < 4; j++)
            row.words[j] = words[8 * piece + (kRun == 8 ? 4 * r + j : 4 * (j / 2) + 2 * r + j % 2)];
        return row;
    }

    // Such a row with zeros for values that do not exist.
    static __device__ __forceinline__ Packed existing(Packed row, int r, const Place& at) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (!at.rows[r] || (j >= 2 && !at.second)) row.words[j] = 0;
        return row;
    }

    // After a block's last tile there are no k-blocks to run beside. The tile is parked in shared memory, where the
    // stages were, and a loop finishes it with a tenth of the instructions of the unrolled steps. Row half r of piece p
    // is row 2 p + r.
    static __device__ __forceinline__ uint4* parked(unsigned char* memory, int row) {
        return reinterpret_cast<uint4*>(memory) + row * (128 * Gemm::kWarpgroups) + threadIdx.x;
    }
    static __device__ __forceinline__ Packed parked_row(unsigned char* memory, int row) {
        const uint4 v = *parked(memory, row);
        return {v.x, v.y, v.z, v.w};
    }
    static __device__ __forceinline__ void park(unsigned char* memory, const unsigned (&words)[kAcc / 2]) {
        barrier_sync<128 * Gemm::kWarpgroups>(1);  // no consumer reads a stage any more
#pragma unroll
        for (int i = 0; i < 2 * kPieces; i++) {
            const Packed v = packed_row(words, i / 2, i % 2);
            *parked(memory, i) = make_uint4(v.words[0], v.words[1], v.words[2], v.words[3]);
        }
    }
};

// The main loop of an epilogue with a step after every `every` k-blocks of the next tile. The host chooses no more
// steps than there are k-blocks.
template <class Gemm>
struct SteppedMainloop : Chain<typename Gemm::Map, typename Gemm::Issue> {
    using Chain<typename Gemm::Map, typename Gemm::Issue>::Chain;

    template <class Epilogue, class Last>
    __device__ __forceinline__ void operator()(float (&acc)[Gemm::kAcc], const Tile&, Epilogue& epilogue, const Last&) {
        int kb = 0;
        if (epilogue.pending) {
#pragma unroll
            for (int s = 0; s < Epilogue::kSteps; s++) {
#pragma unroll 1
                for (int end = kb + epilogue.every; kb < end; kb++) this->block(acc, kb == 0);
                epilogue.step(s);
            }
        } else {
            this->block(acc, kb++ == 0);
        }
        this->finish(acc, kb);
    }
};

}  // namespace twin
