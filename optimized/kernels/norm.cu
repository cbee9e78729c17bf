// norm: LayerNorm or RMSNorm of rows of up to 7168 elements, a warp to a row.
//
//     layernorm: mean = rowsum(x) / n, xc = x - mean         rmsnorm: xc = x, no mean, no bias
//     rstd = 1 / sqrt(rowsum(xc * xc) / n + eps)             IEEE division and square root
//     y = ((xc * rstd) * gamma) + beta                       fp32, each operation rounded; one rounding to OUT
//
// x, y [rows, hidden], x of type WIDE, y of type `out`; hidden a multiple of 8; rows 16-byte aligned. weight, bias
// [hidden] of type `parameters`; gamma is weight, or weight + 1. mean, rstd fp32 [rows]. rowsum: norm_row.cuh.
//
// Bound by memory: 4 bytes an element in bf16. A warp holds its whole row, as loaded, in registers (STRIPES stripes
// of 8 elements a lane), so nothing is read twice, all loads are in flight at once and no two warps wait for
// each other; the two sums cost about 20 shuffles each for 4096 elements.
#include "norm_row.cuh"

constexpr int WARPS = 4;

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

extern "C" __global__ __launch_bounds__(32 * WARPS, STRIPES <= 16 && sizeof(wide_t) == 2 ? 4 : 2) void norm_rows(
    const wide_t* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
    void* __restrict__ y, float* __restrict__ mean, float* __restrict__ rstd, int rows, int hidden, float eps,
    int zero_centered, int parameters, int out) {
    const int index = blockIdx.x * WARPS + threadIdx.x / 32;
    if (index >= rows) return;
    const size_t first = static_cast<size_t>(index) * hidden;
    Row<STRIPES> row;
    row.load(x + first, hidden);
    const Statistics s = statistics(row, hidden, eps);
    if (threadIdx.x % 32 == 0) {
        if (KIND == 0) mean[index] = s.mean;
        rstd[index] = s.rstd;
    }
    const Parameters affine = {weight, bias, zero_centered != 0};
    const auto store = [&](int at, const float(&v)[8]) { store_output(y, out, first + at, v); };
    if (parameters == 0)
        for_each_output<STRIPES, 0>(row, s, affine, hidden, store);
    else if (parameters == 1)
        for_each_output<STRIPES, 1>(row, s, affine, hidden, store);
    else
        for_each_output<STRIPES, 2>(row, s, affine, hidden, store);
}
