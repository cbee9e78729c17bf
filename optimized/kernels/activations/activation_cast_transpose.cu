// activation_cast_transpose: an activation (BACKWARD 0) or its backward (BACKWARD 1), cast to FP8 from fp32, with the
// transposed copy and the amax; backward also sums blocks of rows of dx. With ROUND, of 16-bit activations: cast from y
// rounded to x's type, without an amax.
//
//     v         = y [rows, m] of x [rows, n]; BACKWARD: dx [rows, n] of grad [rows, m] and x     (activation.cuh)
//     q, q_t, scale_inv, amax     of v, as in cast_transpose.cu
//     partial   [ceil(rows / 64), n] fp32, BACKWARD: the sums of 64 rows of v in the order of row_sum.cuh
//
// n = 2 m where gated, else m; v has a multiple of 16 columns. x and grad fp32, bf16 or fp16 (WIDE).
//
// Bound by memory. A block of threads takes 64 rows by 256 bytes of y's columns. It copies all of its input to shared
// memory at once; with loads to registers, the compiler puts half of them after the arithmetic on the others. Then it
// works like cast_transpose.cuh: a thread owns 16 rows of four columns of y (and of both halves of dx), a warp 4 such
// runs by 8 column groups; columns of codes go through the shared memory of the inputs. Rows are evaluated in the order
// of the sums' halving tree, so that few partial sums are held.
#include "activation.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid.cuh"
#include "ptx/l2_policy.cuh"
#include "common/quantize.cuh"
#include "common/row_sum.cuh"
#include "common/transpose.cuh"
#ifdef ROUND
#include "common/wide_store.cuh"
#endif

using namespace twin;

constexpr int kOutputs = BACKWARD ? kHalves : 1;
constexpr int kInputs = kHalves + BACKWARD;          // x, its second half where gated, grad
constexpr int kWarps = sizeof(wide_t) == 2 ? 4 : 2;  // side by side: 256 bytes of a row
constexpr int kThreads = 32 * kWarps;
constexpr int kColumns = 4;  // of a thread
constexpr int kTileCols = kWarps * 8 * kColumns;
constexpr int kGroups = kTileCols / kColumns, kRuns = kBlockRows / kRunRows;

// Inputs lie one after the other. Runs of 16 rows have 64 bytes of padding, so that in 16 bits two runs of a warp lie
// in different banks.
constexpr int kRowBytes = kTileCols * sizeof(wide_t), kPieces = kRowBytes / 16;
constexpr int kRowsAtOnce = kThreads / kPieces;
constexpr int kPadding = 64, kRunBytes = kRunRows * kRowBytes + kPadding, kInputBytes = kRuns * kRunBytes;
static_assert(kRunRows % kRowsAtOnce == 0, "rows that are fetched at once belong to one run");

// Columns of codes, 16 rows each, where the inputs were: [output][column of a group][group][swizzled(run, group)].
using Columns = uint4[kColumns][kGroups][kRuns];
static_assert(kOutputs * sizeof(Columns) <= kInputs * kInputBytes, "codes are smaller than what they are of");
static_assert(kThreads == kGroups * kRuns, "a thread stores all columns of a group");

// Eight neighbouring groups put the same run into different banks.
__device__ __forceinline__ int swizzled(int run, int group) { return run ^ group / 2 % kRuns; }

// Copy a tile's rows of one input. `from` is the thread's first piece; from the `left`-th row after it on: zeros.
__device__ __forceinline__ void fetch(unsigned char* to, const wide_t* from, size_t stride, int left) {
#pragma unroll
    for (int r = 0; r < kBlockRows; r += kRowsAtOnce)
        cp_async_16_or_zeros(to + threadIdx.x * 16 + r * kRowBytes + r / kRunRows * kPadding, from + r * stride,
                             r < left);
}

// What a thread makes of its 16 rows of four columns: codes, a row in a word, and the amax.
struct Rows {
    unsigned codes[kOutputs][kRunRows];
    float amax;
};

// Casts rows kRow, kRow + kStep, kRow + 2 kStep, ... and sums them: every other one, and the rest, by the same rule.
// The first `left` rows exist; the others count as +0 in a sum.
template <int kStep = 1, int kRow = 0>
__device__ __forceinline__ void cast_rows(const unsigned char* fetched, float scale, int left, Rows& rows,
                                          float (&sum)[kOutputs][kColumns]) {
    if constexpr (kStep < kRunRows) {
        float other[kOutputs][kColumns];
        cast_rows<2 * kStep, kRow>(fetched, scale, left, rows, sum);
        cast_rows<2 * kStep, kRow + kStep>(fetched, scale, left, rows, other);
#pragma unroll
        for (int o = 0; o < kOutputs; o++)
#pragma unroll
            for (int c = 0; c < kColumns; c++) sum[o][c] = sum[o][c] + other[o][c];
    } else {
        Vector<kColumns> in[3] = {};  // x1, x2 where gated, grad
#pragma unroll
        for (int i = 0; i < kInputs; i++)
            in[i < kHalves ? i : 2] =
                *reinterpret_cast<const Vector<kColumns>*>(fetched + i * kInputBytes + kRow * kRowBytes);
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
            float v[kOutputs];
#if BACKWARD
            backward(widen(in[2], c), widen(in[0], c), widen(in[1], c), v);
#else
            v[0] = forward(widen(in[0], c), widen(in[1], c));
#endif
#pragma unroll
            for (int o = 0; o < kOutputs; o++) {
                if constexpr (BACKWARD && kZerosGiveMinusZeros) v[o] = kRow < left ? v[o] : 0.0f;
#ifndef ROUND
                rows.amax = amax_of(rows.amax, v[o]);
#endif
                sum[o][c] = v[o];
            }
        }
#ifdef ROUND
        static_assert(!BACKWARD && sizeof(wide_t) == 2, "ROUND is of 16-bit activations");
        const Vector<kColumns> rounded = {word_of(sum[0]), word_of(sum[0] + 2)};
#pragma unroll
        for (int c = 0; c < kColumns; c++) sum[0][c] = widen(rounded, c);
#endif
#pragma unroll
        for (int o = 0; o < kOutputs; o++) rows.codes[o][kRow] = quantize4(sum[o], scale);
    }
}

// `cols` is m; grad and partial are null without BACKWARD.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    activation_cast_transpose(const wide_t* __restrict__ grad, const wide_t* __restrict__ x,
                              const float* __restrict__ scale_slot, float* amax_slot, unsigned char* __restrict__ q,
                              unsigned char* __restrict__ q_t, float* __restrict__ scale_inv,
                              float* __restrict__ partial, int rows, int cols) {
    if (BACKWARD) let_next_grid_start();  // `total` of dbias.cu
    extern __shared__ __align__(16) unsigned char fetched[];
    // Rows in two dimensions: a division would keep the copies waiting.
    const int block_row = blockIdx.z * gridDim.y + blockIdx.y;
    const int first_row = block_row * kBlockRows, first_col = blockIdx.x * kTileCols;
    const size_t m = cols, q_t_stride = (static_cast<size_t>(rows) + 15) / 16 * 16;
    {
        const int row = first_row + threadIdx.x / kPieces, col = first_col + threadIdx.x % kPieces * kLanes;
        const int left = col < cols ? rows - row : 0;
        // A piece that does not exist is not read, but its address must be valid.
        const size_t r = left > 0 ? row : 0, c = left > 0 ? col : 0;
        fetch(fetched, x + r * kHalves * m + c, kHalves * m, left);
        if constexpr (kGated) fetch(fetched + kInputBytes, x + (r * kHalves + 1) * m + c, kHalves * m, left);
        if constexpr (BACKWARD) fetch(fetched + kHalves * kInputBytes, grad + r * m + c, m, left);
        cp_async_commit_group();
    }
    const int lane = threadIdx.x % 32, run = lane / 8, group = threadIdx.x / 32 * 8 + lane % 8;
    const int row = first_row + run * kRunRows, col = first_col + group * kColumns;
    const int left = col < cols ? max(min(rows - row, kRunRows), 0) : 0;  // rows of the thread that exist
    const float scale = *scale_slot;
    q += static_cast<size_t>(row) * kOutputs * m + col;
    cp_async_wait_group<0>();
    __syncthreads();

    Rows mine;
    mine.amax = 0.0f;
    float sums[kOutputs][kColumns];
    cast_rows(fetched + run * kRunBytes + group * kColumns * sizeof(wide_t), scale, left, mine, sums);
    __syncthreads();  // all have read
    Columns* const staged = reinterpret_cast<Columns*>(fetched);
#pragma unroll
    for (int o = 0; o < kOutputs; o++) {
        unsigned columns[4][kColumns];  // [group of four rows][column]
#pragma unroll
        for (int g = 0; g < 4; g++) {
            const unsigned* const codes = mine.codes[o] + 4 * g;
            transpose4(codes[0], codes[1], codes[2], codes[3], columns[g]);
            // A row that does not exist gives code 0, not 0 * scale, which is NaN if scale is infinite.
            const int there = min(max(left - 4 * g, 0), 4);
            const unsigned mask = there == 4 ? ~0u : (1u << 8 * there) - 1;
#pragma unroll
            for (int c = 0; c < kColumns; c++) columns[g][c] &= mask;
        }
#pragma unroll
        for (int c = 0; c < kColumns; c++)
            staged[o][c][group][swizzled(run, group)] =
                make_uint4(columns[0][c], columns[1][c], columns[2][c], columns[3][c]);
#pragma unroll
        for (int r = 0; r < kRunRows; r++)
            if (r < left) *reinterpret_cast<unsigned*>(q + (r * kOutputs + o) * m) = mine.codes[o][r];
#if BACKWARD
        float sum[1];
        const int column = col + block_sum<kColumns>(sums[o], sum);
        if (col < cols && first_row < rows)
            store(partial + (static_cast<size_t>(block_row) * kOutputs + o) * m + column, sum, evict_last());
#endif
    }
    __syncthreads();
    {  // 64 bytes of a column by four threads
        const int run = threadIdx.x % kRuns, group = threadIdx.x / kRuns;
        const int row = first_row + run * kRunRows, col = first_col + group * kColumns;
        if (row < rows && col < cols) {
#pragma unroll
            for (int i = 0; i < kOutputs * kColumns; i++) {
                const int o = i / kColumns, c = i % kColumns;
                *reinterpret_cast<uint4*>(q_t + (o * m + col + c) * q_t_stride + row) =
                    staged[o][c][group][swizzled(run, group)];
            }
        }
    }
    if (block_row == 0 && blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
    if (amax_slot != nullptr) commit_amax<kWarps>(mine.amax, amax_slot);
}
