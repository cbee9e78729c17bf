// activation_cast_transpose: an activation (BACKWARD 0) or its backward (BACKWARD 1), from fp32 straight to FP8 with
// the transposed copy, noting the amax; backward also sums the rows of dx.
//
//     v         = y [rows, m] of x [rows, n]; BACKWARD: dx [rows, n] of grad [rows, m] and x     (activation.cuh)
//     q, q_t, scale_inv, amax     of v, as in cast_transpose.cu
//     partial   [ceil(rows / 64), n] fp32, BACKWARD: the sums of 64 rows of v in the order of row_sum.cuh
//
// n = 2 m where gated, else m; v has a multiple of 16 columns. x and grad fp32, bf16 or fp16 (WIDE).
//
// Bound by memory. A block of threads takes 64 rows by 256 bytes of y's columns. All that it reads is on its way to
// shared memory at once and holds no register (loaded to registers, half of the loads ended up behind the arithmetic on
// the others). Then the plan of cast_transpose.cu: a thread owns 16 rows of four columns of y (and of both halves of
// dx), a warp 4 such runs by 8 column groups, and the transposition happens in registers; columns of codes meet where the
// inputs were. Rows are evaluated in the order in which the sums' halving tree wants them, so that few sums wait for
// others.
#include "activation.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid.cuh"
#include "ptx/l2_policy.cuh"
#include "quantize.cuh"
#include "row_sum.cuh"
#include "transpose.cuh"

constexpr int OUTPUTS = BACKWARD ? HALVES : 1;
constexpr int INPUTS = HALVES + BACKWARD;  // x, its second half where gated, grad
constexpr int WARPS = sizeof(wide_t) == 2 ? 4 : 2;  // side by side: 256 bytes of a row
constexpr int THREADS = 32 * WARPS;
constexpr int COLUMNS = 4;  // of a thread
constexpr int TILE_COLS = WARPS * 8 * COLUMNS;
constexpr int GROUPS = TILE_COLS / COLUMNS, RUNS = BLOCK_ROWS / RUN;

// Inputs lie one after the other. The runs of 16 rows are 64 bytes further apart than their bytes, so that in 16 bits
// two runs of a warp lie in different banks.
constexpr int ROW_BYTES = TILE_COLS * sizeof(wide_t), PIECES = ROW_BYTES / 16;
constexpr int ROWS_AT_ONCE = THREADS / PIECES;
constexpr int PADDING = 64, RUN_BYTES = RUN * ROW_BYTES + PADDING, INPUT_BYTES = RUNS * RUN_BYTES;
static_assert(RUN % ROWS_AT_ONCE == 0, "rows that are fetched at once belong to one run");

// Where the inputs were, columns of codes meet: 16 rows each, [output][column of a group][group][swizzled(run, group)].
typedef uint4 Columns[COLUMNS][GROUPS][RUNS];
static_assert(OUTPUTS * sizeof(Columns) <= INPUTS * INPUT_BYTES, "codes are smaller than what they are of");
static_assert(THREADS == GROUPS * RUNS, "a thread stores all columns of a group");

// Eight groups that lie side by side put the same run into different banks.
__device__ __forceinline__ int swizzled(int run, int group) { return run ^ group / 2 % RUNS; }

// A tile's rows of one input, `from` being the thread's first piece; zeros from the `left`-th row after it on.
__device__ __forceinline__ void fetch(unsigned char* to, const wide_t* from, size_t stride, int left) {
#pragma unroll
    for (int r = 0; r < BLOCK_ROWS; r += ROWS_AT_ONCE)
        cp_async_16_or_zeros(to + threadIdx.x * 16 + r * ROW_BYTES + r / RUN * PADDING, from + r * stride, r < left);
}

// What a thread makes of its 16 rows of four columns: codes, a row a word; and their sums.
struct Rows {
    unsigned codes[OUTPUTS][RUN];
    float amax;
};

// Rows R, R + H, R + 2 H, ...: the halving tree adds the sum of every other one to that of the rest.
template <int H = 1, int R = 0>
__device__ __forceinline__ void cast_rows(
    const unsigned char* fetched, float scale, Rows& rows, float (&sum)[OUTPUTS][COLUMNS]) {
    if constexpr (H < RUN) {
        float other[OUTPUTS][COLUMNS];
        cast_rows<2 * H, R>(fetched, scale, rows, sum);
        cast_rows<2 * H, R + H>(fetched, scale, rows, other);
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) sum[o][c] = sum[o][c] + other[o][c];
    } else {
        Vector<COLUMNS> in[3] = {};  // x1, x2 where gated, grad
#pragma unroll
        for (int i = 0; i < INPUTS; ++i)
            in[i < HALVES ? i : 2] =
                *reinterpret_cast<const Vector<COLUMNS>*>(fetched + i * INPUT_BYTES + R * ROW_BYTES);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            float v[OUTPUTS];
#if BACKWARD
            backward(widen(in[2], c), widen(in[0], c), widen(in[1], c), v);
#else
            v[0] = forward(widen(in[0], c), widen(in[1], c));
#endif
#pragma unroll
            for (int o = 0; o < OUTPUTS; ++o) {
                rows.amax = amax_of(rows.amax, v[o]);
                sum[o][c] = v[o];
            }
        }
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o)
            rows.codes[o][R] =
                quantize2(sum[o][0], sum[o][1], scale) | quantize2(sum[o][2], sum[o][3], scale) << 16;
    }
}

// `cols` is m; grad and partial are null without BACKWARD.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void activation_cast_transpose(
    const wide_t* __restrict__ grad, const wide_t* __restrict__ x, const float* __restrict__ scale_slot,
    float* amax_slot, unsigned char* __restrict__ q, unsigned char* __restrict__ q_t, float* __restrict__ scale_inv,
    float* __restrict__ partial, int rows, int cols) {
    if (BACKWARD) twin::let_next_grid_start();  // `total` of dbias.cu
    extern __shared__ __align__(16) unsigned char fetched[];
    // No division: it would keep the copies waiting.
    const int block_row = blockIdx.z * gridDim.y + blockIdx.y;
    const int first_row = block_row * BLOCK_ROWS, first_col = blockIdx.x * TILE_COLS;
    const size_t m = cols, q_t_stride = (static_cast<size_t>(rows) + 15) / 16 * 16;
    {
        const int row = first_row + threadIdx.x / PIECES, col = first_col + threadIdx.x % PIECES * LANES;
        const int left = col < cols ? rows - row : 0;
        // What is not there is not read, but its address exists.
        const size_t r = left > 0 ? row : 0, c = left > 0 ? col : 0;
        fetch(fetched, x + r * HALVES * m + c, HALVES * m, left);
        if constexpr (GATED) fetch(fetched + INPUT_BYTES, x + (r * HALVES + 1) * m + c, HALVES * m, left);
        if constexpr (BACKWARD) fetch(fetched + HALVES * INPUT_BYTES, grad + r * m + c, m, left);
        cp_async_commit_group();
    }
    const int lane = threadIdx.x % 32, run = lane / 8, group = threadIdx.x / 32 * 8 + lane % 8;
    const int row = first_row + run * RUN, col = first_col + group * COLUMNS;
    const int left = col < cols ? max(min(rows - row, RUN), 0) : 0;  // rows of the thread that exist
    const float scale = *scale_slot;
    q += static_cast<size_t>(row) * OUTPUTS * m + col;
    cp_async_wait_group<0>();
    __syncthreads();

    Rows mine;
    mine.amax = 0.0f;
    float sums[OUTPUTS][COLUMNS];
    cast_rows(fetched + run * RUN_BYTES + group * COLUMNS * sizeof(wide_t), scale, mine, sums);
    __syncthreads();  // all have read
    Columns* const staged = reinterpret_cast<Columns*>(fetched);
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
        unsigned columns[4][COLUMNS];  // [group of four rows][column]
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            const unsigned* const codes = mine.codes[o] + 4 * g;
            transpose4(codes[0], codes[1], codes[2], codes[3], columns[g]);
            // The code of a row that is not there is not left to 0 * scale, which is NaN if scale is infinite.
            const int there = min(max(left - 4 * g, 0), 4);
            const unsigned mask = there == 4 ? ~0u : (1u << 8 * there) - 1;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) columns[g][c] &= mask;
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            staged[o][c][group][swizzled(run, group)] =
                make_uint4(columns[0][c], columns[1][c], columns[2][c], columns[3][c]);
#pragma unroll
        for (int r = 0; r < RUN; ++r)
            if (r < left) *reinterpret_cast<unsigned*>(q + (r * OUTPUTS + o) * m) = mine.codes[o][r];
#if BACKWARD
        float sum[1];
        const int column = col + block_sum<COLUMNS>(sums[o], sum);
        if (col < cols && first_row < rows)
            twin::store(partial + (static_cast<size_t>(block_row) * OUTPUTS + o) * m + column, sum, twin::evict_last());
#endif
    }
    __syncthreads();
    {  // 64 bytes of a column by four threads
        const int run = threadIdx.x % RUNS, group = threadIdx.x / RUNS;
        const int row = first_row + run * RUN, col = first_col + group * COLUMNS;
        if (row < rows && col < cols) {
#pragma unroll
            for (int i = 0; i < OUTPUTS * COLUMNS; ++i) {
                const int o = i / COLUMNS, c = i % COLUMNS;
                *reinterpret_cast<uint4*>(q_t + (o * m + col + c) * q_t_stride + row) =
                    staged[o][c][group][swizzled(run, group)];
            }
        }
    }
    if (block_row == 0 && blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
    if (amax_slot != nullptr) commit_amax<WARPS>(mine.amax, amax_slot);
}
