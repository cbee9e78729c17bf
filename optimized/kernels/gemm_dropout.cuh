// Behind an FP8 product (EPILOGUE 3): the piece holds x = T(acc * scale);
//
//   out = T( T( dropout( T( x + bias ) ) ) + residual )         kernels/dropout.cu, reference/ops/dropout.py
//
// Each part may be absent. The mask is that of element row * n + column, eight neighbours to a Philox counter. The
// consumers do it, deferred, behind each of the next tile's first k-blocks: the mask of a row half of a piece, or the rest.
// Defines: DROP (0: nothing is dropped).
#pragma once

#include "gemm_piece.cuh"
#include "philox.cuh"

namespace twin {

constexpr int kRows = 2 * kPieces;  // row halves of pieces
constexpr int kUnits = (DROP ? 2 : 1) * kRows;  // the mask of one, and the rest
constexpr int kSteps = STEPS;
static_assert(kUnits % kSteps == 0, "whole units behind each k-block");
constexpr int kAhead = DROP ? 1 : 2;  // row halves from the load of what is read to its use: two k-blocks, since memory takes one

struct Epilogue {
    unsigned short* out;
    const unsigned short* bias;      // null: none
    const unsigned short* residual;  // null: none
    const unsigned long long* rng_state;
    long long threshold;
    double keep_scale;  // an fp32 number
};

// T(value), in fp32.
__device__ __forceinline__ float rounded(float value) { return widen(narrow(value)); }

// A tile that waits, packed, in a consumer's registers.
struct Deferred {
    const Epilogue& e;
    int m, n;
    int row = 0, column = 0;  // of the warp's run, of the tile
    unsigned mask = 0;
    Vector<8> bias = {};         // of the piece that comes next
    Vector<8> residual[kAhead] = {};  // of the row halves that come next

    __device__ __forceinline__ Deferred(const Epilogue& epilogue, int rows, int columns)
        : e(epilogue), m(rows), n(columns) {}

    __device__ __forceinline__ void load_bias(const Tile&) const {}  // here it follows a rounding
    __device__ __forceinline__ void add_bias(float (&)[kAcc]) const {}

    __device__ __forceinline__ Place place(int i) const {
        int r = row + threadIdx.x % 32 / 4;
        asm volatile("" : "+r"(r));  // addresses are computed for each step anew: there is no room to keep them
        const int lane = threadIdx.x % 32, first = column + i / 2 * 32;
        return {r, first + kRun * (lane % 4), {r < m, r + 8 < m}, kRun == 8 || first + kSecond < n};
    }
    __device__ __forceinline__ bool exists(const Place& at, int i) const {
        return column + i / 2 * 32 < n && at.rows[i % 2];
    }
    __device__ __forceinline__ size_t element(const Place& at, int i) const {
        return static_cast<size_t>(at.row + i % 2 * 8) * n + at.column;
    }

    __device__ __forceinline__ Vector<8> load(int i) const {
        const Place at = place(i);
        return load_eight_columns(e.residual + element(at, i), exists(at, i) && e.residual != nullptr, at.second);
    }
    __device__ __forceinline__ Vector<8> load_bias(int piece) const {
        const Place at = place(2 * piece);
        return load_eight_columns(e.bias + at.column, column + piece * 32 < n && e.bias != nullptr, at.second);
    }

    // Which of a row's eight columns are kept, a bit each.
    __device__ __forceinline__ unsigned draw(int i) const {
        const size_t first = element(place(i), i);
        const Generator generator = read_state(e.rng_state);  // from L1 each time, for want of registers
        unsigned words[4], kept_bits = 0;
#pragma unroll
        for (int f = 0; f < 2; f++) {  // four columns: half of a counter's elements
            if (f == 0 || kRun == 4) philox(words, generator, (first + f * kSecond) / 8);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const bool upper = kRun == 8 ? f == 1 : first % 8 != 0;
                const unsigned word = upper ? words[2 + c / 2] : words[c / 2];
                kept_bits |= static_cast<unsigned>(kept(word, c % 2, static_cast<unsigned>(e.threshold))) << (4 * f + c);
            }
        }
        return kept_bits;
    }

    __device__ __forceinline__ void begin(const Tile& tile) {
        row = tile.row + threadIdx.x / 32 * 16;
        column = tile.column;
        bias = load_bias(0);
#pragma unroll
        for (int i = 0; i < kAhead; i++) residual[i] = load(i);
    }

    __device__ __forceinline__ void step(const unsigned (&words)[kAcc / 2], int s) {
#pragma unroll
        for (int unit = s * (kUnits / kSteps); unit < (s + 1) * (kUnits / kSteps); unit++) {
            const int i = unit / (kUnits / kRows);
            if (DROP && unit % 2 == 0) {
                mask = draw(i);
                continue;
            }
            finish_row(i, packed_row(words, i / 2, i % 2), residual[i % kAhead]);
            if (i + kAhead < kRows) residual[i % kAhead] = load(i + kAhead);
            if (i % 2 == 1 && i + 1 < kRows) bias = load_bias(i / 2 + 1);
        }
    }

    // All of a parked tile: with nothing to wait beside, what is read is read at once.
    __device__ __forceinline__ void finish(unsigned char* memory) {
        Vector<8> rows[kRows + kPieces];
#pragma unroll
        for (int i = 0; i < kRows; i++) rows[i] = load(i);
#pragma unroll
        for (int i = 0; i < kPieces; i++) rows[kRows + i] = load_bias(i);
#pragma unroll
        for (int i = 0; i < kRows + kPieces; i++) park_row(memory, kRows + i, rows[i]);
#pragma unroll 1
        for (int piece = 0; piece < kPieces; piece++) {
            bias = parked_row(memory, 2 * kRows + piece);
#pragma unroll
            for (int i = 2 * piece; i < 2 * piece + 2; i++) {
                if (DROP) mask = draw(i);
                finish_row(i, parked_row(memory, i), parked_row(memory, kRows + i));
            }
        }
    }

    __device__ __forceinline__ void finish_row(int i, const Vector<8>& packed, const Vector<8>& added) const {
        const Place at = place(i);
        if (!exists(at, i)) return;
        const Vector<8> x = existing(packed, i % 2, at);
        float t[8];
#pragma unroll
        for (int c = 0; c < 8; c++) {
            t[c] = widen(x, c);
            if (e.bias != nullptr) t[c] = rounded(t[c] + widen(bias, c));
            if (DROP) t[c] = mask >> c & 1 ? rounded(__fmul_rn(t[c], static_cast<float>(e.keep_scale))) : 0.0f;
        }
        unsigned out[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (e.residual != nullptr)
                t[2 * j] += widen(added, 2 * j), t[2 * j + 1] += widen(added, 2 * j + 1);
            out[j] = pack<OUT>(t[2 * j], t[2 * j + 1]);
        }
        store_eight_columns(e.out + element(at, i), out, at.second);
    }

    __device__ __forceinline__ void end() const {}
};

}  // namespace twin
