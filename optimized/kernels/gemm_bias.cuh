// A tile's bias in shared memory, where a warp that copies nothing puts it for the consumers.
//
// Consumers would wait for memory at a tile's end, have no registers to load ahead, and would widen in every lane. This
// warp loads the next tile's bias while the consumers still use the present one, and writes it when they have finished.
#pragma once

#include "gemm_fp8_mainloop.cuh"
#include "mailbox.cuh"

namespace twin {

// The bias of four neighbouring columns.
template <class T>
struct alignas(4 * sizeof(T)) Four {
    T of[4];
};

// T: float where a bias of any type is added in fp32, unsigned short where it has the output's 16 bits.
template <class T>
struct alignas(16) SharedBias {
    T values[kBlockN];  // columns after the matrix's last repeat it; nobody stores their results
    Mailbox mailbox;

    __device__ __forceinline__ void init() { mailbox.init(1, 4 * WARPGROUPS); }

    // By the producing warp. The second of kBHalves of a tile's columns is n / 2 further.
    __device__ __forceinline__ void fill(const Tile& tile, const void* bias, int type, int n, unsigned parity) {
        if (type == kNoBias) return;
        constexpr int kHeld = kBlockN / 32;
        const int lane = threadIdx.x % 32, width = n / kBHalves;
        const auto column = [&](int c) { return min(tile.column + c % kTileN, width - 1) + c / kTileN * width; };
        unsigned words[kHeld];  // as stored; all loads are in flight before one is waited for
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

    // Of four neighbouring columns of the tile, the first a multiple of four.
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
