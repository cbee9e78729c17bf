// Behind an FP8 product (EPILOGUE 3): the piece holds x = T(acc * scale);
//
//   out = T( T( dropout( T( x + bias ) ) ) + residual )         kernels/dropout.cu, reference/ops/dropout.py
//
// Each part may be absent. The mask is that of element row * n + column, eight neighbours to a Philox counter.
#pragma once

#include "gemm_handoff.cuh"
#include "philox.cuh"

namespace twin {

constexpr int kItems = kPieces;

struct Epilogue {
    unsigned short* out;
    const unsigned short* bias;      // null: none
    const unsigned short* residual;  // null: none
    const unsigned long long* rng_state;
    long long threshold;  // 0: nothing is dropped
    double keep_scale;    // an fp32 number
};

// T(value), in fp32.
__device__ __forceinline__ float rounded(float value) { return widen(narrow(value)); }

// A lane's eight columns of a row: `first` is the element index of the first of them.
__device__ __forceinline__ void drop(float (&t)[8], const Epilogue& e, const Generator& generator, size_t first) {
    unsigned words[2][4];
    philox(words[0], generator, first / 8);
    if constexpr (kRun == 4) philox(words[1], generator, (first + kSecond) / 8);
#pragma unroll
    for (int c = 0; c < 8; c++) {
        unsigned word = words[0][c / 2];
        if constexpr (kRun == 4) {  // four elements of each of two counters: the lower or the upper ones
            const unsigned(&w)[4] = words[c / 4];
            word = first % 8 == 0 ? w[c % 4 / 2] : w[2 + c % 4 / 2];
        }
        const float scaled = rounded(__fmul_rn(t[c], static_cast<float>(e.keep_scale)));
        t[c] = kept(word, c % 2, static_cast<unsigned>(e.threshold)) ? scaled : 0.0f;
    }
}

// What the three warps do.
__device__ __forceinline__ void finish_tiles(const Epilogue& e, const unsigned char* memory, const Tiles& tiles, int m,
                                             int n) {
    const int lane = threadIdx.x % 32, worker = threadIdx.x / 32 - 4 * WARPGROUPS - 1;
    Generator generator = {};
    if (e.threshold > 0) generator = read_state(e.rng_state);

    const auto begin = [&](const Tile& tile) {
        if (e.residual != nullptr)
            prefetch_tile(e.residual, worker, tile, tile.column, min(kTileN, n - tile.column), m, n);
    };
    const auto finish = [&](const Tile& tile, int warpgroup, int piece, const unsigned char* from) {
        const int first = tile.column + 32 * piece, column = first + kRun * (lane % 4);
        const int row0 = tile.row + 64 * warpgroup;
        if (first >= n || row0 >= m) return;
        const bool second = kRun == 8 || first + kSecond < n;
        const Vector<8> bias = load_eight_columns(e.bias + column, e.bias != nullptr, second);
#pragma unroll 1
        for (int run = 0; run < 4; run++) {
            const int row = row0 + 16 * run + lane / 4;
            const Place at = {row, column, {row < m, row + 8 < m}, second};
            const Piece x = take_piece(from + run * kRunBytes, at);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (!at.rows[r]) continue;
                const size_t element = static_cast<size_t>(row + 8 * r) * n + column;
                const Vector<8> residual = load_eight_columns(e.residual + element, e.residual != nullptr, second);
                float t[8];
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    t[c] = widen(x.rows[r], c);
                    if (e.bias != nullptr) t[c] = rounded(t[c] + widen(bias, c));
                }
                if (e.threshold > 0) drop(t, e, generator, element);
                unsigned words[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (e.residual != nullptr) t[2 * j] += widen(residual, 2 * j), t[2 * j + 1] += widen(residual, 2 * j + 1);
                    words[j] = pack<OUT>(t[2 * j], t[2 * j + 1]);
                }
                store_eight_columns(e.out + element, words, second);
            }
        }
    };
    work<kItems>(memory, tiles, worker, begin, finish);
}

}  // namespace twin
