// cast_stats_blocks: as cast_stats.cu, where a block of elements has a scale_inv of its own.
//
// x [rows, cols], q as there; scale_inv as cast_blocks.cu writes it (square: of blocks of 128 x 128), `stride` floats from
// row to row.
#include "cast_stats.cuh"

using namespace twin;

extern "C" __global__ void __launch_bounds__(kThreads)
    cast_stats_blocks(const wide_t* __restrict__ x, const unsigned char* __restrict__ q,
                      const float* __restrict__ scale_inv, long long* piece_counts, double* piece_sums, long long count,
                      int cols, int stride, int square) {
    const auto factor_of = [&](long long i) {
        const long long row = i / cols, column = i % cols / 128;
        return static_cast<double>(scale_inv[square ? row / 128 * stride + column : column * stride + row]);
    };
    measure(x, q, factor_of, piece_counts, piece_sums, count);
}
