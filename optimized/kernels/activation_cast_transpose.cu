// activation_cast_transpose: an activation (BACKWARD 0) or its backward (BACKWARD 1), from fp32 straight to FP8 with
// the transposed copy, noting the amax; backward also sums the rows of dx.
//
//     v         = y [rows, m] of x [rows, n]; BACKWARD: dx [rows, n] of grad [rows, m] and x     (activation.cuh)
//     q, q_t, scale_inv, amax     of v, as in cast_transpose.cu
//     partial   [ceil(rows / 64), n] fp32, BACKWARD: the sums of 64 rows of v in the order of row_sum.cuh
//
// n = 2 m where gated, else m; v has a multiple of 16 columns. x and grad fp32, bf16 or fp16 (WIDE).
//
// Bound by memory, with the plan of cast_transpose.cu: a thread owns 16 rows of COLUMNS columns of y (and of both
// halves of dx), a warp 4 such runs by 8 column groups, and ACROSS warps stand side by side. Up to three inputs and
// two outputs are too much for the registers at once, so a thread takes its even rows first and then its odd ones:
// the halving tree of the sums has those as subtrees, and interleaving their codes is the last step of the
// transposition. UNROLL 2 lets the compiler have the loads of both in flight, UNROLL 1 does not.
#include "activation.cuh"
#include "quantize.cuh"
#include "row_sum.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int WARP_COLS = 8 * COLUMNS;
constexpr int TILE_ROWS = WARPS / ACROSS * BLOCK_ROWS, TILE_COLS = ACROSS * WARP_COLS;
constexpr int WORDS = COLUMNS / 4;  // words of codes a row of a thread
constexpr int ROWS = RUN / 2;       // rows of one parity
constexpr int OUTPUTS = BACKWARD ? HALVES : 1;
static_assert(COLUMNS % 4 == 0 && COLUMNS <= LANES, "a thread's columns are whole words of codes, one load at most");

// Where a thread reads and writes; rows are `cols` (grad, y) or twice that (x, dx of the gated kinds) apart.
struct Place {
    const wide_t* grad;
    const wide_t* x;
    unsigned char* q;
    unsigned char* q_t;
    float* partial;  // null for a lane beyond the last column
    size_t cols, q_t_stride;
};

struct Loaded {
    Vector<COLUMNS> x1, x2, grad;
};

__device__ __forceinline__ Loaded load_row(const Place& at, int r) {
    Loaded in = {};
    in.x1 = load_once<COLUMNS>(at.x + r * HALVES * at.cols);
    if constexpr (GATED) in.x2 = load_once<COLUMNS>(at.x + (r * HALVES + 1) * at.cols);
    if constexpr (BACKWARD) in.grad = load_once<COLUMNS>(at.grad + r * at.cols);
    return in;
}

__device__ __forceinline__ void evaluate(const Loaded& in, int i, float (&v)[OUTPUTS]) {
    const float x1 = widen(in.x1, i), x2 = widen(in.x2, i);
#if BACKWARD
    backward(widen(in.grad, i), x1, x2, v);
#else
    v[0] = forward(x1, x2);
#endif
}

// The part of row_sum.cuh's halving tree that lies among rows of one parity.
__device__ __forceinline__ float parity_sum(float (&v)[ROWS]) {
#pragma unroll
    for (int h = ROWS / 2; h > 0; h /= 2)
#pragma unroll
        for (int r = 0; r < h; ++r) v[r] = v[r] + v[r + h];
    return v[0];
}

// Codes of rows 4 j + p and 4 j + 2 + p of one parity p: columns 0 and 1 in `low`, first row in the low byte of each.
struct Pairs {
    unsigned low[ROWS / 2], high[ROWS / 2];
};

// One thread's 16 rows. `left` is how many of them there are (WHOLE: all); a missing one is computed from zeros, which
// give +0 in every sum.
template <bool WHOLE>
__device__ __forceinline__ void cast_run(const Place& at, int left, float scale, float& amax) {
    Pairs even[OUTPUTS][WORDS], odd[OUTPUTS][WORDS] = {};
#if BACKWARD
    float run[OUTPUTS][COLUMNS];
#endif
#pragma unroll UNROLL
    for (int parity = 0; parity < 2; ++parity) {
        Loaded in[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            in[i] = WHOLE || parity + 2 * i < left ? load_row(at, parity + 2 * i) : Loaded{};
        unsigned codes[OUTPUTS][ROWS][WORDS];
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            float v[OUTPUTS][4][ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    float element[OUTPUTS];
                    evaluate(in[i], 4 * w + c, element);
#pragma unroll
                    for (int o = 0; o < OUTPUTS; ++o) {
                        amax = amax_of(amax, element[o]);
                        v[o][c][i] = element[o];
                    }
                }
#pragma unroll
                for (int o = 0; o < OUTPUTS; ++o) {
                    const unsigned code =
                        quantize2(v[o][0][i], v[o][1][i], scale) | quantize2(v[o][2][i], v[o][3][i], scale) << 16;
                    // Not left to 0 * scale, which is NaN if scale is infinite.
                    codes[o][i][w] = WHOLE || parity + 2 * i < left ? code : 0;
                }
            }
#pragma unroll
            for (int o = 0; o < OUTPUTS; ++o) {
                even[o][w] = odd[o][w];
#pragma unroll
                for (int j = 0; j < ROWS / 2; ++j) {
                    odd[o][w].low[j] = __byte_perm(codes[o][2 * j][w], codes[o][2 * j + 1][w], 0x5140);
                    odd[o][w].high[j] = __byte_perm(codes[o][2 * j][w], codes[o][2 * j + 1][w], 0x7362);
                }
#if BACKWARD
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const float sum = parity_sum(v[o][c]);
                    run[o][4 * w + c] = parity == 0 ? sum : run[o][4 * w + c] + sum;
                }
#endif
            }
        }
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int r = parity + 2 * i;
                if (WHOLE || r < left) {
                    unsigned char* q = at.q + (r * OUTPUTS + o) * at.cols;
                    if constexpr (WORDS == 2)
                        *reinterpret_cast<uint2*>(q) = make_uint2(codes[o][i][0], codes[o][i][1]);
                    else
                        *reinterpret_cast<unsigned*>(q) = codes[o][i][0];
                }
            }
        }
    }
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
        if (WHOLE || left > 0) {
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const Pairs &e = even[o][c / 4], &d = odd[o][c / 4];
                unsigned column[4];  // 16 codes
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    column[j] = c % 4 < 2 ? __byte_perm(e.low[j], d.low[j], c % 2 ? 0x7362 : 0x5140)
                                          : __byte_perm(e.high[j], d.high[j], c % 2 ? 0x7362 : 0x5140);
                *reinterpret_cast<uint4*>(at.q_t + (o * at.cols + c) * at.q_t_stride) =
                    make_uint4(column[0], column[1], column[2], column[3]);
            }
        }
#if BACKWARD
        float sum[COLUMNS / 4];
        const int column = block_sum<COLUMNS>(run[o], sum);
        if (WHOLE || at.partial != nullptr) {
#pragma unroll
            for (int c = 0; c < COLUMNS / 4; ++c) at.partial[o * at.cols + column + c] = sum[c];
        }
#endif
    }
}

// `cols` is m; grad and partial are null without BACKWARD.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void activation_cast_transpose(
    const wide_t* __restrict__ grad, const wide_t* __restrict__ x, const float* __restrict__ scale_slot,
    float* amax_slot, unsigned char* __restrict__ q, unsigned char* __restrict__ q_t, float* __restrict__ scale_inv,
    float* __restrict__ partial, int rows, int cols) {
    const float scale = *scale_slot;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column_tiles = max(1, (cols + TILE_COLS - 1) / TILE_COLS);
    const int tile_row = blockIdx.x / column_tiles, tile_col = blockIdx.x % column_tiles;
    const int block_row = tile_row * TILE_ROWS + warp / ACROSS * BLOCK_ROWS;
    const int row = block_row + lane / 8 * RUN;
    const int col = tile_col * TILE_COLS + warp % ACROSS * WARP_COLS + lane % 8 * COLUMNS;
    float amax = 0.0f;

    if (block_row < rows) {
        // A lane beyond the last column takes part in the shuffles with no rows, at an address that exists.
        const bool inside = col < cols;
        const size_t m = cols, q_t_stride = (static_cast<size_t>(rows) + 15) / 16 * 16;
        const size_t r = inside ? row : 0, c = inside ? col : 0;
        float* sums = inside ? partial + block_row / BLOCK_ROWS * OUTPUTS * m + c : nullptr;
        const Place at = {grad + r * m + c, x + r * HALVES * m + c, q + r * OUTPUTS * m + c,
                          q_t + c * q_t_stride + r, sums, m, q_t_stride};
        if (block_row + BLOCK_ROWS <= rows && (tile_col + 1) * TILE_COLS <= cols) {
            cast_run<true>(at, RUN, scale, amax);
        } else {
            cast_run<false>(at, inside ? max(min(rows - row, RUN), 0) : 0, scale, amax);
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
    if (amax_slot != nullptr) commit_amax<WARPS>(amax, amax_slot);
}
