// norm: LayerNorm or RMSNorm of rows of up to 16384 elements.
//
//     layernorm: mean = rowsum(x) / n, xc = x - mean         rmsnorm: xc = x, no mean, no bias
//     rstd = 1 / sqrt(rowsum(xc * xc) / n + eps)             IEEE division and square root
//     y = ((xc * rstd) * gamma) + beta                       fp32, each operation rounded; one rounding to `out`
//
// x, y [rows, hidden], x of type WIDE, y of type `out`; hidden a multiple of 8; rows 16-byte aligned. weight, bias
// [hidden] of type `parameters`; gamma is weight, or weight + 1. mean, rstd fp32 [rows]. rowsum: norm_row.cuh.
//
// Bound by memory: 4 bytes an element in bf16. ROW_WARPS warps hold a row in registers, 1024 elements each, so that
// nothing is read, widened or centered twice. Blocks are persistent: gamma and beta stay in shared memory as fp32, and
// a group of warps loads its next row while it works on one.
#include "norm_held.cuh"

using namespace twin;

constexpr int kThreads = 32 * ROW_WARPS * ROWS;  // ROWS: of a block at a time

// One rounding to `out`: 0 fp32, 1 bf16, 2 fp16.
__device__ __forceinline__ void store_output(void* y, int out, size_t at, const float (&v)[8]) {
    if (out == 0) {
        float4* to = reinterpret_cast<float4*>(static_cast<float*>(y) + at);
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        uint4* to = reinterpret_cast<uint4*>(static_cast<unsigned short*>(y) + at);
        if (out == 1)
            *to = make_uint4(
                cvt_bf16x2(v[0], v[1]), cvt_bf16x2(v[2], v[3]), cvt_bf16x2(v[4], v[5]), cvt_bf16x2(v[6], v[7]));
        else
            *to = make_uint4(
                cvt_f16x2(v[0], v[1]), cvt_f16x2(v[2], v[3]), cvt_f16x2(v[4], v[5]), cvt_f16x2(v[6], v[7]));
    }
}

extern __shared__ float affine[];  // gamma and beta

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) norm_rows(
    const wide_t* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
    void* __restrict__ y, float* __restrict__ mean, float* __restrict__ rstd, int rows, int hidden, float eps,
    int zero_centered, int parameters, int out) {
    __shared__ Slots slots[ROWS];
    const int group = threadIdx.x / (32 * ROW_WARPS);
    const int step = gridDim.x * ROWS;
    const Held held(hidden);
    int index = blockIdx.x * ROWS + group, turn = 0;
    Packed packed, next;
    if (index < rows) packed = held.load(x, index);
    if (ROWS >= 4)  // enough threads for all parameters, or nearly
        stage_parameters(affine, weight, bias, parameters, zero_centered != 0, held.hidden);
    else if (parameters == 0)
        stage_at_once<0>(affine, weight, bias, zero_centered != 0, held.hidden);
    else if (parameters == 1)
        stage_at_once<1>(affine, weight, bias, zero_centered != 0, held.hidden);
    else
        stage_at_once<2>(affine, weight, bias, zero_centered != 0, held.hidden);
#pragma unroll 1
    for (; index < rows; index += step) {
        if (index + step < rows) next = held.load(x, index + step);
        const Row row(packed, held, eps, slots[group], turn, group + 1);
        turn ^= 1;
        row.store_statistics(mean, rstd, index, held);
        const size_t start = static_cast<size_t>(index) * held.hidden + held.first;
        row.for_each_output(affine, held, [&](int i, const float(&v)[8]) {
            store_output(y, out, start + kStripe * i, v);
        });
        packed = next;
    }
}
