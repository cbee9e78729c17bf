// Behind an FP8 product: an activation (EPILOGUE 1) or its backward (EPILOGUE 2), to FP8 with the transposed copy.
//
//   1: a piece holds h = T(acc * scale + bias), which is kept;  v = y [m, n] of h                  (activation.cuh)
//   2: a piece holds dact = T(acc * scale), gradient of y;      v = dh of dact and h; partial sums of 64 rows of v
//   q = v in FP8, q_t its transpose [columns, ceil16(m)], amax  (quantize.cuh, reference/ops/cast_transpose.py)
//
// h and dh have twice y's columns where the kind is gated. 1 is done by the consumers, deferred: four columns of a row
// half of a piece, or a few such units, behind each of the next tile's first k-blocks. 2 is done by the workers of
// gemm_handoff.cuh, 64 rows of a piece at a time, so that the order of the sums (row_sum.cuh) needs no other warp.
//
// Defines: EPILOGUE, KIND (activation.cuh), FP8 (quantize.cuh).
#pragma once

#include "activation.cuh"
#include "gemm_piece.cuh"
#include "quantize.cuh"
#include "transpose.cuh"
#if EPILOGUE == 2
#include "gemm_handoff.cuh"
#else
#include "gemm_bias.cuh"
#endif

namespace twin {

constexpr bool kBackward = EPILOGUE == 2;
constexpr int kOutputs = kBackward ? HALVES : 1;  // values made of an element (pair)
constexpr int kItems = kPieces / kHalves;         // of a tile's pieces; x1 and x2 of a gated one are one item
constexpr int kSteps = STEPS;
constexpr int kUnits = 4 * kItems;  // four columns of a row half of an item
static_assert(kBackward || kUnits % kSteps == 0, "whole units behind each k-block");
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

// What of a problem the finishing needs. `width` is the number of y's columns.
struct Problem {
    int m, width;
    float scale;

    __device__ __forceinline__ Problem(const Epilogue& e, int rows, int columns)
        : m(rows), width(columns), scale(*e.scale_slot) {}

    // The lane's part of a piece; `column` is the piece's first.
    __device__ __forceinline__ Place place(int run_row, int column) const {
        const int lane = threadIdx.x % 32;
        int row = run_row + lane / 4;
        asm volatile("" : "+r"(row));  // addresses are computed each time anew: there is no room to keep them
        return {row, column + kRun * (lane % 4), {row < m, row + 8 < m}, kRun == 8 || column + kSecond < width};
    }

    // Of q_t's columns those that a lane has after transpose_run.
    __device__ __forceinline__ int own_column(const Place& at) const {
        const int i = threadIdx.x % 32 / 4;
        return at.column + i / 4 * kSecond + i % 4;
    }
    __device__ __forceinline__ bool owns(const Place& at) const { return threadIdx.x % 32 < 16 || at.second; }
};

// Four columns of a row half: v, its amax, its codes, and to `sums` (2) v of row i, or that of rows i and i + 8.
__device__ __forceinline__ void finish_four(const Problem& problem, const Place& at, int r, int f, const Vector<4>& dact,
                                            const Vector<8> (&x)[HALVES], float& amax,
                                            unsigned (&codes)[kOutputs][2][2], float (&sums)[kOutputs][8]) {
    float v[kOutputs][4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int i = 4 * f + c;
        float value[kOutputs];
        evaluate(widen(dact, c), widen(x[0], i), widen(x[HALVES - 1], i), value);
#pragma unroll
        for (int o = 0; o < kOutputs; o++) {
            v[o][c] = value[o];
            amax = amax_of(amax, value[o]);
            if constexpr (kBackward) sums[o][i] = r == 0 ? value[o] : sums[o][i] + value[o];
        }
    }
#pragma unroll
    for (int o = 0; o < kOutputs; o++) {
        const unsigned code =
            quantize2(v[o][0], v[o][1], problem.scale) | quantize2(v[o][2], v[o][3], problem.scale) << 16;
        codes[o][r][f] = at.rows[r] ? code : 0;  // not left to 0 * scale, which is NaN if scale is infinite
    }
}

// At the end of the block, by each warp.
__device__ __forceinline__ void commit(const Epilogue& e, float scale, float amax) {
    const unsigned most = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(amax));
    if (threadIdx.x % 32 == 0 && e.amax_slot != nullptr && most != 0)
        atomicMax(reinterpret_cast<int*>(e.amax_slot), static_cast<int>(most));
    if (blockIdx.x == 0) *e.scale_inv = 1.0f / scale;
}

#if EPILOGUE == 1

__device__ __forceinline__ int bias_type(const Epilogue& e) { return static_cast<int>(e.bias_type); }

// What the consumers are given, by the warps that have nothing to copy.
__device__ __forceinline__ void init_given(unsigned shared) { init_bias(shared); }
__device__ __forceinline__ void give(const Epilogue& e, unsigned char* memory, const Tiles& tiles, int n) {
    if (threadIdx.x / 32 % 4 != 3) return;
    unsigned parity = 0;
    for (int index = tiles.first(); index < tiles.count(); index = tiles.next(index), parity ^= 1)
        give_bias(memory, tiles[index], e.bias, bias_type(e), n, parity);
}

// A tile that waits, packed, in a consumer's registers.
struct Deferred {
    const Epilogue& e;
    Problem problem;
    int row = 0, column = 0;  // of the warp's run, of the tile
    unsigned short* h;        // the lane's first place in the outputs
    unsigned char *q, *q_t;
    float amax = 0.0f;
    unsigned codes[kOutputs][2][2];  // of an item, from its first unit to its last
    unsigned char* memory;
    unsigned parity = 0;  // of the bias

    __device__ __forceinline__ Deferred(const Epilogue& epilogue, unsigned char* shared_memory, int m, int n)
        : e(epilogue), problem(epilogue, m, n / kHalves), memory(shared_memory) {}

    // The bias, which is the product's.
    __device__ __forceinline__ void add(float (&acc)[kAcc]) {
        if (bias_type(e) != kNoBias) add_bias(acc, memory, parity);
        parity ^= 1;
    }

    // Uniform, or behind a branch that might part a warp the compiler would compute what wgmma needs lane by lane.
    __device__ __forceinline__ void begin(const Tile& tile) {
        row = uniform(tile.row + threadIdx.x / 32 * 16);
        column = uniform(tile.column);
        const Place at = problem.place(row, column);
        h = e.h + static_cast<size_t>(at.row) * HALVES * problem.width + at.column;
        q = e.q + static_cast<size_t>(at.row) * problem.width + at.column;
        q_t = e.q_t + problem.own_column(at) * rows_t() + row;
    }

    __device__ __forceinline__ void step(const unsigned (&words)[kAcc / 2], int s) {
#pragma unroll
        for (int unit = s * (kUnits / kSteps); unit < (s + 1) * (kUnits / kSteps); unit++)
            finish_unit(unit / 4, unit / 2 % 2, unit % 2, [&](int piece, int r) { return packed_row(words, piece, r); });
    }

    // All of a parked tile.
    __device__ __forceinline__ void finish() {
#pragma unroll 1
        for (int item = 0; item < kItems; item++)
#pragma unroll
            for (int unit = 0; unit < 4; unit++)
                finish_unit(item, unit / 2, unit % 2, [&](int piece, int r) { return parked_row(memory, 2 * piece + r); });
    }

    // Four columns, the first or the other four, of row half r of an item.
    template <class Row>
    __device__ __forceinline__ void finish_unit(int item, int r, int f, const Row& packed) {
        if (row >= problem.m || column + 32 * item >= problem.width) return;
        const Place at = problem.place(row, column + 32 * item);
        Vector<8> x[HALVES];
#pragma unroll
        for (int half = 0; half < HALVES; half++) x[half] = existing(packed(item + half * kItems, r), r, at);
        float none[kOutputs][8];
        finish_four(problem, at, r, f, {}, x, amax, codes, none);
        const size_t rows = 8 * r, columns = 32 * item;  // from the lane's first place
        if (f == 0 && at.rows[r]) {
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                store_eight_columns(h + (rows * HALVES + half) * problem.width + columns, x[half].words, at.second);
        }
        if (f == 1 && at.rows[r]) store_eight_columns(q + rows * problem.width + columns, codes[0][r], at.second);
        if (f == 1 && r == 1) {
            const uint4 run = transpose_run(codes[0]);
            if (problem.owns(at)) *reinterpret_cast<uint4*>(q_t + columns * rows_t()) = run;
        }
    }

    // Of q_t's rows, bytes.
    __device__ __forceinline__ size_t rows_t() const { return (problem.m + 15) / 16 * 16; }

    __device__ __forceinline__ void end() const { commit(e, problem.scale, amax); }
};

#else

// A row half's codes to q.
__device__ __forceinline__ void store_row(const Epilogue& e, const Problem& problem, const Place& at, int r,
                                          const unsigned (&codes)[kOutputs][2][2]) {
    if (!at.rows[r]) return;
#pragma unroll
    for (int o = 0; o < kOutputs; o++)
        store_eight_columns(e.q + (static_cast<size_t>(at.row + 8 * r) * kOutputs + o) * problem.width + at.column,
                            codes[o][r], at.second);
}

// Both row halves' codes to q_t.
__device__ __forceinline__ void store_columns(const Epilogue& e, const Problem& problem, const Place& at,
                                               const unsigned (&codes)[kOutputs][2][2]) {
    const int first = at.row - threadIdx.x % 32 / 4;  // of the run
#pragma unroll
    for (int o = 0; o < kOutputs; o++) {
        const uint4 column = transpose_run(codes[o]);
        const size_t c = static_cast<size_t>(o) * problem.width + problem.own_column(at);
        if (first < problem.m && problem.owns(at))
            *reinterpret_cast<uint4*>(e.q_t + c * ((problem.m + 15) / 16 * 16) + first) = column;
    }
}

// What the workers do.
__device__ __forceinline__ void finish_tiles(const Epilogue& e, const unsigned char* memory, const Tiles& tiles, int m,
                                             int n) {
    const Problem problem(e, m, n);
    float amax = 0.0f;
    const auto finish = [&](const Tile& tile, int warpgroup, int piece, const unsigned char* from) {
        const int column = tile.column + 32 * piece, row0 = tile.row + 64 * warpgroup;
        if (column >= n || row0 >= m) return;
        float even[kOutputs], odd[kOutputs];
        const auto load = [&](const Place& at, int r, Vector<8>(&x)[HALVES]) {
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                x[half] = load_eight_columns(
                    e.h + (static_cast<size_t>(at.row + 8 * r) * HALVES + half) * n + at.column, at.rows[r], at.second);
        };
        // x is loaded a run ahead; at the head of the run where there is too much of it for the registers.
        Vector<8> x[2][HALVES];
#pragma unroll
        for (int r = 0; r < 2 && !GATED; r++) load(problem.place(row0, column), r, x[r]);
#pragma unroll GATED ? 1 : 2
        for (int run = 0; run < 4; run++) {
            const Place at = problem.place(row0 + 16 * run, column);
            unsigned codes[kOutputs][2][2];
            float sums[kOutputs][8];
#pragma unroll
            for (int r = 0; r < 2 && GATED; r++) load(at, r, x[r]);
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const int r = part % 2, f = part / 2;
                const Vector<4> dact = handed_four(from + run * kRunBytes, r, f, at);
                finish_four(problem, at, r, f, dact, x[r], amax, codes, sums);
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (run < 3 && !GATED) load(problem.place(row0 + 16 * (run + 1), column), r, x[r]);
                store_row(e, problem, at, r, codes);
            }
            store_columns(e, problem, at, codes);
#pragma unroll
            for (int o = 0; o < kOutputs; o++) {
                const float sum = sum_run(sums[o]);
                if (run % 2 == 0)
                    even[o] = run == 0 ? sum : even[o] + sum;
                else
                    odd[o] = run == 1 ? sum : odd[o] + sum;
            }
        }
        const Place at = problem.place(row0, column);
        if (!problem.owns(at)) return;
#pragma unroll
        for (int o = 0; o < kOutputs; o++)
            e.partial[(static_cast<size_t>(row0 / 64) * HALVES + o) * n + problem.own_column(at)] = even[o] + odd[o];
    };
    work(memory, tiles, finish);
    commit(e, problem.scale, amax);
}

#endif

}  // namespace twin
