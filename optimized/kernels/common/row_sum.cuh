// The written order of a sum over rows (docs/numerics.md, `reference/ops/casts/dbias.py`), the part inside a block.
//
// Rows are taken in blocks of 64, each block in 4 runs of 16 rows; missing rows are +0. A run is summed by a halving
// tree: for h in (8, 4, 2, 1) row r + h is added to row r, r < h. The 4 runs' sums are added likewise, h in (2, 1), and
// the blocks' sums in order of block. A warp holds one block: lane = run * 8 + column group, so the first tree needs no
// communication and the second six shuffles for eight columns. (Plain halving from h = 32 would need 64.)
#pragma once

namespace twin {

constexpr unsigned kAllLanes = 0xFFFFFFFF;
constexpr int kRunRows = 16;  // rows of a thread
constexpr int kBlockRows = 4 * kRunRows;

// The halving tree over kCount rows of one column. By recursion: NVRTC leaves such a loop a loop in some callers.
template <int kCount, int kStep = kCount / 2>
__device__ __forceinline__ float halving_sum(float (&v)[kCount]) {
#pragma unroll
    for (int r = 0; r < kStep; r++) v[r] = v[r] + v[r + kStep];
    if constexpr (kStep == 1)
        return v[0];
    else
        return halving_sum<kCount, kStep / 2>(v);
}

// The tree over the four runs, for kCount columns (1 or a multiple of 4) of a lane's group. Lanes trade halves: each
// ends with the sums of kCount / 4 columns, from the returned one on (kCount 1: every lane has the sum).
template <int kCount>
__device__ __forceinline__ int block_sum(const float (&run)[kCount], float (&sum)[(kCount + 3) / 4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (kCount == 1) {
        const float half = run[0] + __shfl_xor_sync(kAllLanes, run[0], 16);
        sum[0] = half + __shfl_xor_sync(kAllLanes, half, 8);
        return 0;
    } else {
        constexpr int kHalf = kCount / 2, kQuarter = kCount / 4;
        const bool upper = lane & 16, odd = lane & 8;
        float half[kHalf];
#pragma unroll
        for (int c = 0; c < kHalf; c++) {
            const float keep = upper ? run[c + kHalf] : run[c];
            const float give = upper ? run[c] : run[c + kHalf];
            half[c] = keep + __shfl_xor_sync(kAllLanes, give, 16);
        }
#pragma unroll
        for (int c = 0; c < kQuarter; c++) {
            const float keep = odd ? half[c + kQuarter] : half[c];
            const float give = odd ? half[c] : half[c + kQuarter];
            sum[c] = keep + __shfl_xor_sync(kAllLanes, give, 8);
        }
        return (upper ? kHalf : 0) + (odd ? kQuarter : 0);
    }
}

}  // namespace twin
