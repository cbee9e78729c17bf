// dequantize: what FP8 codes stand for.
//
//     out[r, c] = round(fp32(q[r, c]) * scale_inv)        one fp32 rounding, then one to the type of out
//
// q [rows, cols] FP8 (FP8: 0 E4M3, 1 E5M2), cols a multiple of 16; out fp32, bf16 or fp16 (WIDE); both at multiples of 16
// bytes. scale_inv, by `layout`: 0 one number; 1 of 128 columns of a row, [ceil(cols / 128), ceil4(rows)]; 2 of 128 x 128,
// [ceil(rows / 128), ceil4(ceil(cols / 128))]; 3 of a row, [rows].
//
// Bound by memory. A thread has 16 codes, which have one scale.
#include "common/wide_store.cuh"
#include "ptx/cvt_fp8.cuh"

using namespace twin;

constexpr int kThreads = 256;
constexpr int kCodes = 16;

// Two codes, low in bits 0-7, in fp32. A code of E5M2 is the upper byte of an fp16 word.
__device__ __forceinline__ void decode(unsigned short codes, float* values) {
    const unsigned word =
        FP8 == 0 ? cvt_f16x2_e4m3x2(codes) : static_cast<unsigned>(codes & 0xFF) << 8 | (codes & 0xFF00u) << 16;
    values[0] = cvt_f32_f16(static_cast<unsigned short>(word & 0xFFFF));
    values[1] = cvt_f32_f16(static_cast<unsigned short>(word >> 16));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    dequantize(const uint4* __restrict__ q, const float* __restrict__ scale_inv, wide_t* __restrict__ out, int layout,
               int rows, int cols) {
    const long long at = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
    const int across = cols / kCodes;
    if (at >= static_cast<long long>(rows) * across) return;
    long long of_block = 0;
    if (layout != 0) {
        const int row = static_cast<int>(at / across), block = static_cast<int>(at % across) * kCodes / 128;
        if (layout == 1)
            of_block = static_cast<long long>(block) * ((rows + 3) / 4 * 4) + row;
        else if (layout == 3)
            of_block = row;
        else
            of_block = static_cast<long long>(row / 128) * (((cols + 127) / 128 + 3) / 4 * 4) + block;
    }
    const float scale = scale_inv[of_block];
    const uint4 codes = q[at];
    const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
    float values[kCodes];
#pragma unroll
    for (int i = 0; i < kCodes; i += 2) {
        decode(static_cast<unsigned short>(words[i / 4] >> i % 4 * 8), values + i);
        values[i] = values[i] * scale;
        values[i + 1] = values[i + 1] * scale;
    }
#pragma unroll
    for (int i = 0; i < kCodes; i += kLanes) store_vector(out + at * kCodes + i, values + i);
}
