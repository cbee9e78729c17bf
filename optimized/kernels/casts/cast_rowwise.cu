// cast_rowwise: to FP8 with a scale for each row, alone or with a transposed copy that has one for each column.
//
//     amax            = max |x| over the row                  NaN ignored
//     scale           = fp8_max / max(amax, epsilon)          exceptions and power_of_two: current_scale.cuh
//     q, scale_inv    = satfinite_rne(fp32(x) * scale), 1 / scale
//     q_t, scale_inv_t  the same of x's transpose; 0x00 for rows <= r < ceil16(rows)
//
// x [rows, cols] fp32, bf16 or fp16 (WIDE), cols a multiple of 16; q [rows, cols], q_t [cols, ceil16(rows)] FP8 (FP8);
// scale_inv [rows], scale_inv_t [cols] fp32. Bound by memory.
//
//     cast_rowwise            a block a row, which it reads twice: the second time mostly from its L1
//
// A row and a column have both to be seen before a number that lies in both can be cast, so x is read twice, and nothing
// is left to clear:
//
//     largest                 a tile of 128 rows leaves its largest magnitude of each row in row_partial [tiles across,
//                             rows], and of each column in column_partial [tiles down, cols]
//     scales                  the scales of these, of rows and then of columns: scale [rows + cols], and their inverses
//     cast_rowwise_transpose  a tile of 128 rows, cast twice
#include "common/current_scale.cuh"
#include "common/quantize.cuh"
#include "common/transpose.cuh"
#include "common/wide.cuh"

using namespace twin;

constexpr int kRowThreads = 128, kThreads = 256, kWarps = kThreads / 32, kTileRows = 128;
constexpr float kMost = FP8 == 0 ? 448.0f : 57344.0f;

// Codes of a vector's values, all multiplied by `scale`.
__device__ __forceinline__ void store_codes(unsigned char* to, const Vector<kLanes>& v, float scale) {
    unsigned words[kLanes / 4];
#pragma unroll
    for (int w = 0; w < kLanes / 4; w++) {
        const float x[4] = {widen(v, 4 * w), widen(v, 4 * w + 1), widen(v, 4 * w + 2), widen(v, 4 * w + 3)};
        words[w] = quantize4(x, scale);
    }
    if constexpr (kLanes == 8)
        *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[kLanes / 4 - 1]);
    else
        *reinterpret_cast<unsigned*>(to) = words[0];
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    cast_rowwise(const wide_t* __restrict__ x, unsigned char* __restrict__ q, float* __restrict__ scale_inv,
                 float epsilon, int power_of_two, int cols) {
    __shared__ float shared_scale;
    const unsigned width = cols, step = kRowThreads * kLanes;
    x += static_cast<size_t>(blockIdx.x) * width;
    q += static_cast<size_t>(blockIdx.x) * width;
    float most = 0.0f;
#pragma unroll 4
    for (unsigned c = threadIdx.x * kLanes; c < width; c += step) {
        const Vector<kLanes> v = load_once<kLanes>(x + c);
#pragma unroll
        for (int i = 0; i < kLanes; i++) most = larger(most, widen(v, i));
    }
    most = largest_of_block<kRowThreads / 32>(most);
    if (threadIdx.x == 0) {
        shared_scale = current_scale_of(most, kMost, epsilon, power_of_two);
        scale_inv[blockIdx.x] = __fdiv_rn(1.0f, shared_scale);
    }
    __syncthreads();
    const float scale = shared_scale;
#pragma unroll 4
    for (unsigned c = threadIdx.x * kLanes; c < width; c += step) store_codes(q + c, load_once<kLanes>(x + c), scale);
}

// The row of tiles; the grid is rounded up where its third dimension is in use.
__device__ __forceinline__ int tile_row() { return blockIdx.z * gridDim.y + blockIdx.y; }

// A tile has 128 rows of 512 bytes. A warp reads a row of it, and each eighth row after that.
extern "C" __global__ void __launch_bounds__(kThreads)
    largest(const wide_t* __restrict__ x, float* __restrict__ row_partial, float* __restrict__ column_partial, int rows,
            int cols) {
    constexpr int kTileCols = 32 * kLanes;
    __shared__ float of_warps[kWarps][kTileCols];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_row = tile_row() * kTileRows, first_col = blockIdx.x * kTileCols, col = first_col + lane * kLanes;
    if (first_row >= rows) return;
    const size_t width = static_cast<unsigned>(cols);
    float of_column[kLanes] = {};
#pragma unroll 4
    for (int r = warp; r < kTileRows; r += kWarps) {
        const int row = first_row + r;
        float of_row = 0.0f;
        if (row < rows && col < cols) {
            const Vector<kLanes> v = load_once<kLanes>(x + row * width + col);
#pragma unroll
            for (int i = 0; i < kLanes; i++) {
                of_row = larger(of_row, widen(v, i));
                of_column[i] = larger(of_column[i], widen(v, i));
            }
        }
        // The words of floats that are not negative have the order of their values.
        const unsigned word = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(of_row));
        if (lane == 0 && row < rows)
            row_partial[blockIdx.x * static_cast<size_t>(static_cast<unsigned>(rows)) + row] = __uint_as_float(word);
    }
#pragma unroll
    for (int i = 0; i < kLanes; i++) of_warps[warp][lane * kLanes + i] = of_column[i];
    __syncthreads();
    for (int c = threadIdx.x; c < kTileCols && first_col + c < cols; c += kThreads) {
        float most = of_warps[0][c];
#pragma unroll
        for (int w = 1; w < kWarps; w++) most = fmaxf(most, of_warps[w][c]);
        column_partial[tile_row() * width + first_col + c] = most;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    scales(const float* __restrict__ row_partial, const float* __restrict__ column_partial, float* __restrict__ scale,
           float* __restrict__ scale_inv, float* __restrict__ scale_inv_t, float epsilon, int power_of_two, int rows,
           int cols, int across, int down) {
    const long long index = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
    if (index >= static_cast<long long>(rows) + cols) return;
    const bool is_row = index < rows;
    const long long i = is_row ? index : index - rows, stride = is_row ? rows : cols;
    const float* partial = is_row ? row_partial : column_partial;
    const int count = is_row ? across : down;
    float most = 0.0f;
#pragma unroll 4
    for (int p = 0; p < count; p++) most = fmaxf(most, partial[p * stride + i]);
    const float found = current_scale_of(most, kMost, epsilon, power_of_two);
    scale[index] = found;
    (is_row ? scale_inv : scale_inv_t)[i] = __fdiv_rn(1.0f, found);
}

// A tile has 128 rows of 128 bytes; a thread four rows of 16 bytes. What it casts by columns goes through shared memory, a
// word of four rows at a time, from which a warp writes 128 bytes of a row of q_t.
extern "C" __global__ void __launch_bounds__(kThreads)
    cast_rowwise_transpose(const wide_t* __restrict__ x, const float* __restrict__ scale, unsigned char* __restrict__ q,
                           unsigned char* __restrict__ q_t, int rows, int cols) {
    constexpr int kGroups = 8, kTileCols = kGroups * kLanes, kRuns = kTileRows / 4;
    static_assert(kGroups * kRuns == kThreads && kRuns == 32, "a warp writes the runs of a column");
    __shared__ unsigned columns[kTileCols][kRuns + 1];
    const int group = threadIdx.x % kGroups, run = threadIdx.x / kGroups;
    const int first_row = tile_row() * kTileRows, first_col = blockIdx.x * kTileCols;
    if (first_row >= rows) return;
    const int row = first_row + 4 * run, col = first_col + group * kLanes;
    const size_t width = static_cast<unsigned>(cols);
    const int left = col < cols ? rows - row : 0;

    Vector<kLanes> v[4];
#pragma unroll
    for (int r = 0; r < 4; r++) v[r] = r < left ? load_once<kLanes>(x + (row + r) * width + col) : Vector<kLanes>{};
#pragma unroll
    for (int r = 0; r < 4; r++)
        if (r < left) store_codes(q + (row + r) * width + col, v[r], scale[row + r]);
#pragma unroll
    for (int i = 0; i < kLanes; i++) {
        const float of_rows[4] = {widen(v[0], i), widen(v[1], i), widen(v[2], i), widen(v[3], i)};
        const float of_column = left > 0 ? scale[static_cast<size_t>(static_cast<unsigned>(rows)) + col + i] : 1.0f;
        columns[group * kLanes + i][run] = quantize4(of_rows, of_column);
    }
    __syncthreads();
    const size_t stride = q_t_stride(rows);
    const int to_row = first_row + 4 * (threadIdx.x % 32);
    if (to_row >= stride) return;
#pragma unroll
    for (int c = threadIdx.x / 32; c < kTileCols; c += kWarps)
        if (first_col + c < cols)
            *reinterpret_cast<unsigned*>(q_t + (first_col + c) * stride + to_row) = columns[c][threadIdx.x % 32];
}
