// Behind an FP8 product (EPILOGUE 3): the piece holds x = T(acc * scale);
//
//   out = T( T( dropout( T( x + bias ) ) ) + residual )         kernels/dropout.cu, reference/ops/dropout.py
//
// Each part may be absent. The mask is that of element row * n + column, eight neighbours to a Philox counter. The
// consumers do it, deferred, behind each of the next tile's first k-blocks: the mask of a row half of a piece, or the rest.
// Defines: DROP (0: nothing is dropped).
#pragma once

#include "gemm_bias.cuh"
#include "gemm_piece.cuh"
#include "philox.cuh"
#include "ptx/add.cuh"

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
    float keep_scale;
};

__device__ __forceinline__ int bias_type(const Epilogue& e) { return e.bias == nullptr ? kNoBias : WIDE; }

// Sums of two T, of two columns. Rounded once they are those in fp32 rounded to T: fp32 holds a sum exactly, or the
// smaller addend is less than half of what parts the greater from its neighbours, and both give the greater.
__device__ __forceinline__ unsigned add_two(unsigned a, unsigned b) {
    if constexpr (same_type<OUT, BF16>) return add_bf16x2(a, b);
    return add_f16x2(a, b);
}

// A tile that waits, packed, in a consumer's registers.
struct Deferred {
    const Epilogue& e;
    int m, n;
    int row = 0, column = 0;  // of the warp's run, of the tile
    size_t first = 0;         // the lane's first element
    unsigned mask = 0;
    Generator generator;
    Vector<8> residual[kAhead] = {};  // of the row halves that come next
    unsigned char* memory;
    unsigned parity = 1;  // of the bias

    __device__ __forceinline__ Deferred(const Epilogue& epilogue, unsigned char* shared_memory, int rows, int columns)
        : e(epilogue), m(rows), n(columns), memory(shared_memory) {
        if (DROP) generator = read_state(e.rng_state);
    }

    __device__ __forceinline__ void add(float (&)[kAcc]) const {}  // here the bias follows a rounding

    __device__ __forceinline__ Place place(int i) const {
        int r = row + threadIdx.x % 32 / 4;
        asm volatile("" : "+r"(r));  // addresses are computed for each step anew: there is no room to keep them
        const int lane = threadIdx.x % 32, first = column + i / 2 * 32;
        return {r, first + kRun * (lane % 4), {r < m, r + 8 < m}, kRun == 8 || first + kSecond < n};
    }
    __device__ __forceinline__ bool exists(const Place& at, int i) const {
        return column + i / 2 * 32 < n && at.rows[i % 2];
    }
    __device__ __forceinline__ size_t element(int i) const {
        return first + i % 2 * 8 * static_cast<size_t>(n) + i / 2 * 32;
    }

    __device__ __forceinline__ Vector<8> load(int i) const {
        const Place at = place(i);
        return load_eight_columns(e.residual + element(i), exists(at, i) && e.residual != nullptr, at.second);
    }

    // Which of a row's eight columns are kept, a bit each.
    __device__ __forceinline__ unsigned draw(int i) const {
        const size_t first = element(i);
        unsigned words[4], kept_bits = 0;
#pragma unroll
        for (int f = 0; f < 2; f++) {  // four columns: half of a counter's elements
            if (f == 0 || kRun == 4) philox<true>(words, generator, (first + f * kSecond) / 8);
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
        const Place at = place(0);
        first = static_cast<size_t>(at.row) * n + at.column;
        parity ^= 1;
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
            if (i == 0 && e.bias != nullptr) wait_for_bias(memory, parity);
            finish_row(i, packed_row(words, i / 2, i % 2), residual[i % kAhead]);
            if (i + kAhead < kRows) residual[i % kAhead] = load(i + kAhead);
            if (i + 1 == kRows && e.bias != nullptr) release_bias(memory);
        }
    }

    // All of a parked tile: with nothing to wait beside, what is read is read at once.
    __device__ __forceinline__ void finish() {
        Vector<8> rows[kRows];
#pragma unroll
        for (int i = 0; i < kRows; i++) rows[i] = load(i);
#pragma unroll
        for (int i = 0; i < kRows; i++) park_row(memory, kRows + i, rows[i]);
        if (e.bias != nullptr) wait_for_bias(memory, parity);
#pragma unroll 1
        for (int piece = 0; piece < kPieces; piece++) {
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
        Vector<8> bias;
#pragma unroll
        for (int f = 0; f < 2; f++)
            reinterpret_cast<Four*>(bias.words)[f] =
                given_four(memory, i / 2 * 32 + threadIdx.x % 4 * kRun + f * kSecond);
        unsigned out[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {  // two values at a time: rounding one alone is eight times as slow
            unsigned two = x.words[j];
            if (e.bias != nullptr) two = add_two(two, bias.words[j]);
            if (DROP) {
                const Vector<2> t = {two};
                two = pack<OUT>(mask >> 2 * j & 1 ? __fmul_rn(widen(t, 0), e.keep_scale) : 0.0f,
                                mask >> 2 * j & 2 ? __fmul_rn(widen(t, 1), e.keep_scale) : 0.0f);
            }
            if (e.residual != nullptr) two = add_two(two, added.words[j]);
            out[j] = two;
        }
        store_eight_columns(e.out + element(i), out, at.second);
    }

    __device__ __forceinline__ void end() const {}
};

}  // namespace twin
