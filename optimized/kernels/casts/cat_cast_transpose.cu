// cat_cast_transpose_dbias: cast_transpose.cu with DBIAS, of a matrix whose columns lie in up to three tensors.
//
//     x[r, g * width + c] = part[i].x[r, g * part[i].width + c - part[i].first]   part i holds column c of a group
//
// part[i].x [rows, groups * part[i].width], a part's width a multiple of 8; all else as in cast_transpose.cu.
#include "cast_transpose.cuh"
#include "ptx/grid.cuh"

using namespace twin;

struct Part {
    const wide_t* x;
    int first, width;  // columns of a group
};

struct Parts {
    Part part[3];  // an unused one begins after a group's last column
    int groups, width;

    __device__ __forceinline__ Rows<unsigned> rows(size_t, size_t, int row, int col) const {
        const int group = col / width, within = col % width;
        const Part& p = part[(within >= part[1].first) + (within >= part[2].first)];
        const unsigned stride = groups * p.width;
        return {p.x + static_cast<size_t>(row) * stride + group * p.width + within - p.first, stride};
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    cat_cast_transpose(const __grid_constant__ Parts parts, const float* __restrict__ scale_slot, float* amax_slot,
                       unsigned char* __restrict__ q, unsigned char* __restrict__ q_t, float* __restrict__ scale_inv,
                       float* __restrict__ partial, int rows, int cols) {
    let_next_grid_start();  // `total`
    cast_matrix<true>(parts, scale_slot, amax_slot, q, q_t, scale_inv, partial, rows, cols);
}
