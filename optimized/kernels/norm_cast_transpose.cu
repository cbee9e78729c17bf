// norm_cast_transpose: LayerNorm or RMSNorm, cast to FP8 from fp32, with the transposed copy and the amax.
//
//     y         as in norm.cu, fp32, not rounded further
//     q[r, c]   = satfinite_rne(y[r, c] * scale[0])         NaN -> 0x7F
//     q_t[c, r] = q[r, c]; 0x00 for rows <= r < ceil16(rows)
//     scale_inv = 1 / scale[0]                              IEEE division
//     amax[0]   = max(amax[0], max |y|)                     y not scaled, NaN ignored; skipped if amax is null
//
// x [rows, hidden] of type WIDE; hidden a multiple of 16, at most 1024 (norm_cast_transpose_long.cu: more); q [rows,
// hidden], q_t [hidden, ceil16(rows)] FP8 (FP8); mean, rstd fp32 [rows].
//
// Bound by memory: 4 bytes an element in bf16. A block takes 64 rows at a time, 64 bytes of each row of q_t: two whole
// sectors, one request to L2. A warp holds a row in registers (norm_held.cuh) and writes its codes to q and to shared
// memory. Then threads read 16 rows by 8 columns of codes back, transpose them in registers and write 16 bytes of each
// row of q_t; 4 neighbouring lanes fill the two sectors. Blocks are persistent: the first rows of the next tile are
// loaded during the transposition.
#include "norm_held.cuh"
#include "quantize.cuh"
#include "store_transposed.cuh"

using namespace twin;

static_assert(ROW_WARPS == 1, "a warp holds a row");
constexpr int kThreads = 32 * TILE_WARPS;
constexpr int kTileRows = 64, kRuns = kTileRows / kRunRows;
constexpr int kSkew = 128 / kRuns;  // bytes between runs of rows in shared memory: lanes read other banks

extern __shared__ __align__(16) float affine[];  // gamma, beta; codes, [kRuns][16 rows][hidden]

extern "C" __global__ void __launch_bounds__(kThreads, 1) norm_cast_transpose(
    const wide_t* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
    const float* __restrict__ scale_slot, float* amax_slot, unsigned char* __restrict__ q,
    unsigned char* __restrict__ q_t, float* __restrict__ scale_inv, float* __restrict__ mean,
    float* __restrict__ rstd, int rows, int length, float eps, int zero_centered, int parameters) {
    const float scale = *scale_slot;
    const Held held(length);
    const int hidden = held.hidden;
    const int warp = threadIdx.x / 32;
    const int run_stride = kRunRows * hidden + kSkew;
    unsigned char* const codes = reinterpret_cast<unsigned char*>(affine + (KIND == 0 ? 2 : 1) * hidden);
    float amax = 0.0f;
    int tile = blockIdx.x;
    Packed packed, next;
    Slots unused;  // a warp needs no other's sum
    if (tile * kTileRows + warp < rows) packed = held.load(x, tile * kTileRows + warp);
    stage_parameters(affine, weight, bias, parameters, zero_centered != 0, hidden);
    for (; tile * kTileRows < rows; tile += gridDim.x) {
#pragma unroll 1
        for (int local = warp; local < kTileRows; local += TILE_WARPS) {
            const int row = tile * kTileRows + local;
            const int after =
                local + TILE_WARPS < kTileRows ? row + TILE_WARPS : (tile + gridDim.x) * kTileRows + warp;
            if (after < rows) next = held.load(x, after);
            if (row < rows) {
                const Row normalized(packed, held, eps, unused, 0, 0);
                normalized.store_statistics(mean, rstd, row, held);
                unsigned char* const target = q + static_cast<size_t>(row) * hidden + held.first;
                unsigned char* const copy =
                    codes + local / kRunRows * run_stride + local % kRunRows * hidden + held.first;
                normalized.for_each_output(affine, held, [&](int i, const float(&y)[8]) {
#pragma unroll
                    for (int j = 0; j < 8; j++) amax = amax_of(amax, y[j]);
                    const uint2 words = make_uint2(quantize4(y, scale), quantize4(y + 4, scale));
                    *reinterpret_cast<uint2*>(target + kStripe * i) = words;
                    *reinterpret_cast<uint2*>(copy + kStripe * i) = words;
                });
            }
            packed = next;
        }
        __syncthreads();
        for (int unit = threadIdx.x; unit < kRuns * hidden / 8; unit += kThreads) {
            const int run = unit % kRuns, column = unit / kRuns * 8, row = tile * kTileRows + run * kRunRows;
            if (row < rows)
                store_transposed(codes + run * run_stride + column, hidden,
                                 q_t + column * q_t_stride(rows) + row, q_t_stride(rows), rows - row);
        }
        __syncthreads();  // the codes have been read
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
    if (amax_slot != nullptr) commit_amax<TILE_WARPS>(amax, amax_slot);
}
