// cast_transpose: to FP8, with the transposed copy beside it, noting the amax; with DBIAS the rows' sum as well.
//
//     q[r, c]   = satfinite_rne(fp32(x[r, c]) * scale[0])   one fp32 rounding, then one to FP8; NaN -> 0x7F
//     q_t[c, r] = q[r, c]; 0x00 for rows <= r < ceil16(rows)
//     scale_inv = 1 / scale[0]                              IEEE division
//     amax[0]   = max(amax[0], max |x|)                     x not scaled, NaN ignored; skipped if amax is null
//     partial[b, c] = sum of x[64 b .. 64 b + 63, c]        DBIAS: fp32, in the order of row_sum.cuh
//
// x [rows, cols] fp32, bf16 or fp16 (WIDE); q [rows, cols], q_t [cols, ceil16(rows)] FP8 (FP8); cols a multiple of
// 16; partial fp32 [ceil(rows / 64), cols], which the kernel `total` of dbias.cu adds up.
//
// Bound by memory: 4 bytes an element in bf16. The transposition happens in registers: a thread owns 16 rows of
// one 16-byte column group, so a column of its codes is 16 bytes that are adjacent in q_t. A warp is 4 runs of
// 16 rows by 8 column groups: it reads 128 bytes of a row, writes 64 (fp32: 32) of q and 64 of q_t, whole
// sectors all. Two by two warps make a tile whose rows of q_t (and, in 16 bits, of q) are full 128-byte lines.
// Shared memory is not used, so there are neither bank conflicts nor barriers between loads and stores; all 16
// loads of a thread are in flight at once.
#include "wide.cuh"
#include "quantize.cuh"
#include "row_sum.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int WARP_COLS = 8 * LANES;
constexpr int TILE_ROWS = 2 * BLOCK_ROWS, TILE_COLS = 2 * WARP_COLS;
constexpr int WORDS = LANES / 4;  // words of codes a row of a thread

// Four rows of four codes to four columns of four codes, first row or column in the low byte.
__device__ __forceinline__ void transpose4(unsigned a, unsigned b, unsigned c, unsigned d, unsigned (&out)[4]) {
    const unsigned ab_low = __byte_perm(a, b, 0x5140), cd_low = __byte_perm(c, d, 0x5140);
    const unsigned ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
    out[0] = __byte_perm(ab_low, cd_low, 0x5410);
    out[1] = __byte_perm(ab_low, cd_low, 0x7632);
    out[2] = __byte_perm(ab_high, cd_high, 0x5410);
    out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

// Where a thread's results go; `partial` is null for a lane beyond the last column.
struct Output {
    unsigned char* q;
    unsigned char* q_t;
    float* partial;
};

// One thread's 16 rows. `left` is how many of them there are (WHOLE: all).
template <bool WHOLE>
__device__ __forceinline__ void cast_run(
    const wide_t* x, const Output& out, size_t cols, size_t q_t_stride, int left, float scale, float& amax) {
    Vector<LANES> v[RUN];
#pragma unroll
    for (int r = 0; r < RUN; ++r)
        v[r] = WHOLE || r < left ? load_once<LANES>(x + r * cols) : Vector<LANES>{};

    // Four columns at a time, from the loads to the transposed store, so that registers free up on the way.
    unsigned codes[RUN][WORDS];
#if DBIAS
    float run[LANES], sum[LANES / 4];
#endif
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
#pragma unroll
        for (int r = 0; r < RUN; ++r) {
            float f[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                f[i] = widen(v[r], 4 * w + i);
                amax = amax_of(amax, f[i]);
            }
            codes[r][w] = quantize2(f[0], f[1], scale) | quantize2(f[2], f[3], scale) << 16;
            // Not left to 0 * scale, which is NaN if scale is infinite.
            if (!WHOLE && r >= left) codes[r][w] = 0;
        }
#if DBIAS
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float column[RUN];
#pragma unroll
            for (int r = 0; r < RUN; ++r) column[r] = widen(v[r], 4 * w + i);
            run[4 * w + i] = run_sum(column);
        }
#endif
        unsigned columns[4][4];  // [group of four rows][column]
#pragma unroll
        for (int g = 0; g < 4; ++g)
            transpose4(codes[4 * g][w], codes[4 * g + 1][w], codes[4 * g + 2][w], codes[4 * g + 3][w], columns[g]);
        if (WHOLE || left > 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                *reinterpret_cast<uint4*>(out.q_t + (4 * w + i) * q_t_stride) =
                    make_uint4(columns[0][i], columns[1][i], columns[2][i], columns[3][i]);
        }
    }
#pragma unroll
    for (int r = 0; r < RUN; ++r) {
        if (WHOLE || r < left) {
            if constexpr (WORDS == 2)
                *reinterpret_cast<uint2*>(out.q + r * cols) = make_uint2(codes[r][0], codes[r][1]);
            else
                *reinterpret_cast<unsigned*>(out.q + r * cols) = codes[r][0];
        }
    }
#if DBIAS
    const int first = block_sum<LANES>(run, sum);
    if (WHOLE || out.partial != nullptr) {
#pragma unroll
        for (int c = 0; c < LANES / 4; ++c) out.partial[first + c] = sum[c];
    }
#endif
}

extern "C" __global__ __launch_bounds__(THREADS, 3) void cast_transpose(
    const wide_t* __restrict__ x, const float* __restrict__ scale_slot, float* amax_slot,
    unsigned char* __restrict__ q, unsigned char* __restrict__ q_t, float* __restrict__ scale_inv,
    float* __restrict__ partial, int rows, int cols) {
    const float scale = *scale_slot;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column_tiles = max(1, (cols + TILE_COLS - 1) / TILE_COLS);
    const int tile_row = blockIdx.x / column_tiles, tile_col = blockIdx.x % column_tiles;
    const int block_row = tile_row * TILE_ROWS + warp / 2 * BLOCK_ROWS;
    const int row = block_row + lane / 8 * RUN;
    const int col = tile_col * TILE_COLS + warp % 2 * WARP_COLS + lane % 8 * LANES;
    float amax = 0.0f;

    if (block_row < rows) {
        // A lane beyond the last column takes part in the shuffles with no rows, at an address that exists.
        const bool inside = col < cols;
        const size_t stride = cols, q_t_stride = (static_cast<size_t>(rows) + 15) / 16 * 16;
        const size_t at = inside ? static_cast<size_t>(row) * stride + col : 0;
        const size_t at_t = inside ? static_cast<size_t>(col) * q_t_stride + row : 0;
        float* sums = inside ? partial + static_cast<size_t>(block_row / BLOCK_ROWS) * stride + col : nullptr;
        const Output out = {q + at, q_t + at_t, sums};
        if (block_row + BLOCK_ROWS <= rows && (tile_col + 1) * TILE_COLS <= cols) {
            cast_run<true>(x + at, out, stride, q_t_stride, RUN, scale, amax);
        } else {
            const int left = inside ? max(min(rows - row, RUN), 0) : 0;
            cast_run<false>(x + at, out, stride, q_t_stride, left, scale, amax);
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
    if (amax_slot != nullptr) commit_amax<WARPS>(amax, amax_slot);
}
