// multi_cast_transpose: cast_transpose of up to CAPACITY matrices in one launch.
//
// A matrix's amax may be null: none is noted. A block takes one tile; tiles are numbered through all matrices, those of
// matrix i from first_tile on. The table is a kernel argument by value: there is nothing to copy to the device, and a
// CUDA graph captures the launch.
#include "cast_transpose.cuh"

using namespace twin;

struct Entry {
    const wide_t* x;
    const float* scale;
    float* amax;
    unsigned char* q;
    unsigned char* q_t;
    float* scale_inv;
    int rows, cols, first_tile, unused;
};

struct Table {
    Entry matrices[CAPACITY];
};

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    multi_cast_transpose(const __grid_constant__ Table table, int count) {
    // The last matrix whose first tile is not beyond this one.
    int at = 0;
    for (int step = CAPACITY / 2; step > 0; step /= 2)
        if (at + step < count && table.matrices[at + step].first_tile <= static_cast<int>(blockIdx.x)) at += step;
    const Entry& m = table.matrices[at];
    const unsigned tile = blockIdx.x - m.first_tile;
    const unsigned column_tiles = max(1u, (static_cast<unsigned>(m.cols) + kTileCols - 1) / kTileCols);
    const float scale = *m.scale;
    if (tile == 0 && threadIdx.x == 0) *m.scale_inv = 1.0f / scale;
    float amax = 0.0f;
    cast_tile<false>(Matrix{m.x}, m.q, m.q_t, nullptr, m.rows, m.cols, tile / column_tiles, tile % column_tiles, scale,
                     amax);
    if (m.amax != nullptr) commit_amax<kWarps>(amax, m.amax);
}
