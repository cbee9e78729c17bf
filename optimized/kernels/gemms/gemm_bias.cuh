// A tile's bias in shared memory, put there by an idle warp of the producer's warpgroup.
//
// Consumers have no registers to load the bias ahead: they would wait for memory at a tile's end, and each lane would
// widen it. The warp loads the next tile's bias while the consumers use the present one, and writes it when they are
// done.
#pragma once

#include "gemm_fp8_mainloop.cuh"
#include "common/mailbox.cuh"

namespace twin {

// The bias of four neighbouring columns.
template <class T>
struct alignas(4 * sizeof(T)) Four {
    T of[4];
};

// T: float where a bias of any type is added in fp32, unsigned short where it has the output's 16 bits.
template <class Gemm, class T>
struct alignas(16) SharedBias {
    static constexpr int kRun = Gemm::kRun, kAcc = Gemm::kAcc;
    T values[Gemm::kBlockN];  // columns after the matrix's last repeat it: their results are not stored
    Mailbox mailbox;

    __device__ __forceinline__ void init() { mailbox.init(1, 4 * Gemm::kWarpgroups); }

    // By that warp. With two kBHalves, the second half of a tile's columns is n / 2 further.
    __device__ __forceinline__ void fill(const Tile& tile, const void* bias, int type, int n, unsigned parity) {
        if (type == kNoBias) return;
        constexpr int kHeld = Gemm::kBlockN / 32;
        const int lane = threadIdx.x % 32, width = n / Gemm::kBHalves;
        const auto column = [&](int c) {
            return min(tile.column + c % Gemm::kTileN, width - 1) + c / Gemm::kTileN * width;
        };
        unsigned words[kHeld];  // as in memory; all loads are in flight at once
        if (type == kBiasFP32)
#pragma unroll
            for (int i = 0; i < kHeld; i++)
                words[i] = __ldg(static_cast<const unsigned*>(bias) + column(lane + 32 * i));
        else
#pragma unroll
            for (int i = 0; i < kHeld; i++)
                words[i] = __ldg(static_cast<const unsigned short*>(bias) + column(lane + 32 * i));
        mailbox.wait_empty(parity);
#pragma unroll
        for (int i = 0; i < kHeld; i++) {
            if constexpr (sizeof(T) == 2)
                values[lane + 32 * i] = words[i];
            else
                values[lane + 32 * i] = type == kBiasFP32 ? __uint_as_float(words[i]) : widen_bias(words[i], type);
        }
        mailbox.arrive_full();
    }

    // The same, with one value for all columns.
    __device__ __forceinline__ void fill_with(T value, unsigned parity) {
        mailbox.wait_empty(parity);
        for (int i = threadIdx.x % 32; i < Gemm::kBlockN; i += 32) values[i] = value;
        mailbox.arrive_full();
    }

    // The bias of four neighbouring columns of the tile; `column` is a multiple of four.
    __device__ __forceinline__ Four<T> four(int column) const {
        return reinterpret_cast<const Four<T>*>(values)[column / 4];
    }

    // By a consumer warp, in place: acc -> fp32(acc + bias).
    __device__ __forceinline__ void add(float (&acc)[kAcc], unsigned parity) {
        mailbox.wait_full(parity);
#pragma unroll
        for (int i = 0; i < kAcc; i += 8) {  // four columns of both rows
            const auto bias = four(4 * kRun * (i / 2 / kRun) + threadIdx.x % 4 * kRun + i / 2 % kRun);
#pragma unroll
            for (int c = 0; c < 8; c++) acc[i + c] = __fadd_rn(acc[i + c], bias.of[c / 4 * 2 + c % 2]);
        }
        mailbox.arrive_empty();
    }
};

}  // namespace twin
