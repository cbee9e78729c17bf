// The written order of a sum over rows (docs/numerics.md, `reference/ops/dbias.py`), the part inside a block.
//
// Rows are taken in blocks of 64, each block in 4 runs of 16 rows, missing rows being +0. In a run a halving
// tree: for h in (8, 4, 2, 1) row r + h is added to row r, r < h. Over the 4 runs' sums the same, h in (2, 1).
// Then the blocks' sums, in order of block. A warp holds one block: lane = run * 8 + column group, so the first
// tree needs no communication and the second six shuffles for eight columns. (Plain halving from h = 32 would
// need 64.)
#pragma once

constexpr unsigned ALL = 0xFFFFFFFFu;
constexpr int RUN = 16;  // rows of a thread
constexpr int BLOCK_ROWS = 4 * RUN;

// The halving tree over N rows of one column. By recursion: NVRTC leaves such a loop a loop in some callers.
template <int N, int H = N / 2>
__device__ __forceinline__ float halving_sum(float (&v)[N]) {
#pragma unroll
    for (int r = 0; r < H; ++r) v[r] = v[r] + v[r + H];
    if constexpr (H == 1)
        return v[0];
    else
        return halving_sum<N, H / 2>(v);
}

// The tree over the four runs, for N columns (1 or a multiple of 4) of a lane's group. Lanes trade halves:
// each ends with N / 4 columns' sums (of 1 column: every lane has it), starting at the one returned.
template <int N>
__device__ __forceinline__ int block_sum(const float (&run)[N], float (&sum)[(N + 3) / 4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (N == 1) {
        const float half = run[0] + __shfl_xor_sync(ALL, run[0], 16);
        sum[0] = half + __shfl_xor_sync(ALL, half, 8);
        return 0;
    } else {
        constexpr int HALF = N / 2, QUARTER = N / 4;
        const bool upper = lane & 16, odd = lane & 8;
        float half[HALF];
#pragma unroll
        for (int c = 0; c < HALF; ++c) {
            const float keep = upper ? run[c + HALF] : run[c];
            const float give = upper ? run[c] : run[c + HALF];
            half[c] = keep + __shfl_xor_sync(ALL, give, 16);
        }
#pragma unroll
        for (int c = 0; c < QUARTER; ++c) {
            const float keep = odd ? half[c + QUARTER] : half[c];
            const float give = odd ? half[c] : half[c + QUARTER];
            sum[c] = keep + __shfl_xor_sync(ALL, give, 8);
        }
        return (upper ? HALF : 0) + (odd ? QUARTER : 0);
    }
}
