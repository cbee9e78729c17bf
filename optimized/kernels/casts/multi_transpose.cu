// multi_transpose: up to CAPACITY matrices of bytes, transposed, in one launch.
//
//     q_t[c, r] = q[r, c]       q [rows, cols], q_t [cols, rows]; rows and cols multiples of 16, both at such addresses
//
// Bound by memory: 2 bytes an element. A thread owns 16 rows of 16 columns: it has all of its loads in flight at once,
// transposes in registers, and puts columns into shared memory, from which lines of up to 256 bytes are stored. A warp
// takes 4 runs of 16 rows by 8 groups of 16 columns: it reads 128 bytes of a row. Four warps make a tile of 256 rows.
#include "common/transpose.cuh"

using namespace twin;

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRun = 16;                        // rows, and columns, of a thread
constexpr int kGroups = 8, kRuns = 4 * kWarps;  // of a tile
constexpr int kRows = kRuns * kRun, kCols = kGroups * kRun;

struct Entry {
    const unsigned char* q;
    unsigned char* q_t;
    int rows, cols, first_tile, unused;
};

struct Table {
    Entry matrices[CAPACITY];
};

// Neighbouring groups put the same run into different banks.
__device__ __forceinline__ int swizzled(int run, int group) { return run ^ group; }

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    multi_transpose(const __grid_constant__ Table table, int count) {
    __shared__ uint4 columns[kRun][kGroups][kRuns];  // [column of a group][group][swizzled(run, group)]: 16 rows
    // The last matrix whose first tile is not beyond this one.
    int at = 0;
    for (int step = CAPACITY / 2; step > 0; step /= 2)
        if (at + step < count && table.matrices[at + step].first_tile <= static_cast<int>(blockIdx.x)) at += step;
    const Entry& m = table.matrices[at];
    const unsigned tile = blockIdx.x - m.first_tile;
    const unsigned across = (static_cast<unsigned>(m.cols) + kCols - 1) / kCols;
    const int first_row = tile / across * kRows, first_col = tile % across * kCols;
    const size_t cols = static_cast<unsigned>(m.cols), rows = static_cast<unsigned>(m.rows);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int run = warp * 4 + lane / kGroups, group = lane % kGroups;
    const int row = first_row + run * kRun, col = first_col + group * kRun;
    if (row < m.rows && col < m.cols) {
        const unsigned char* q = m.q + row * cols + col;
        uint4 v[kRun];
#pragma unroll
        for (int r = 0; r < kRun; r++) v[r] = *reinterpret_cast<const uint4*>(q + r * cols);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            unsigned found[4][4];  // [group of four rows][column]
#pragma unroll
            for (int g = 0; g < 4; g++) {
                unsigned words[4];
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const uint4& from = v[4 * g + r];
                    words[r] = w == 0 ? from.x : w == 1 ? from.y : w == 2 ? from.z : from.w;
                }
                transpose4(words[0], words[1], words[2], words[3], found[g]);
            }
#pragma unroll
            for (int c = 0; c < 4; c++)
                columns[4 * w + c][group][swizzled(run, group)] =
                    make_uint4(found[0][c], found[1][c], found[2][c], found[3][c]);
        }
    }
    __syncthreads();

    // Sixteen threads write 256 bytes of a row of q_t.
    const int to_run = threadIdx.x % kRuns, first = threadIdx.x / kRuns;
    const int to_row = first_row + to_run * kRun;
    if (to_row >= m.rows) return;
#pragma unroll
    for (int one = 0; one < kCols; one += kThreads / kRuns) {
        const int within = one + first, of_group = within / kRun, c = within % kRun;
        if (first_col + within < m.cols)
            *reinterpret_cast<uint4*>(m.q_t + (first_col + within) * rows + to_row) =
                columns[c][of_group][swizzled(to_run, of_group)];
    }
}
