// Bias, dropout and residual (gemm_dropout.cuh) where the main loop leaves no registers for a tile that waits: a tile is
// finished at once, without a scale.
//
// The residual comes straight to registers, a whole tile of it in flight, from L2, where the producer has it fetched.
// Mask and bias come through shared memory, as there.
#pragma once

#include "gemm_dropout.cuh"
#include "ptx/load.cuh"

namespace twin {

template <class Gemm>
struct BiasDropoutAddAtOnce {
    using P = Pieces<Gemm>;
    using Out = typename Gemm::Out;
    using Mask = SharedMask<Gemm>;
    static constexpr int kAcc = Gemm::kAcc, kRun = Gemm::kRun, kPieces = P::kPieces, kSecond = P::kSecond;
    static constexpr bool kDrop = Gemm::Config::kDrop;
    static constexpr int kConsumerRegisters = kDrop ? 216 : 232;  // to draw takes the idle warps more than the others
    static constexpr unsigned short kMinusZero = 0x8000;
    static_assert(kPieces % 2 == 0, "a word of the mask has two pieces");

    // Without a bias it is null, and -0 is added, which changes no bit of what was rounded to T.
    struct Arguments {
        unsigned short* out;
        const unsigned short* bias;
        const unsigned short* residual;
        const unsigned long long* rng_state;
        unsigned threshold;
        float keep_scale;
    };
    struct Shared {
        SharedBias<Gemm, unsigned short> bias;
        Mask mask;
    };
    struct Loaded {};

    const Arguments& arguments;
    Shared& shared;
    int m, n;
    unsigned parity = 1;  // of the mailboxes

    __device__ __forceinline__ BiasDropoutAddAtOnce(const Arguments& a, Shared& s, int m, int n)
        : arguments(a), shared(s), m(m), n(n) {}

    // By one thread, before the block's first barrier.
    __device__ __forceinline__ static void init(Shared& shared) {
        shared.bias.init();
        shared.mask.init();
    }

    // By the producer's three idle warps.
    __device__ __forceinline__ static void assist(const Arguments& a, Shared& shared, const typename Gemm::Tiles& tiles,
                                                  int n) {
        unsigned parity = 0;
        for (int index = tiles.first(); index < tiles.count(); index = tiles.next(index), parity ^= 1) {
            const Tile tile = tiles[index];
            if (kDrop) shared.mask.draw(tile, read_state(a.rng_state), a.threshold, n, parity);
            if (threadIdx.x / 32 % 4 != 3) continue;
            if (a.bias != nullptr)
                shared.bias.fill(tile, a.bias, kBiasOf<Out>, n, parity);
            else
                shared.bias.fill_with(kMinusZero, parity);
        }
    }

    __device__ __forceinline__ void load_ahead(Loaded&, const Tile&) const {}

    __device__ __forceinline__ void take(float (&acc)[kAcc], Loaded&, const Tile& tile) {
        const int lane = threadIdx.x % 32;
        const int row = tile.row + threadIdx.x / 32 * 16 + lane / 4, column = tile.column + lane % 4 * kRun;
        const bool rows[2] = {row < m, row + 8 < m};
        const size_t first = static_cast<size_t>(row) * n + column, below = first + 8 * static_cast<size_t>(n);
        const auto exists = [&](int piece, int f) {  // a lane's first four columns, or its others
            return 32 * piece + (kRun == 4 ? f * kSecond : 0) < tile.end - column;
        };
        Packed residual[kPieces][2];
#pragma unroll
        for (int piece = 0; piece < kPieces; piece++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                unsigned (&words)[4] = residual[piece][h].words;
                const unsigned short* from = arguments.residual + (h ? below : first) + 32 * piece;
                if constexpr (kRun == 8) {
                    load_if(words, from, rows[h] && exists(piece, 0));
                } else {
                    auto& halves = reinterpret_cast<unsigned (&)[2][2]>(words);
#pragma unroll
                    for (int f = 0; f < 2; f++) load_if(halves[f], from + f * kSecond, rows[h] && exists(piece, f));
                }
            }
        parity ^= 1;
        shared.bias.mailbox.wait_full(parity);
        unsigned kept[Mask::kWords] = {};
        if constexpr (kDrop) {  // read at once, so that the next tile's mask can be drawn
            shared.mask.mailbox.wait_full(parity);
#pragma unroll
            for (int i = 0; i < Mask::kWords; i++) kept[i] = shared.mask.words[i][threadIdx.x];
            shared.mask.mailbox.arrive_empty();
        }
        unsigned words[kAcc / 2];
        pack_tile<Out, kRun>(words, acc);
#pragma unroll
        for (int piece = 0; piece < kPieces; piece++) {
            Packed bias;
#pragma unroll
            for (int f = 0; f < 2; f++)
                reinterpret_cast<Four<unsigned short>*>(bias.words)[f] =
                    shared.bias.four(32 * piece + lane % 4 * kRun + f * kSecond);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                unsigned out[4];
                const unsigned bits = kept[piece / 2] << (2 * piece + h) % 4 * 4;
                finish_eight<Out, kDrop>(out, P::packed_row(words, piece, h), bias, residual[piece][h], bits,
                                         arguments.keep_scale, true, true);
                if (rows[h] && exists(piece, 0))
                    P::store_eight_columns(arguments.out + (h ? below : first) + 32 * piece, out, exists(piece, 1));
            }
        }
        shared.bias.mailbox.arrive_empty();
    }

    __device__ __forceinline__ void finish() const {}
};

}  // namespace twin
