// Transposing bytes in registers, and words among lanes.
#pragma once

namespace twin {

// Bytes from row to row of a transposed copy, of a matrix of `rows` rows.
__device__ __forceinline__ size_t q_t_stride(int rows) { return (static_cast<unsigned>(rows) + 15u) / 16 * 16; }

// Four rows of four codes to four columns of four codes, first row or column in the low byte.
__device__ __forceinline__ void transpose4(unsigned a, unsigned b, unsigned c, unsigned d, unsigned (&out)[4]) {
    const unsigned ab_low = __byte_perm(a, b, 0x5140), cd_low = __byte_perm(c, d, 0x5140);
    const unsigned ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
    out[0] = __byte_perm(ab_low, cd_low, 0x5410);
    out[1] = __byte_perm(ab_low, cd_low, 0x7632);
    out[2] = __byte_perm(ab_high, cd_high, 0x5410);
    out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

// Transpose the 4 x 4 words of four lanes, which are kLane apart: word s of lane q becomes word q of lane s.
template <int kLane>
__device__ __forceinline__ void transpose_lanes(unsigned& w0, unsigned& w1, unsigned& w2, unsigned& w3) {
    const auto exchange = [](unsigned& low, unsigned& high, int mask) {
        const bool upper = threadIdx.x & mask;
        const unsigned received = __shfl_xor_sync(0xFFFFFFFF, upper ? low : high, mask);
        (upper ? low : high) = received;
    };
    exchange(w0, w1, kLane), exchange(w2, w3, kLane);
    exchange(w0, w2, 2 * kLane), exchange(w1, w3, 2 * kLane);
}

}  // namespace twin
