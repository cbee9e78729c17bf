// cat_cast_transpose_dbias: cast_transpose.cu with DBIAS, of a matrix whose columns lie in up to three tensors
// (side_by_side.cuh).
#include "cast_transpose.cuh"
#include "side_by_side.cuh"
#include "ptx/grid.cuh"

using namespace twin;

struct SideBySide {
    const Parts& parts;

    __device__ __forceinline__ Rows<unsigned> rows(size_t, size_t, int row, int col) const {
        const Parts::Place place = parts.at(row, col);
        return {place.x, place.stride};
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    cat_cast_transpose(const __grid_constant__ Parts parts, const float* __restrict__ scale_slot, float* amax_slot,
                       unsigned char* __restrict__ q, unsigned char* __restrict__ q_t, float* __restrict__ scale_inv,
                       float* __restrict__ partial, int rows, int cols) {
    let_next_grid_start();  // `total`
    cast_matrix<true>(SideBySide{parts}, scale_slot, amax_slot, q, q_t, scale_inv, partial, rows, cols);
}
