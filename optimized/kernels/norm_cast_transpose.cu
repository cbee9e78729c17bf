// norm_cast_transpose: LayerNorm or RMSNorm, cast to FP8 from fp32, with the transposed copy and the amax.
//
//     y         as in norm.cu, fp32, not rounded further
//     q[r, c]   = satfinite_rne(y[r, c] * scale[0])         NaN -> 0x7F
//     q_t[c, r] = q[r, c]; 0x00 for rows <= r < ceil16(rows)
//     scale_inv = 1 / scale[0]                              IEEE division
//     amax[0]   = max(amax[0], max |y|)                     y not scaled, NaN ignored; skipped if amax is null
//
// x [rows, hidden] of type WIDE; hidden a multiple of 16, at most 1024 * ROW_WARPS; q [rows, hidden], q_t
// [hidden, ceil16(rows)] FP8; mean, rstd fp32 [rows].
//
// Bound by memory: 4 bytes an element in bf16. A block takes TILE_ROWS rows, 32 or 64: as many bytes of each row of q_t,
// one or two whole sectors. First ROW_WARPS warps hold one row in registers, as in norm.cu, and write its codes to q.
// Then threads read 16 rows by 4 * WORDS columns of them back, transpose them in registers and write 16 bytes of each
// row of q_t; lanes 2 k and 2 k + 1, or 4 k to 4 k + 3, fill the sectors. They read the codes from shared memory
// (STAGED 1), or where that has no room, from q, out of L2. Blocks are persistent: the first rows of the next tile fly
// during the transposition.
#include "norm_row.cuh"
#include "quantize.cuh"
#include "transpose.cuh"

constexpr int THREADS = 32 * TILE_WARPS;
constexpr int AT_ONCE = TILE_WARPS / ROW_WARPS;  // rows in registers
constexpr int RUN = 16;
constexpr int RUNS = TILE_ROWS / RUN;
constexpr int WORDS = ROW_WARPS == 1 ? 1 : 2;  // of codes a thread reads of a row
constexpr int SKEW = 128 / RUNS;               // bytes between runs of rows in shared memory: lanes read other banks

struct Words {
    unsigned word[WORDS];
};

__device__ __forceinline__ Words load_words(const unsigned char* from) {
    Words w;
    if constexpr (WORDS == 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        w.word[0] = v.x, w.word[1] = v.y;
    } else {
        w.word[0] = *reinterpret_cast<const unsigned*>(from);
    }
    return w;
}

// The codes of a tile, which this block has written, to q_t. `codes`: from its first row and column on; runs of rows are
// `run_stride` bytes apart.
__device__ __forceinline__ void store_transposed(
    const unsigned char* codes, size_t run_stride, unsigned char* q_t, size_t stride, int tile, int hidden, int rows) {
    for (int unit = threadIdx.x; unit < RUNS * hidden / (4 * WORDS); unit += THREADS) {
        const int run = unit % RUNS, column = unit / RUNS * 4 * WORDS;
        const int row = tile * TILE_ROWS + run * RUN;
        if (row >= rows) continue;
        const unsigned char* from = codes + run * run_stride + column;
        Words word[RUN];
#pragma unroll
        for (int r = 0; r < RUN; ++r) word[r] = row + r < rows ? load_words(from + r * hidden) : Words{};
        unsigned char* const to = q_t + static_cast<size_t>(column) * stride + row;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            unsigned columns[4][4];  // [four rows][column]
#pragma unroll
            for (int g = 0; g < 4; ++g)
                transpose4(word[4 * g].word[w], word[4 * g + 1].word[w], word[4 * g + 2].word[w],
                           word[4 * g + 3].word[w], columns[g]);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                *reinterpret_cast<uint4*>(to + (4 * w + i) * stride) =
                    make_uint4(columns[0][i], columns[1][i], columns[2][i], columns[3][i]);
        }
    }
}

extern __shared__ __align__(16) float affine[];  // gamma and beta; STAGED: then codes, [RUNS][16 rows][hidden]

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void norm_cast_transpose(
    const wide_t* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
    const float* __restrict__ scale_slot, float* amax_slot, unsigned char* __restrict__ q,
    unsigned char* __restrict__ q_t, float* __restrict__ scale_inv, float* __restrict__ mean,
    float* __restrict__ rstd, int rows, int hidden, float eps, int zero_centered, int parameters) {
    __shared__ float slots[AT_ONCE][2][ROW_WARPS];
    const float scale = *scale_slot;
    const int group = threadIdx.x / (32 * ROW_WARPS), part = threadIdx.x / 32 % ROW_WARPS;
    const int first = part * STRIPE * STRIPES + threadIdx.x % 32 * 8;
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const size_t stride = (static_cast<size_t>(rows) + 15) / 16 * 16;
    unsigned char* const staged = reinterpret_cast<unsigned char*>(affine + 2 * hidden);
    const int run_stride = RUN * hidden + SKEW;
    float amax = 0.0f;
    int turn = 0;
    const auto fetch = [&](Packed& packed, int index) {
        if (index < rows) packed.load(x + static_cast<size_t>(index) * hidden + first, hidden - first);
    };
    Packed packed, next;
    if (blockIdx.x < tiles) fetch(packed, blockIdx.x * TILE_ROWS + group);
    stage_parameters(affine, weight, bias, parameters, zero_centered != 0, hidden);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll 1
        for (int local = group; local < TILE_ROWS; local += AT_ONCE) {
            const int index = tile * TILE_ROWS + local;
            const bool last = local + AT_ONCE >= TILE_ROWS;
            fetch(next, last ? (tile + gridDim.x) * TILE_ROWS + group : index + AT_ONCE);
            if (index < rows) {  // the same for all warps of a row
                Values row(packed);
                const Statistics s =
                    center<ROW_WARPS>(row, hidden - first, hidden, eps, slots[group], turn, group + 1);
                if (first == 0) {
                    if (KIND == 0) mean[index] = s.mean;
                    rstd[index] = s.rstd;
                }
                unsigned char* const target = q + static_cast<size_t>(index) * hidden;
                unsigned char* const copy = staged + local / RUN * run_stride + local % RUN * hidden;
                for_each_output(row, s.rstd, affine, bias != nullptr, first, hidden, [&](int at, const float(&y)[8]) {
#pragma unroll
                    for (int j = 0; j < 8; ++j) amax = amax_of(amax, y[j]);
                    const uint2 words = make_uint2(
                        quantize2(y[0], y[1], scale) | quantize2(y[2], y[3], scale) << 16,
                        quantize2(y[4], y[5], scale) | quantize2(y[6], y[7], scale) << 16);
                    *reinterpret_cast<uint2*>(target + at) = words;
                    if (STAGED) *reinterpret_cast<uint2*>(copy + at) = words;
                });
            }
            packed = next;
        }
        __syncthreads();  // the tile's codes are written
#if STAGED
        store_transposed(staged, run_stride, q_t, stride, tile, hidden, rows);
        __syncthreads();  // and read
#else
        const unsigned char* const written = q + static_cast<size_t>(tile) * TILE_ROWS * hidden;
        store_transposed(written, RUN * hidden, q_t, stride, tile, hidden, rows);
#endif
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
    if (amax_slot != nullptr) commit_amax<TILE_WARPS>(amax, amax_slot);
}
