// norm_cast_transpose: LayerNorm or RMSNorm, cast to FP8 from fp32, with the transposed copy and the amax.
//
//     y         as in norm.cu, fp32, not rounded further
//     q[r, c]   = satfinite_rne(y[r, c] * scale[0])         NaN -> 0x7F
//     q_t[c, r] = q[r, c]; 0x00 for rows <= r < ceil16(rows)
//     scale_inv = 1 / scale[0]                              IEEE division
//     amax[0]   = max(amax[0], max |y|)                     y not scaled, NaN ignored; skipped if amax is null
//
// x [rows, hidden] of type WIDE; hidden a multiple of 16, at most 1024 * ROW_WARPS; q [rows, hidden], q_t
// [hidden, ceil16(rows)] FP8 (FP8); mean, rstd fp32 [rows].
//
// Bound by memory: 4 bytes an element in bf16. A cluster of CLUSTER blocks takes TILE_ROWS rows, which are as many
// bytes of each row of q_t: 64 are two whole sectors, one request to L2. ROW_WARPS warps hold one row in registers
// (norm_held.cuh) and write its codes to q. Then threads read 16 rows by 8 columns of codes back, transpose them in
// registers and write 16 bytes of each row of q_t; 2 or 4 neighbouring lanes fill its sectors. Blocks are persistent:
// the first rows of the next tile fly during the transposition.
//
// STAGED 1: the codes also go to shared memory. CLUSTER 2: each to the block that transposes its columns (each half of
// them, of all TILE_ROWS rows), where a barrier counts their bytes; another tells that they have been read.
// STAGED 0, for longer rows: they are read back from q, out of L2.
#include "norm_held.cuh"
#include "ptx/cluster.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/store_async.cuh"
#include "quantize.cuh"
#include "transpose.cuh"

using namespace twin;

constexpr int THREADS = 32 * TILE_WARPS;
constexpr int GROUPS = TILE_WARPS / ROW_WARPS;   // rows in registers
constexpr int BLOCK_ROWS = TILE_ROWS / CLUSTER;  // of a tile
constexpr bool PAIR = CLUSTER == 2;
static_assert(CLUSTER == 1 || (PAIR && STAGED), "two blocks exchange their codes through shared memory");
constexpr int RUN = 16;
constexpr int RUNS = TILE_ROWS / RUN;
constexpr int SKEW = 128 / RUNS;  // bytes between runs of rows in shared memory: lanes read other banks

// 16 rows by 8 columns of codes, of which the rows before `left` exist, to q_t.
__device__ __forceinline__ void store_transposed(
    const unsigned char* codes, int stride, unsigned char* q_t, size_t q_t_stride, int left) {
    uint2 word[RUN];
    if (left >= RUN) {
#pragma unroll
        for (int r = 0; r < RUN; ++r) word[r] = *reinterpret_cast<const uint2*>(codes + r * stride);
    } else {
#pragma unroll
        for (int r = 0; r < RUN; ++r)
            word[r] = r < left ? *reinterpret_cast<const uint2*>(codes + r * stride) : make_uint2(0, 0);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned columns[4][4];  // [four rows][column]
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            const auto of = [&](int r) { return half == 0 ? word[4 * g + r].x : word[4 * g + r].y; };
            transpose4(of(0), of(1), of(2), of(3), columns[g]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<uint4*>(q_t + (4 * half + i) * q_t_stride) =
                make_uint4(columns[0][i], columns[1][i], columns[2][i], columns[3][i]);
    }
}

extern __shared__ __align__(16) float affine[];  // gamma, beta; STAGED: then codes, [RUNS][16 rows][share]

extern "C" __global__ __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) void norm_cast_transpose(
    const wide_t* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
    const float* __restrict__ scale_slot, float* amax_slot, unsigned char* __restrict__ q,
    unsigned char* __restrict__ q_t, float* __restrict__ scale_inv, float* __restrict__ mean,
    float* __restrict__ rstd, int rows, int length, float eps, int zero_centered, int parameters) {
    __shared__ Slots slots[GROUPS];
    __shared__ unsigned long long barriers[2];  // the tile's codes are here; they have been read, in both blocks
    const unsigned arrived = shared_address(&barriers[0]), read = shared_address(&barriers[1]);
    if (PAIR) {
        if (threadIdx.x == 0) {
            mbarrier_init(arrived, 1);
            mbarrier_init(read, CLUSTER * TILE_WARPS);
            fence_mbarrier_init();
        }
        cluster_arrive_relaxed();
    }
    const float scale = *scale_slot;
    const Held held(length);
    const int hidden = held.hidden;
    const int group = threadIdx.x / 32 / ROW_WARPS, rank = blockIdx.x % CLUSTER;
    const int step = gridDim.x / CLUSTER;
    const size_t q_t_stride = (static_cast<unsigned>(rows) + 15u) / 16 * 16;
    // Columns that a block transposes: whole stripes, so that a warp's codes of one go to one block.
    const int share = PAIR ? (hidden + CLUSTER * STRIPE - 1) / (CLUSTER * STRIPE) * STRIPE : hidden;
    const int columns = min(share, hidden - rank * share);
    const int run_stride = RUN * share + SKEW;
    unsigned char* const staged = reinterpret_cast<unsigned char*>(affine + (KIND == 0 ? 2 : 1) * hidden);
    const auto row_of = [&](int tile, int local) { return tile * TILE_ROWS + rank * BLOCK_ROWS + local; };
    float amax = 0.0f;
    int turn = 0, parity = 0;
    int tile = blockIdx.x / CLUSTER;
    Packed packed, next;
    if (row_of(tile, group) < rows) packed = held.load(x, row_of(tile, group));
    stage_parameters(affine, weight, bias, parameters, zero_centered != 0, hidden);
    if (PAIR) cluster_wait();  // both blocks run, and their barriers are there
    for (; tile * TILE_ROWS < rows; tile += step, parity ^= 1) {
        const auto wait_read = [&] {
            if (PAIR && tile >= step) mbarrier_wait(read, parity ^ 1);
        };
        const int there = min(rows - tile * TILE_ROWS, TILE_ROWS);
        if (PAIR && threadIdx.x == 0) mbarrier_arrive_expect_tx(arrived, there * max(columns, 0));
#pragma unroll 1
        for (int local = group; local < BLOCK_ROWS; local += GROUPS) {
            const int index = row_of(tile, local);
            const int after = local + GROUPS < BLOCK_ROWS ? index + GROUPS : row_of(tile + step, group);
            if (after < rows) next = held.load(x, after);
            if (index < rows) {  // the same for all warps of a row
                const Row row(packed, held, eps, slots[group], turn, group + 1);
                turn ^= 1;
                row.store_statistics(mean, rstd, index, held);
                wait_read();
                unsigned char* const target = q + static_cast<size_t>(index) * hidden + held.first;
                const int tile_row = rank * BLOCK_ROWS + local;
                unsigned char* const copy =
                    staged + tile_row / RUN * run_stride + tile_row % RUN * share + held.first;
                row.for_each_output(affine, held, [&](int i, const float(&y)[8]) {
#pragma unroll
                    for (int j = 0; j < 8; ++j) amax = amax_of(amax, y[j]);
                    const uint2 words = make_uint2(
                        quantize2(y[0], y[1], scale) | quantize2(y[2], y[3], scale) << 16,
                        quantize2(y[4], y[5], scale) | quantize2(y[6], y[7], scale) << 16);
                    *reinterpret_cast<uint2*>(target + STRIPE * i) = words;
                    if (PAIR) {
                        const int owner = (held.first + STRIPE * i) / share;
                        store_async(map_to_rank(shared_address(copy + STRIPE * i - owner * share), owner), words,
                                    map_to_rank(arrived, owner));
                    } else if (STAGED) {
                        *reinterpret_cast<uint2*>(copy + STRIPE * i) = words;
                    }
                });
            }
            packed = next;
        }
        if (PAIR) {
            wait_read();  // a block that had no row too: nobody may report to it when it has ended
            mbarrier_wait(arrived, parity);
        } else {
            __syncthreads();
        }
        const unsigned char* const codes = STAGED ? staged : q + static_cast<size_t>(tile) * TILE_ROWS * hidden;
        for (int unit = threadIdx.x; unit < RUNS * columns / 8; unit += THREADS) {
            const int run = unit % RUNS, column = unit / RUNS * 8, row = tile * TILE_ROWS + run * RUN;
            if (row >= rows) continue;
            const unsigned char* const from = codes + run * (STAGED ? run_stride : RUN * hidden) + column;
            unsigned char* const to = q_t + static_cast<size_t>(rank * share + column) * q_t_stride + row;
            store_transposed(from, share, to, q_t_stride, rows - row);
        }
        if (PAIR && (tile + step) * TILE_ROWS < rows) {
            __syncwarp();
            if (threadIdx.x % 32 < CLUSTER) mbarrier_arrive_cluster(map_to_rank(read, threadIdx.x % 32));
        } else if (STAGED && !PAIR) {
            __syncthreads();  // the codes have been read
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
    if (amax_slot != nullptr) commit_amax<TILE_WARPS>(amax, amax_slot);
}
