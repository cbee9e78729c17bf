// The epilogue of proj and fc2: bias, dropout, residual, of x = T(acc * scale).
//
//   out = T( T( dropout( T( x + bias ) ) ) + residual )         kernels/random/dropout.cu, reference/ops/random/dropout.py
//
// Each part may be absent. Element row * n + column has its own bit of the mask; eight neighbours share a Philox
// counter. The consumers finish a tile in row halves of pieces (gemm_epilogue_tile.cuh), spread over the next tile's k-blocks;
// mask, bias and residual reach them through shared memory (gemm_mask.cuh, gemm_bias.cuh, gemm_residual.cuh).
#pragma once

#include "gemm_bias.cuh"
#include "gemm_mask.cuh"
#include "gemm_residual.cuh"
#include "ptx/add.cuh"

namespace twin {

// a + b for two columns, each sum rounded once to T. It equals the sum in fp32 rounded to T: either fp32 holds the sum
// exactly, or the smaller addend is less than half the distance from the greater to its neighbours in T, and both ways
// give the greater.
template <class T>
__device__ __forceinline__ unsigned add_two(unsigned a, unsigned b) {
    if constexpr (same_type<T, BF16>) return add_bf16x2(a, b);
    return add_f16x2(a, b);
}

// Eight columns of a row: T( T( dropout( T( x + bias ) ) ) + residual ). `bits` of the mask are shifted to the top.
template <class Out, bool kDrop>
__device__ __forceinline__ void finish_eight(unsigned (&out)[4], const Packed& x, const Packed& bias,
                                             const Packed& residual, unsigned bits, float keep_scale, bool has_bias,
                                             bool has_residual) {
#pragma unroll
    for (int j = 0; j < 4; j++) {  // two values at a time: rounding one alone takes eight times as long
        unsigned two = x.words[j];
        if (has_bias) two = add_two<Out>(two, bias.words[j]);
        if constexpr (kDrop) {
            two = pack<Out>(__fmul_rn(unpack<Out>(&two, 0), keep_scale), __fmul_rn(unpack<Out>(&two, 1), keep_scale));
            two &= kept_two(bits, j);
        }
        if (has_residual) two = add_two<Out>(two, residual.words[j]);
        out[j] = two;
    }
}

template <class Gemm>
struct BiasDropoutAdd {
    using P = Pieces<Gemm>;
    using Place = typename P::Place;
    using Out = typename Gemm::Out;
    using Mask = SharedMask<Gemm>;
    using Boxes = SharedBoxes<Gemm>;
    static constexpr int kAcc = Gemm::kAcc, kRun = Gemm::kRun, kPieces = P::kPieces, kSecond = P::kSecond;
    // The kernel's parameter. Absent parts are null.
    struct Arguments {
        CUtensorMap residual_map;
        unsigned short* out;
        const unsigned short* bias;
        const unsigned short* residual;
        const unsigned long long* rng_state;
        long long threshold;
        float keep_scale;
    };

    struct Shared {
        SharedBias<Gemm, unsigned short> bias;
        Mask mask;
        unsigned char boxes[127 + sizeof(Boxes)];  // from its first multiple of 128 bytes on
    };

    static constexpr int kSteps = Gemm::Config::kSteps;
    static constexpr bool kDrop = Gemm::Config::kDrop;  // else nothing is dropped
    static constexpr int kConsumerRegisters = Gemm::kBlockN == 256 ? 224 : 208;
    static constexpr int kRows = 2 * kPieces;  // row halves of pieces
    static_assert(kRows % kSteps == 0, "whole rows after each k-block");
    struct Loaded {};

    const Arguments& arguments;
    Shared& shared;
    unsigned char* memory;
    float gemm_scale;
    int m, n;
    int every;                // k-blocks from step to step
    int row = 0, column = 0;  // of the warp's 16 rows, of the tile
    int warp;
    size_t first = 0;  // the lane's first element
    unsigned kept[Mask::kWords];
    unsigned words[kAcc / 2];
    bool pending = false;
    unsigned parity = 1;  // of the mailboxes

    __device__ __forceinline__ BiasDropoutAdd(const Arguments& a, Shared& s, unsigned char* memory, float gemm_scale,
                                              int m, int n, int k_blocks)
        : arguments(a),
          shared(s),
          memory(memory),
          gemm_scale(gemm_scale),
          m(m),
          n(n),
          every(k_blocks / kSteps),
          warp(uniform(threadIdx.x / 32)) {}

    // By one thread, before the block's first barrier.
    __device__ __forceinline__ static void init(Shared& shared) {
        shared.bias.init();
        shared.mask.init();
        boxes(shared).init();
    }

    // By the producer's three idle warps.
    __device__ __forceinline__ static void assist(const Arguments& a, Shared& shared, const typename Gemm::Tiles& tiles,
                                                  int n) {
        unsigned parity = 0;
        for (int index = tiles.first(); index < tiles.count(); index = tiles.next(index), parity ^= 1) {
            const Tile tile = tiles[index];
            if (kDrop) shared.mask.draw(tile, read_state(a.rng_state), static_cast<unsigned>(a.threshold), n, parity);
            if (threadIdx.x / 32 % 4 == 3)
                shared.bias.fill(tile, a.bias, a.bias == nullptr ? kNoBias : kBiasOf<Out>, n, parity);
        }
    }

    __device__ __forceinline__ void load_ahead(Loaded&, const Tile&) const {}

    __device__ __forceinline__ void take(float (&acc)[kAcc], Loaded&, const Tile& tile) {
        scale_tile(acc, gemm_scale);
        pack_tile<Out, kRun>(words, acc);
        row = uniform(tile.row + threadIdx.x / 32 * 16);
        column = uniform(tile.column);
        const Place at = place(0);
        first = static_cast<size_t>(at.row) * n + at.column;
        parity ^= 1;
        for (int piece = 0; piece < kBoxes; piece++) fetch(piece);
        pending = true;
    }

    __device__ __forceinline__ void step(int s) {
#pragma unroll
        for (int i = s * (kRows / kSteps); i < (s + 1) * (kRows / kSteps); i++) {
            if (i == 0) wait();
            finish_row(i, P::packed_row(words, i / 2, i % 2), kept[i / 4]);
            if (i + 1 == kRows && arguments.bias != nullptr) shared.bias.mailbox.arrive_empty();
        }
    }

    // The last tile.
    __device__ __forceinline__ void finish() {
        P::park(memory, words);
        wait();
#pragma unroll 1
        for (int piece = 0; piece < kPieces; piece++) {
            const unsigned bits = kDrop ? shared.mask.words[piece / 2][threadIdx.x] : 0;  // no tile follows
#pragma unroll
            for (int i = 2 * piece; i < 2 * piece + 2; i++) finish_row(i, P::parked_row(memory, i), bits);
        }
    }

private:
    __device__ __forceinline__ static Boxes& boxes(Shared& shared) {
        constexpr int kOffset = Gemm::Map::kBytes + sizeof(Shared::bias) + sizeof(Shared::mask);
        return *reinterpret_cast<Boxes*>(shared.boxes + (128 - kOffset % 128) % 128);
    }

    // The lane's part of the piece of row half i.
    __device__ __forceinline__ Place place(int i) const {
        int r = row + threadIdx.x % 32 / 4;
        asm volatile("" : "+r"(r));  // addresses are computed anew each time: there are no registers to keep them
        const int lane = threadIdx.x % 32, first = column + i / 2 * 32;
        return {r, first + kRun * (lane % 4), {r < m, r + 8 < m}, kRun == 8 || first + kSecond < n};
    }

    __device__ __forceinline__ void fetch(int piece) const {
        if (arguments.residual != nullptr && piece < kPieces)
            boxes(shared).fetch(warp, &arguments.residual_map, piece, row, column + 32 * piece);
    }

    // Wait for bias and mask, and read the mask at once, so that the next tile's can be drawn.
    __device__ __forceinline__ void wait() {
        if (arguments.bias != nullptr) shared.bias.mailbox.wait_full(parity);
        if constexpr (kDrop) {
            shared.mask.mailbox.wait_full(parity);
#pragma unroll
            for (int i = 0; i < Mask::kWords; i++) kept[i] = shared.mask.words[i][threadIdx.x];
            shared.mask.mailbox.arrive_empty();
        }
    }

    __device__ __forceinline__ void finish_row(int i, const Packed& packed, unsigned bits) {
        if (arguments.residual != nullptr && i % 2 == 0) boxes(shared).wait_full(warp, i / 2, parity);
        store_row(i, packed, bits);
        if (i % 2 == 0) return;
        __syncwarp();  // the box has been read
        fetch(i / 2 + kBoxes);
    }

    __device__ __forceinline__ void store_row(int i, const Packed& packed, unsigned bits) const {
        const Place at = place(i);
        if (column + i / 2 * 32 >= n || !at.rows[i % 2]) return;
        const Packed x = P::existing(packed, i % 2, at);
        Packed bias;
#pragma unroll
        for (int f = 0; f < 2; f++)
            reinterpret_cast<Four<unsigned short>*>(bias.words)[f] =
                shared.bias.four(i / 2 * 32 + threadIdx.x % 4 * kRun + f * kSecond);
        const Packed residual = boxes(shared).row(warp, i / 2, i % 2);
        unsigned out[4];
        finish_eight<Out, kDrop>(out, x, bias, residual, bits << i % 4 * 4, arguments.keep_scale,
                                 arguments.bias != nullptr, arguments.residual != nullptr);
        const size_t element = first + i % 2 * 8 * static_cast<size_t>(n) + i / 2 * 32;
        P::store_eight_columns(arguments.out + element, out, at.second);
    }
};

}  // namespace twin
