// The epilogue of fc1: bias, activation, cast to FP8 with the transposed copy.
//
//   h = T(acc * scale + bias) [m, n], kept;   y [m, width] is its activation (activation.cuh)
//   q = y in FP8, q_t its transpose [width, ceil16(m)], amax     (quantize.cuh, reference/ops/casts/cast_transpose.py)
//
// If the kind is gated, n is twice `width` and a tile holds the same columns of both halves of h. The consumers finish
// a tile in units: four columns of a row half of a piece (gemm_epilogue_tile.cuh), of both halves if gated.
//
// Defines: KIND (activation.cuh), FP8 (quantize.cuh).
#pragma once

#include "activations/activation.cuh"
#include "gemm_bias.cuh"
#include "gemm_epilogue_tile.cuh"
#include "common/quantize.cuh"
#include "common/transpose.cuh"

namespace twin {

// From codes[row][four columns] of rows i and i + 8 of a piece to a column's 16 codes: those of column i of the eight
// that lanes 4 i + q share.
__device__ __forceinline__ uint4 transpose_codes(const unsigned (&codes)[2][2]) {
    const bool upper = threadIdx.x & 16;  // lanes of rows 4 .. 7 and 12 .. 15 take the second four columns
    unsigned w[4];                        // rows j, j + 4, j + 8, j + 12
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const unsigned keep = upper ? codes[h][1] : codes[h][0];
        const unsigned received = __shfl_xor_sync(0xFFFFFFFF, upper ? codes[h][0] : codes[h][1], 16);
        w[2 * h] = upper ? received : keep;
        w[2 * h + 1] = upper ? keep : received;
    }
    unsigned columns[4], rows[4];
    transpose4(w[0], w[1], w[2], w[3], columns);
    transpose_lanes<4>(columns[0], columns[1], columns[2], columns[3]);
    transpose4(columns[0], columns[1], columns[2], columns[3], rows);
    return make_uint4(rows[0], rows[1], rows[2], rows[3]);
}

template <class Gemm>
struct BiasActivation {
    using P = Pieces<Gemm>;
    using Place = typename P::Place;
    using Out = typename Gemm::Out;
    static constexpr int kAcc = Gemm::kAcc, kRun = Gemm::kRun;
    // The kernel's parameter.
    struct Arguments {
        unsigned short* h;
        const void* bias;
        const float* scale_slot;
        float* amax_slot;  // may be null
        unsigned char* q;
        unsigned char* q_t;
        float* scale_inv;
        long long unused;
        long long bias_type;
    };

    struct Shared {
        SharedBias<Gemm, float> bias;
    };

    static constexpr int kSteps = Gemm::Config::kSteps;
    static constexpr int kConsumerRegisters = 232;
    // A tile's pieces; if gated, those of x1 and x2 make one item.
    static constexpr int kItems = P::kPieces / Gemm::kBHalves;
    static constexpr int kUnits = 4 * kItems;
    static constexpr int every = 1;  // k-blocks from step to step: a constant, since a variable costs more
    static_assert(kUnits % kSteps == 0, "whole units after each k-block");
    static_assert(Gemm::kBHalves == kHalves, "a gated activation reads B in halves");
    struct Loaded {};

    const Arguments& arguments;
    Shared& shared;
    unsigned char* memory;
    int m, width;
    float gemm_scale, scale;
    int row = 0, column = 0;  // of the warp's 16 rows, of the tile
    unsigned short* h;        // the lane's first place in the outputs
    unsigned char *q, *q_t;
    float amax = 0.0f;
    unsigned codes[2][2];  // of the item whose units are being finished
    unsigned words[kAcc / 2];
    bool pending = false;
    unsigned parity = 0;  // of the bias

    __device__ __forceinline__ BiasActivation(const Arguments& a, Shared& s, unsigned char* memory, float gemm_scale,
                                              int m, int n, int)
        : arguments(a),
          shared(s),
          memory(memory),
          m(m),
          width(n / Gemm::kBHalves),
          gemm_scale(gemm_scale),
          scale(*a.scale_slot) {}

    // By one thread, before the block's first barrier.
    __device__ __forceinline__ static void init(Shared& shared) { shared.bias.init(); }

    // By the producer's three idle warps; one suffices.
    __device__ __forceinline__ static void assist(const Arguments& a, Shared& shared, const typename Gemm::Tiles& tiles,
                                                  int n) {
        if (threadIdx.x / 32 % 4 != 3) return;
        unsigned parity = 0;
        for (int index = tiles.first(); index < tiles.count(); index = tiles.next(index), parity ^= 1)
            shared.bias.fill(tiles[index], a.bias, static_cast<int>(a.bias_type), n, parity);
    }

    __device__ __forceinline__ void load_ahead(Loaded&, const Tile&) const {}

    __device__ __forceinline__ void take(float (&acc)[kAcc], Loaded&, const Tile& tile) {
        scale_tile(acc, gemm_scale);
        if (static_cast<int>(arguments.bias_type) != kNoBias) shared.bias.add(acc, parity);
        parity ^= 1;
        pack_tile<Out, kRun>(words, acc);
        // Uniform: if a branch might divide a warp, the compiler would compute wgmma's operands lane by lane.
        row = uniform(tile.row + threadIdx.x / 32 * 16);
        column = uniform(tile.column);
        const Place at = place(column);
        h = arguments.h + static_cast<size_t>(at.row) * kHalves * width + at.column;
        q = arguments.q + static_cast<size_t>(at.row) * width + at.column;
        q_t = arguments.q_t + own_column(at) * rows_t() + row;
        pending = true;
    }

    __device__ __forceinline__ void step(int s) {
#pragma unroll
        for (int unit = s * (kUnits / kSteps); unit < (s + 1) * (kUnits / kSteps); unit++)
            finish_unit(unit / 4, unit / 2 % 2, unit % 2,
                        [&](int piece, int r) { return P::packed_row(words, piece, r); });
    }

    // The last tile, and the block's amax.
    __device__ __forceinline__ void finish() {
        P::park(memory, words);
#pragma unroll 1
        for (int item = 0; item < kItems; item++)
#pragma unroll
            for (int unit = 0; unit < 4; unit++)
                finish_unit(item, unit / 2, unit % 2,
                            [&](int piece, int r) { return P::parked_row(memory, 2 * piece + r); });
        const unsigned most = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(amax));
        if (threadIdx.x % 32 == 0 && arguments.amax_slot != nullptr && most != 0)
            atomicMax(reinterpret_cast<int*>(arguments.amax_slot), static_cast<int>(most));
        if (blockIdx.x == 0) *arguments.scale_inv = 1.0f / scale;
    }

private:
    // The lane's part of a piece; `first` is the piece's first column.
    __device__ __forceinline__ Place place(int first) const {
        const int lane = threadIdx.x % 32;
        int r = row + lane / 4;
        asm volatile("" : "+r"(r));  // addresses are computed anew each time: there are no registers to keep them
        return {r, first + kRun * (lane % 4), {r < m, r + 8 < m}, kRun == 8 || first + P::kSecond < width};
    }

    // The column that a lane has after transpose_codes, and whether it exists; the bytes of a row of q_t.
    __device__ __forceinline__ int own_column(const Place& at) const {
        const int i = threadIdx.x % 32 / 4;
        return at.column + i / 4 * P::kSecond + i % 4;
    }
    __device__ __forceinline__ bool owns(const Place& at) const { return threadIdx.x % 32 < 16 || at.second; }
    __device__ __forceinline__ size_t rows_t() const { return (m + 15) / 16 * 16; }

    // Finish the first (f 0) or the other four columns of row half r of an item.
    template <class Row>
    __device__ __forceinline__ void finish_unit(int item, int r, int f, const Row& packed) {
        if (row >= m || column + 32 * item >= width) return;
        const Place at = place(column + 32 * item);
        Packed x[kHalves];
#pragma unroll
        for (int half = 0; half < kHalves; half++) x[half] = P::existing(packed(item + half * kItems, r), r, at);
        float y[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            y[c] = forward(unpack<Out>(x[0].words, 4 * f + c), unpack<Out>(x[kHalves - 1].words, 4 * f + c));
            amax = amax_of(amax, y[c]);
        }
        const unsigned code = quantize4(y, scale);
        codes[r][f] = at.rows[r] ? code : 0;             // not 0 * scale, which is NaN if scale is infinite
        const size_t rows = 8 * r, columns = 32 * item;  // from the lane's first place
        if (f == 0 && at.rows[r]) {
#pragma unroll
            for (int half = 0; half < kHalves; half++)
                P::store_eight_columns(h + (rows * kHalves + half) * width + columns, x[half].words, at.second);
        }
        if (f == 1 && at.rows[r]) P::store_eight_columns(q + rows * width + columns, codes[r], at.second);
        if (f == 1 && r == 1) {
            const uint4 run = transpose_codes(codes);
            if (owns(at)) *reinterpret_cast<uint4*>(q_t + columns * rows_t()) = run;
        }
    }
};

}  // namespace twin
