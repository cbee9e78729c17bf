// 16 rows by 8 columns of codes, read row by row, written column by column.
#pragma once
#include "transpose.cuh"

namespace twin {

constexpr int kRunRows = 16;  // rows

// From `codes`, whose rows are `stride` bytes apart, to q_t. Rows from `left` on do not exist: zeros.
__device__ __forceinline__ void store_transposed(const unsigned char* codes, int stride, unsigned char* q_t,
                                                 size_t q_t_stride, int left) {
    uint2 word[kRunRows];
    if (left >= kRunRows) {
#pragma unroll
        for (int r = 0; r < kRunRows; r++) word[r] = *reinterpret_cast<const uint2*>(codes + r * stride);
    } else {
#pragma unroll
        for (int r = 0; r < kRunRows; r++)
            word[r] = r < left ? *reinterpret_cast<const uint2*>(codes + r * stride) : make_uint2(0, 0);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        unsigned columns[4][4];  // [four rows][column]
#pragma unroll
        for (int g = 0; g < 4; g++) {
            const auto of = [&](int r) { return half == 0 ? word[4 * g + r].x : word[4 * g + r].y; };
            transpose4(of(0), of(1), of(2), of(3), columns[g]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            *reinterpret_cast<uint4*>(q_t + (4 * half + i) * q_t_stride) =
                make_uint4(columns[0][i], columns[1][i], columns[2][i], columns[3][i]);
    }
}

}  // namespace twin
