// Behind an FP8 product (EPILOGUE 3): the piece holds x = T(acc * scale);
//
//   out = T( T( dropout( T( x + bias ) ) ) + residual )         kernels/dropout.cu, reference/ops/dropout.py
//
// Each part may be absent. The mask is that of element row * n + column, eight neighbours to a Philox counter. The
// consumers do it, deferred: a row half of a piece at a time, spread over the next tile's k-blocks. Mask, bias and
// residual are given to them (gemm_mask.cuh, gemm_bias.cuh, gemm_residual.cuh).
// Defines: DROP (0: nothing is dropped).
#pragma once

#include "gemm_residual.cuh"
#include "ptx/add.cuh"

namespace twin {

constexpr int kRows = 2 * kPieces;  // row halves of pieces
constexpr int kSteps = STEPS;
static_assert(kRows % kSteps == 0, "whole units behind each k-block");

struct Epilogue {
    CUtensorMap residual_map;
    unsigned short* out;
    const unsigned short* bias;      // null: none
    const unsigned short* residual;  // null: none
    const unsigned long long* rng_state;
    long long threshold;
    float keep_scale;
};

// What the consumers are given, by the warps that have nothing to copy.
__device__ __forceinline__ void init_given(unsigned shared) {
    init_bias(shared);
    init_mask(shared);
    init_residual(shared);
}
__device__ __forceinline__ void give(const Epilogue& e, unsigned char* memory, const Tiles& tiles, int n) {
    unsigned parity = 0;
    for (int index = tiles.first(); index < tiles.count(); index = tiles.next(index), parity ^= 1) {
        const Tile tile = tiles[index];
        if (DROP) draw_mask(memory, tile, read_state(e.rng_state), static_cast<unsigned>(e.threshold), n, parity);
        if (threadIdx.x / 32 % 4 == 3) give_bias(memory, tile, e.bias, e.bias == nullptr ? kNoBias : WIDE, n, parity);
    }
}

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
    unsigned mask[kMaskWords];
    unsigned char* memory;
    Residual residual;
    unsigned parity = 1;  // of what is given

    __device__ __forceinline__ Deferred(const Epilogue& epilogue, unsigned char* shared_memory, int rows, int columns)
        : e(epilogue),
          m(rows),
          n(columns),
          memory(shared_memory),
          residual{shared_address(memory), uniform(threadIdx.x / 32)} {}

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

    __device__ __forceinline__ void begin(const Tile& tile) {
        row = uniform(tile.row + threadIdx.x / 32 * 16);
        column = uniform(tile.column);
        const Place at = place(0);
        first = static_cast<size_t>(at.row) * n + at.column;
        parity ^= 1;
        for (int piece = 0; piece < kBoxes; piece++) fetch(piece);
    }

    __device__ __forceinline__ void fetch(int piece) const {
        if (e.residual != nullptr && piece < kPieces) residual.fetch(&e.residual_map, piece, row, column + 32 * piece);
    }

    // The bias and the mask, of which the mask is taken at once, so that the next tile's can be drawn.
    __device__ __forceinline__ void wait() {
        if (e.bias != nullptr) wait_for_bias(memory, parity);
        if constexpr (DROP) {
            wait_for_mask(memory, parity);
#pragma unroll
            for (int i = 0; i < kMaskWords; i++) mask[i] = mask_word(memory, i, threadIdx.x);
            release_mask(memory);
        }
    }

    __device__ __forceinline__ void step(const unsigned (&words)[kAcc / 2], int s) {
#pragma unroll
        for (int i = s * (kRows / kSteps); i < (s + 1) * (kRows / kSteps); i++) {
            if (i == 0) wait();
            finish_row(i, packed_row(words, i / 2, i % 2), mask[i / 4]);
            if (i + 1 == kRows && e.bias != nullptr) release_bias(memory);
        }
    }

    // All of a parked tile.
    __device__ __forceinline__ void finish() {
        wait();
#pragma unroll 1
        for (int piece = 0; piece < kPieces; piece++) {
            const unsigned bits = DROP ? mask_word(memory, piece / 2, threadIdx.x) : 0;  // no tile follows
#pragma unroll
            for (int i = 2 * piece; i < 2 * piece + 2; i++) finish_row(i, parked_row(memory, i), bits);
        }
    }

    __device__ __forceinline__ void finish_row(int i, const Vector<8>& packed, unsigned bits) {
        if (e.residual != nullptr && i % 2 == 0) residual.wait(i / 2, parity);
        store_row(i, packed, bits);
        if (i % 2 == 0) return;
        __syncwarp();  // the box has been read
        fetch(i / 2 + kBoxes);
    }

    __device__ __forceinline__ void store_row(int i, const Vector<8>& packed, unsigned bits) const {
        const Place at = place(i);
        if (!exists(at, i)) return;
        const Vector<8> x = existing(packed, i % 2, at);
        Vector<8> bias;
#pragma unroll
        for (int f = 0; f < 2; f++)
            reinterpret_cast<Four*>(bias.words)[f] =
                given_four(memory, i / 2 * 32 + threadIdx.x % 4 * kRun + f * kSecond);
        const Vector<8> added = residual.row(memory, i / 2, i % 2);
        unsigned out[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {  // two values at a time: rounding one alone is eight times as slow
            unsigned two = x.words[j];
            if (e.bias != nullptr) two = add_two(two, bias.words[j]);
            if constexpr (DROP) {
                const Vector<2> t = {two};
                two = pack<OUT>(__fmul_rn(widen(t, 0), e.keep_scale), __fmul_rn(widen(t, 1), e.keep_scale));
                two &= kept_two(bits << i % 4 * 4, j);
            }
            if (e.residual != nullptr) two = add_two(two, added.words[j]);
            out[j] = two;
        }
        store_eight_columns(e.out + element(i), out, at.second);
    }

    __device__ __forceinline__ void end() const {}
};

}  // namespace twin
