// The price of a function in an FP8 GEMM's epilogue: gemm_fp8.cu's own main loop (fast accumulation), then
//
//   h = bf16(acc * scale + bias)  -> out          as the plain kernel
//   q = E4M3(FUNCTION(h) * q_scale) -> codes      what fc1's epilogue will add (its transpose aside)
//   amax of FUNCTION(h)
//
// DEFERRED 1: a tile is finished, a few elements at a time, behind the first SPREAD k-blocks of the tile after it.
// DEFERRED 0: at once, the warpgroup's tensor-core work waiting.
// PLAIN 1: the bf16 store alone, in the same loop: what the price is counted from.
// Only the bench launches this. Shapes are multiples of the tile; K has at least SPREAD blocks of 128.
#include "elementary_candidates.cuh"
#include "gemm_fp8_mainloop.cuh"

#ifndef FUNCTION
#define FUNCTION identity
#endif
#ifndef DEFERRED
#define DEFERRED 1
#endif
#ifndef SPREAD
#define SPREAD 32
#endif
#ifndef PLAIN
#define PLAIN 0
#endif

namespace twin {

__device__ __forceinline__ unsigned short cvt_e4m3x2(float low, float high) {
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

// The FP8 codes of four columns (two words of two bf16 values).
__device__ __forceinline__ unsigned encode(unsigned first, unsigned second, float q_scale, float& amax) {
    const unsigned words[2] = {first, second};
    unsigned codes = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float low = FUNCTION(__uint_as_float(words[i] << 16));
        const float high = FUNCTION(__uint_as_float(words[i] & 0xFFFF0000u));
        amax = fmaxf(amax, fmaxf(fabsf(low), fabsf(high)));
        codes |= static_cast<unsigned>(cvt_e4m3x2(low * q_scale, high * q_scale)) << (16 * i);
    }
    return codes;
}

constexpr int kQuarters = 2 * kAcc / kRun;  // runs of four columns of a thread in a tile

// Quarters `from` to `to_quarter` - 1 of a tile. Two neighbours make 8 columns of one row, stored together;
// `first` carries the codes from one to the next, across k-blocks where they are so cut.
__device__ __forceinline__ void finish(int from, int to_quarter, const unsigned (&words)[kAcc / 2],
                                       const Destination& to, unsigned char* const (&codes)[2], float q_scale,
                                       float& amax, unsigned& first) {
#pragma unroll
    for (int i = from; i < to_quarter; i++) {
        const int g = i / 4, h = i / 2 % 2, w = kRun * g + kRun / 2 * h;
        unsigned part = 0;
        if constexpr (!PLAIN) part = encode(words[w + i % 2 * 2], words[w + i % 2 * 2 + 1], q_scale, amax);
        if (i % 2 == 0) {
            first = part;
            continue;
        }
        *reinterpret_cast<uint4*>(to.pointer[h] + 4 * kRun * g * 2) =
            make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
        if constexpr (!PLAIN) *reinterpret_cast<uint2*>(codes[h] + 4 * kRun * g) = make_uint2(first, part);
    }
}

}  // namespace twin

using namespace twin;

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
    gemm_activation(const __grid_constant__ Operands operands, void* out,
                    const void* bias, int bias_type, const float* a_scale_inv, const float* b_scale_inv, int m, int n,
                    int k, unsigned char* q, float q_scale, int* amax_bits) {
    static_assert(WARPGROUPS == 2 && kRun == 8 && !SPLIT && same_type<OUT, BF16>, "one configuration is priced");
    static_assert(kQuarters % SPREAD == 0, "whole quarters behind each k-block");
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const Tiles tiles(m, n);
    const int k_blocks = k / kBlockK;
    init_barriers<Map, kStages, CLUSTER, 4 * WARPGROUPS>(shared);

    if (threadIdx.x >= 128 * WARPGROUPS) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 128 * WARPGROUPS) produce(operands, shared, tiles, 0, k_blocks, m, n, [](const Tile&, int) {});
    } else {
        setmaxnreg_inc<232>();
        const int lane = threadIdx.x % 32;
        const int row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * kRun;
        const Issue issue{shared + Map::kA + warpgroup_index() * 64 * kStageRowBytes, shared + Map::kB};
        const float scale = __fmul_rn(*a_scale_inv, *b_scale_inv);
        Position stage;
        Destination to;
        unsigned char* codes[2];
        unsigned words[kAcc / 2], first = 0;
        float amax = 0.0f;
        bool pending = false;
        for (int index = tiles.first(); index < tiles.count(); index += tiles.step()) {
            const Tile tile = tiles[index];
            float acc[kAcc];
            int kb = 0, previous = 0;
            if (pending) {
#pragma unroll
                for (; kb < SPREAD; kb++) {
                    chain_block<Map, CLUSTER>(acc, shared, stage, previous, kb == 0, issue);
                    constexpr int kStep = kQuarters / SPREAD;
                    finish(kb * kStep, (kb + 1) * kStep, words, to, codes, q_scale, amax, first);
                }
            } else {
                chain_block<Map, CLUSTER>(acc, shared, stage, previous, kb++ == 0, issue);
            }
            Bias<kRun, kAcc> added;
            finish_chain<Map, CLUSTER>(acc, shared, stage, k_blocks, issue, kb, previous,
                                       [&] { added.load(bias, bias_type, tile.column + column, n); });
            scale_tile(acc, scale);
            added.add(acc);
            to = destination<2>(out, tile.row + row, tile.column + column, m, n, tile.end);
            codes[0] = q + static_cast<long long>(tile.row + row) * n + tile.column + column;
            codes[1] = codes[0] + 8ll * n;
            pack_tile<OUT, kRun>(words, acc);
            pending = DEFERRED;
            if constexpr (!DEFERRED) finish(0, kQuarters, words, to, codes, q_scale, amax, first);
        }
        if (pending) finish(0, kQuarters, words, to, codes, q_scale, amax, first);
        const int top = __reduce_max_sync(0xFFFFFFFFu, __float_as_int(amax));
        if (lane == 0) atomicMax(amax_bits, top);
    }
    end_together<CLUSTER>();
}
