// norm_cast: LayerNorm or RMSNorm straight to FP8, without a transpose. Definition: reference/ops/norms/norm_cast.py.
//
//     y as norm.cu has it, in fp32          q, scale_inv and amax of y as cast.cu has them
//
// x [rows, hidden], hidden a multiple of 16 and at most 16384, rows 16-byte aligned; q the same shape. Of one row, as when a
// text is written token by token, a warp reads 1024 elements, and that is all the time it takes.
//
// Defines: WIDE, KIND, FP8, ROW_WARPS, ROWS, BLOCKS, WHOLE, LEADS, as in norm.cu and cast.cu.
#include "norm_registers.cuh"
#include "common/quantize.cuh"
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

extern __shared__ float affine[];  // gamma and beta

extern "C" __global__ void __launch_bounds__(kThreads, Config::kBlocks)
    norm_cast(const wide_t* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
              const float* __restrict__ scale_slot, float* amax_slot, unsigned char* __restrict__ q,
              float* __restrict__ scale_inv, float* __restrict__ mean, float* __restrict__ rstd, int rows, int hidden,
              float eps, int zero_centered, int parameters) {
#ifdef LEADS
    let_next_grid_start();  // a product, which loads its weights meanwhile (optimized/cuda/launch.py, `leading`)
#endif
    __shared__ Rows::Slots slots[kRows];
    const int group = threadIdx.x / kRowThreads, step = gridDim.x * kRows;
    const Held held(hidden);
    const float scale = *scale_slot;
    float amax = 0.0f;
    int index = blockIdx.x * kRows + group, turn = 0;
    Packed packed, next;
    if (index < rows) packed = held.load(x, index);
    if (parameters == 0)
        Rows::stage_at_once<0>(affine, weight, bias, zero_centered != 0, held.hidden);
    else if (parameters == 1)
        Rows::stage_at_once<1>(affine, weight, bias, zero_centered != 0, held.hidden);
    else
        Rows::stage_at_once<2>(affine, weight, bias, zero_centered != 0, held.hidden);
#pragma unroll 1
    for (; index < rows; index += step) {
        if (index + step < rows) next = held.load(x, index + step);
        const Row row(packed, held, eps, slots[group], turn, group + 1);
        turn ^= 1;
        row.store_statistics(mean, rstd, index, held);
        unsigned char* const to = q + static_cast<size_t>(index) * held.hidden + held.first;
        row.for_each_output(affine, held, [&](int i, const float (&v)[8]) {
            *reinterpret_cast<uint2*>(to + kStripe * i) = make_uint2(quantize4(v, scale), quantize4(v + 4, scale));
#pragma unroll
            for (int j = 0; j < 8; j++) amax = amax_of(amax, v[j]);
        });
        packed = next;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
    if (amax_slot != nullptr) commit_amax<kThreads / 32>(amax, amax_slot);
}
