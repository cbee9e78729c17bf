// Values of packed sequences for attention in FP8: each sequence's columns begin at a multiple of 128, followed by zeros up
// to the next one.   out[row, values_from(n) + key] = v[row, starts[n] + key]
//
// v [hkv, d, tokens] E4M3, its rows multiples of 16 bytes apart; out [hkv, d, width]. Columns of `out` that no block of 128
// keys of a sequence has are not written.
//
// The copy engine wants them so: the address at which a box begins is a multiple of 16 bytes, else it stops with an illegal
// instruction, and a sequence may begin at any byte of a row. Zeros, because 0 times the next sequence's NaN is NaN.
//
// grid: (blocks of 128 keys of the longest sequence, blocks of 128 rows, sequences). Eight threads have a row's 128 keys; a
// thread has four rows, and 16 bytes of each come from two units of 16 bytes.
#include "attention_fp8_values.cuh"

using namespace twin;

constexpr int kThreads = 256, kUnit = 16, kUnits = kTileRows / kUnit;  // of a row
constexpr int kApart = kThreads / kUnits, kUnroll = 4;                 // rows

// The 16 bytes from byte `by` on of two units that are neighbours; by is 0 to 15.
__device__ __forceinline__ void shift(unsigned (&found)[4], const uint4& low, const uint4& high, int by) {
    unsigned words[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (by & 8) {
#pragma unroll
        for (int i = 0; i < 6; i++) words[i] = words[i + 2];
    }
    if (by & 4) {
#pragma unroll
        for (int i = 0; i < 5; i++) words[i] = words[i + 1];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) found[i] = __funnelshift_r(words[i], words[i + 1], by % 4 * 8);
}

// Of four bytes the first `count`, which may be negative or above 4.
__device__ __forceinline__ unsigned first_bytes(unsigned word, int count) {
    return count >= 4 ? word : count <= 0 ? 0 : word & (1u << 8 * count) - 1;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_fp8_values(const unsigned char* __restrict__ v, long long head_stride, long long row_stride,
                         const int* lengths, const int* starts, int tokens, int d, int rows,
                         unsigned char* __restrict__ out, int width) {
    const int entry = blockIdx.z, start = min(max(__ldg(starts + entry), 0), tokens);
    const int count = min(max(__ldg(lengths + entry), 0), tokens - start);
    if (static_cast<int>(blockIdx.x) * kTileRows >= count) return;
    const int key = blockIdx.x * kTileRows + threadIdx.x % kUnits * kUnit, left = count - key, by = start % kUnit;
    const int first_row = blockIdx.y * (kApart * kUnroll) + threadIdx.x / kUnits;
    uint4 low[kUnroll], high[kUnroll];
#pragma unroll
    for (int n = 0; n < kUnroll; n++) {
        const int row = first_row + n * kApart;
        const unsigned char* at = v + row / d * head_stride + row % d * row_stride + (start - by + key);
        low[n] = high[n] = make_uint4(0, 0, 0, 0);
        if (row < rows && left > 0) low[n] = __ldg(reinterpret_cast<const uint4*>(at));
        if (row < rows && by > 0 && left > kUnit - by) high[n] = __ldg(reinterpret_cast<const uint4*>(at + kUnit));
    }
    out += values_from(entry, start) + key;
#pragma unroll
    for (int n = 0; n < kUnroll; n++) {
        const int row = first_row + n * kApart;
        unsigned found[4];
        shift(found, low[n], high[n], by);
#pragma unroll
        for (int i = 0; i < 4; i++) found[i] = first_bytes(found[i], left - 4 * i);
        if (row < rows)
            *reinterpret_cast<uint4*>(out + static_cast<long long>(row) * width) =
                make_uint4(found[0], found[1], found[2], found[3]);
    }
}
