// norm_statistics: mean and rstd of rows as in norm.cu, without y, and a norm's parameters in fp32.
//
//     affine[0, c] = gamma, affine[1, c] = beta (layernorm only; -0.0 without a bias)
//
// x [rows, hidden] of type WIDE, hidden a multiple of 8 up to 16384, rows 16-byte aligned; mean, rstd fp32 [rows]; affine
// fp32 [2 (rmsnorm: 1), hidden]. The last row comes first, so that what reads x next, from the first row on, finds in L2
// what was read last. ROW_WARPS warps hold a row (norm_registers.cuh); blocks are persistent.
//
// Defines: WIDE, KIND, ROW_WARPS, ROWS, BLOCKS, WHOLE, as in norm.cu.
#include "norm_registers.cuh"
#include "ptx/grid.cuh"

using namespace twin;

struct Config {
    static constexpr bool kLayerNorm = KIND == 0, kWhole = WHOLE;
    static constexpr int kRowWarps = ROW_WARPS;
    static constexpr int kRows = ROWS, kBlocks = BLOCKS;  // rows of a block at a time, blocks of a multiprocessor
};
using Rows = RegisterRows<Config>;
using Row = Rows::Row;
using Held = Rows::Held;
using Packed = Rows::Packed;

constexpr int kRowThreads = 32 * Config::kRowWarps, kRows = Config::kRows, kThreads = kRowThreads * kRows;

extern "C" __global__ void __launch_bounds__(kThreads, Config::kBlocks)
    norm_statistics(const wide_t* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                    float* __restrict__ mean, float* __restrict__ rstd, float* __restrict__ affine, int rows,
                    int length, float eps, int zero_centered, int parameters) {
    __shared__ Rows::Slots slots[kRows];
    const int group = threadIdx.x / kRowThreads;
    const int step = gridDim.x * kRows;
    const Held held(length);
    int index = blockIdx.x * kRows + group, turn = 0;
    Packed packed, next;
    if (index < rows) packed = held.load(x, rows - 1 - index);
    for (int at = (blockIdx.x * kThreads + threadIdx.x) * 8; at < length; at += gridDim.x * kThreads * 8) {
#pragma unroll
        for (int which = 0; which < Rows::kParameters; which++) {
            float v[8];
            affine8(which == 0, which == 0 ? weight : bias, parameters, zero_centered != 0, at, v);
            float4* const to = reinterpret_cast<float4*>(affine + which * length + at);
            to[0] = make_float4(v[0], v[1], v[2], v[3]);
            to[1] = make_float4(v[4], v[5], v[6], v[7]);
        }
    }
#pragma unroll 1
    for (; index < rows; index += step) {
        if (index + step < rows) next = held.load(x, rows - 1 - index - step);
        const Row row(packed, held, eps, slots[group], turn, group + 1);
        turn ^= 1;
        row.store_statistics(mean, rstd, rows - 1 - index, held);
        packed = next;
    }
    let_next_grid_start();  // norm_cast_blocks.cu
}
