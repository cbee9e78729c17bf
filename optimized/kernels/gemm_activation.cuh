// Behind an FP8 product: an activation (EPILOGUE 1) or its backward (EPILOGUE 2), to FP8 with the transposed copy.
//
//   1: the piece holds h = T(acc * scale + bias), which is kept;  v = y [m, n] of h                  (activation.cuh)
//   2: the piece holds dact = T(acc * scale), gradient of y;      v = dh of dact and h; partial sums of 64 rows of v
//   q = v in FP8, q_t its transpose [columns, ceil16(m)], amax    (quantize.cuh, reference/ops/cast_transpose.py)
//
// h and dh have twice y's columns where the kind is gated. A warp does 64 rows of 32 columns in four runs of 16, so the
// sums' order (row_sum.cuh) needs no other warp: rows r and r + 8 of a run lie in a lane, the rest eight lanes apart.
//
// Defines: EPILOGUE, KIND (activation.cuh), FP8 (quantize.cuh).
#pragma once

#include "activation.cuh"
#include "gemm_handoff.cuh"
#include "quantize.cuh"

namespace twin {

constexpr bool kBackward = EPILOGUE == 2;
constexpr int kOutputs = kBackward ? HALVES : 1;  // values made of an element (pair)
constexpr int kItems = kPieces / kHalves;
constexpr int kAtOnce = kBackward && !GATED ? 2 : 1;  // runs whose loads may be in flight: what the registers hold
static_assert(kHalves == (kBackward ? 1 : HALVES), "a gated activation reads B in halves");

struct Epilogue {
    unsigned short* h;  // written by 1, read by 2
    const void* bias;   // of the product
    const float* scale_slot;
    float* amax_slot;  // may be null
    unsigned char* q;
    unsigned char* q_t;
    float* scale_inv;
    float* partial;  // 2: [ceil(m / 64), columns of h]
    long long bias_type;
};

// v of one element: y of x1 and x2, or dh of dact, x1 and x2.
__device__ __forceinline__ void evaluate(float dact, float x1, float x2, float (&v)[kOutputs]) {
#if EPILOGUE == 2
    backward(dact, x1, x2, v);
#else
    v[0] = forward(x1, x2);
#endif
}

// Codes of two rows, i and i + 8 of a run (codes[row][four columns]), to one column's 16: those of column i % 8 of the
// eight that lanes 4 i + q share.
__device__ __forceinline__ uint4 transpose_run(const unsigned (&codes)[2][2]) {
    const bool upper = threadIdx.x & 16;  // lanes of rows 4 .. 7 and 12 .. 15: they take the second four columns
    unsigned w[4];                        // rows j, j + 4, j + 8, j + 12
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const unsigned keep = upper ? codes[h][1] : codes[h][0];
        const unsigned received = __shfl_xor_sync(0xFFFFFFFF, upper ? codes[h][0] : codes[h][1], 16);
        w[2 * h] = upper ? received : keep;
        w[2 * h + 1] = upper ? keep : received;
    }
    unsigned columns[4], rows[4];
    transpose4(w[0], w[1], w[2], w[3], columns);
    transpose_lanes<4>(columns[0], columns[1], columns[2], columns[3]);
    transpose4(columns[0], columns[1], columns[2], columns[3], rows);
    return make_uint4(rows[0], rows[1], rows[2], rows[3]);
}

// The sum over a run's 16 rows of that same column, from the sums of rows i and i + 8.
__device__ __forceinline__ float sum_run(const float (&v)[8]) {
    const auto fold = [](float low, float high, int mask) {
        const bool upper = threadIdx.x & mask;
        return (upper ? high : low) + __shfl_xor_sync(0xFFFFFFFF, upper ? low : high, mask);
    };
    float four[4], two[2];
#pragma unroll
    for (int c = 0; c < 4; c++) four[c] = fold(v[c], v[c + 4], 16);
#pragma unroll
    for (int c = 0; c < 2; c++) two[c] = fold(four[c], four[c + 2], 8);
    return fold(two[0], two[1], 4);
}

// Where the outputs of a problem lie. `width` is the number of y's columns.
struct Output {
    int m, width;
    float scale;
    size_t stride_t;  // ceil16(m)
};

// One run of 16 rows: from a lane's eight columns of two rows to everything that is stored. `sums` (2) receives the run's
// sum of the lane's column of q_t, for each half.
__device__ __forceinline__ void finish_run(const Epilogue& e, const Output& out, const Place& at, const Piece& handed,
                                           const Piece (&x)[HALVES], float& amax, float (&sums)[kOutputs]) {
    unsigned codes[kOutputs][2][2];
    float low[kOutputs][8];  // row i, then the sum of rows i and i + 8
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int f = 0; f < 2; f++) {  // four columns
            float v[kOutputs][4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int i = 4 * f + c;
                float value[kOutputs];
                evaluate(widen(handed.rows[r], i), widen(x[0].rows[r], i), widen(x[HALVES - 1].rows[r], i), value);
#pragma unroll
                for (int o = 0; o < kOutputs; o++) {
                    v[o][c] = value[o];
                    amax = amax_of(amax, value[o]);
                    low[o][i] = r == 0 ? value[o] : low[o][i] + value[o];
                }
            }
#pragma unroll
            for (int o = 0; o < kOutputs; o++) {
                const unsigned code =
                    quantize2(v[o][0], v[o][1], out.scale) | quantize2(v[o][2], v[o][3], out.scale) << 16;
                codes[o][r][f] = at.rows[r] ? code : 0;  // not left to 0 * scale, which is NaN if scale is infinite
            }
        }
        if (at.rows[r]) {
            const size_t row = at.row + 8 * r;
#pragma unroll
            for (int o = 0; o < kOutputs; o++)
                store_eight_columns(e.q + (row * kOutputs + o) * out.width + at.column, codes[o][r], at.second);
            if constexpr (!kBackward) {
#pragma unroll
                for (int half = 0; half < HALVES; half++)
                    store_eight_columns(e.h + (row * HALVES + half) * out.width + at.column, x[half].rows[r].words,
                                        at.second);
            }
        }
    }
    const int i = threadIdx.x % 32 / 4;
#pragma unroll
    for (int o = 0; o < kOutputs; o++) {
        const uint4 column = transpose_run(codes[o]);
        const int first = at.row - i;  // of the run
        if (first < out.m && (i < 4 || at.second)) {
            const size_t c = o * out.width + at.column + i / 4 * kSecond + i % 4;
            *reinterpret_cast<uint4*>(e.q_t + c * out.stride_t + first) = column;
        }
        if constexpr (kBackward) sums[o] = sum_run(low[o]);
    }
}

// What the three warps do.
__device__ __forceinline__ void finish_tiles(const Epilogue& e, const unsigned char* memory, const Tiles& tiles, int m,
                                             int n) {
    const int lane = threadIdx.x % 32, worker = threadIdx.x / 32 - 4 * WARPGROUPS - 1, i = lane / 4;
    const Output out = {m, n / kHalves, *e.scale_slot, (static_cast<size_t>(m) + 15) / 16 * 16};
    float amax = 0.0f;

    const auto begin = [&](const Tile& tile) {
        if constexpr (kBackward) {
            const int columns = min(kTileN, out.width - tile.column);
            for (int half = 0; half < HALVES; half++)
                prefetch_tile(e.h, worker, tile, half * out.width + tile.column, columns, m, HALVES * out.width);
        }
    };
    const auto finish = [&](const Tile& tile, int warpgroup, int piece, const unsigned char* from) {
        const int first = tile.column + 32 * piece;
        const int row0 = tile.row + 64 * warpgroup;
        if (first >= out.width || row0 >= m) return;
        Place at = {row0 + i, first + kRun * (lane % 4), {}, kRun == 8 || first + kSecond < out.width};
        float even[kOutputs], odd[kOutputs], sums[kOutputs];
#pragma unroll kAtOnce
        for (int run = 0; run < 4; run++) {
            at.row = row0 + 16 * run + i;
            at.rows[0] = at.row < m, at.rows[1] = at.row + 8 < m;
            const Piece handed = take_piece(from + run * kRunBytes, at);
            Piece x[HALVES];
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                if constexpr (kBackward) {
#pragma unroll
                    for (int r = 0; r < 2; r++)
                        x[half].rows[r] = load_eight_columns(
                            e.h + (static_cast<size_t>(at.row + 8 * r) * HALVES + half) * out.width + at.column,
                            at.rows[r], at.second);
                } else {
                    x[half] = half == 0 ? handed : take_piece(from + run * kRunBytes + kItems * kPieceBytes, at);
                }
            }
            finish_run(e, out, at, handed, x, amax, sums);
            if constexpr (kBackward) {
#pragma unroll
                for (int o = 0; o < kOutputs; o++) {
                    if (run % 2 == 0)
                        even[o] = run == 0 ? sums[o] : even[o] + sums[o];
                    else
                        odd[o] = run == 1 ? sums[o] : odd[o] + sums[o];
                }
            }
        }
        if constexpr (kBackward) {
            if (i >= 4 && !at.second) return;
#pragma unroll
            for (int o = 0; o < kOutputs; o++) {
                const size_t c = o * out.width + at.column + i / 4 * kSecond + i % 4;
                e.partial[static_cast<size_t>(row0 / 64) * HALVES * out.width + c] = even[o] + odd[o];
            }
        }
    };
    work<kItems>(memory, tiles, worker, begin, finish);

    const unsigned most = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(amax));
    if (lane == 0 && e.amax_slot != nullptr && most != 0)
        atomicMax(reinterpret_cast<int*>(e.amax_slot), static_cast<int>(most));
    if (blockIdx.x == 0 && worker == 0 && lane == 0) *e.scale_inv = 1.0f / out.scale;
}

}  // namespace twin
