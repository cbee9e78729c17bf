// Behind an FP8 product (EPILOGUE 3): the piece holds x = T(acc * scale);
//
//   out = T( T( dropout( T( x + bias ) ) ) + residual )         kernels/dropout.cu, reference/ops/dropout.py
//
// Each part may be absent. The mask is that of element row * n + column, eight neighbours to a Philox counter. The
// consumers do it, deferred: a step behind each of the next tile's k-blocks is a row half of a piece.
#pragma once

#include "gemm_piece.cuh"
#include "philox.cuh"

namespace twin {

constexpr int kSteps = 2 * kPieces;

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
__device__ __forceinline__ void drop(float (&t)[8], const Epilogue& e, size_t first) {
    const Generator generator = read_state(e.rng_state);  // from L1 each time, for want of registers
    unsigned words[4];
#pragma unroll
    for (int f = 0; f < 2; f++) {  // four columns: half of a counter's elements
        if (f == 0 || kRun == 4) philox(words, generator, (first + f * kSecond) / 8);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const bool upper = kRun == 8 ? f == 1 : first % 8 != 0;
            float& x = t[4 * f + c];
            const float scaled = rounded(__fmul_rn(x, static_cast<float>(e.keep_scale)));
            const unsigned word = upper ? words[2 + c / 2] : words[c / 2];
            x = kept(word, c % 2, static_cast<unsigned>(e.threshold)) ? scaled : 0.0f;
        }
    }
}

// A tile that waits, packed, in a consumer's registers.
struct Deferred {
    const Epilogue& e;
    int m, n;
    int row = 0, column = 0;  // of the warp's run, of the tile
    Vector<8> bias = {}, residual = {};  // of the step that comes next

    __device__ __forceinline__ Deferred(const Epilogue& epilogue, int rows, int columns)
        : e(epilogue), m(rows), n(columns) {}

    __device__ __forceinline__ Place place(int s) const {
        int r = row + threadIdx.x % 32 / 4;
        asm volatile("" : "+r"(r));  // addresses are computed for each step anew: there is no room to keep them
        const int lane = threadIdx.x % 32, first = column + s / 2 * 32;
        return {r, first + kRun * (lane % 4), {r < m, r + 8 < m}, kRun == 8 || first + kSecond < n};
    }

    // What step s reads, behind the step before it: memory takes about as long as a k-block.
    __device__ __forceinline__ void load(int s) {
        const Place at = place(s);
        const bool exists = column + s / 2 * 32 < n && at.rows[s % 2];
        const size_t element = static_cast<size_t>(at.row + s % 2 * 8) * n + at.column;
        residual = load_eight_columns(e.residual + element, exists && e.residual != nullptr, at.second);
        if (s % 2 == 0) bias = load_eight_columns(e.bias + at.column, exists && e.bias != nullptr, at.second);
    }

    __device__ __forceinline__ void begin(const Tile& tile) {
        row = tile.row + threadIdx.x / 32 * 16;
        column = tile.column;
        load(0);
    }

    __device__ __forceinline__ void step(const unsigned (&words)[kAcc / 2], int s) {
        const Place at = place(s);
        if (column + s / 2 * 32 < n && at.rows[s % 2]) finish(words, s, at);
        if (s + 1 < kSteps) load(s + 1);
    }

    __device__ __forceinline__ void finish(const unsigned (&words)[kAcc / 2], int s, const Place& at) const {
        const Vector<8> x = packed_row(words, s / 2, s % 2, at);
        const size_t element = static_cast<size_t>(at.row + s % 2 * 8) * n + at.column;
        float t[8];
#pragma unroll
        for (int c = 0; c < 8; c++) {
            t[c] = widen(x, c);
            if (e.bias != nullptr) t[c] = rounded(t[c] + widen(bias, c));
        }
        if (e.threshold > 0) drop(t, e, element);
        unsigned out[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (e.residual != nullptr) t[2 * j] += widen(residual, 2 * j), t[2 * j + 1] += widen(residual, 2 * j + 1);
            out[j] = pack<OUT>(t[2 * j], t[2 * j + 1]);
        }
        store_eight_columns(e.out + element, out, at.second);
    }

    __device__ __forceinline__ void end() const {}
};

}  // namespace twin
