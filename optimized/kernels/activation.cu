// activation: y = act(x) or act(x1) * x2, and its backward, each rounded once to the type of x.
//
//     forward    x [rows, n] -> y [rows, m]
//     backward   grad [rows, m], x [rows, n] -> dx [rows, n]
//
// n = 2 m where gated (x1 = x[:, :m], x2 = x[:, m:]), else n = m; the arithmetic is that of activation.cuh. x is
// fp32, bf16 or fp16 (WIDE). VECTOR 1: a thread takes 16 bytes of a row, for which m * sizeof(x) is a multiple of 16
// and the pointers are aligned; VECTOR 0: one element, for any m, at a fraction of the speed.
//
// Bound by memory. A block takes ROWS rows of THREADS vectors, and a thread has the loads of all of them in flight.
#include "activation.cuh"

constexpr int THREADS = 128;
constexpr int ROWS = 4;
#if VECTOR
constexpr int COLUMNS = LANES;
#else
constexpr int COLUMNS = 1;
#endif

// COLUMNS neighbouring elements as loaded, and widened.
#if VECTOR
typedef Vector<LANES> Loaded;
#else
typedef wide_t Loaded;
#endif
typedef float Wide[COLUMNS];

__device__ __forceinline__ Loaded load(const wide_t* address) {
#if VECTOR
    return load_once<LANES>(address);
#else
    return *address;
#endif
}

__device__ __forceinline__ float element(const Loaded& loaded, int i) {
#if VECTOR
    return widen(loaded, i);
#else
    return widen(loaded);
#endif
}

__device__ __forceinline__ void store(wide_t* address, const Wide& f) {
#if !VECTOR
    *address = narrow(f[0]);
#elif WIDE == 0
    *reinterpret_cast<float4*>(address) = make_float4(f[0], f[1], f[2], f[3]);
#else
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        words[i] = WIDE == 1 ? cvt_bf16x2(f[2 * i], f[2 * i + 1]) : cvt_f16x2(f[2 * i], f[2 * i + 1]);
    *reinterpret_cast<uint4*>(address) = make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

// What a thread works on: rows `row` to row + ROWS - 1, COLUMNS columns of y from `col`.
struct Place {
    long long row;
    int col;
};

__device__ __forceinline__ Place place(int cols) {
    const int column_tiles = (cols + THREADS * COLUMNS - 1) / (THREADS * COLUMNS);
    const int tile_col = blockIdx.x % column_tiles;
    return {static_cast<long long>(blockIdx.x / column_tiles) * ROWS,
            (tile_col * THREADS + static_cast<int>(threadIdx.x)) * COLUMNS};
}

extern "C" __global__ __launch_bounds__(THREADS) void forward_kernel(
    const wide_t* __restrict__ x, wide_t* __restrict__ y, int rows, int cols) {
    const Place at = place(cols);
    if (at.col >= cols) return;
    const size_t m = cols, n = HALVES * m;
    const wide_t* from = x + at.row * n + at.col;
    Loaded x1[ROWS] = {}, x2[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (at.row + r < rows) {
            x1[r] = load(from + r * n);
            if constexpr (GATED) x2[r] = load(from + r * n + m);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (at.row + r < rows) {
            Wide out;
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) out[i] = forward(element(x1[r], i), element(x2[r], i));
            store(y + (at.row + r) * m + at.col, out);
        }
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void backward_kernel(
    const wide_t* __restrict__ grad, const wide_t* __restrict__ x, wide_t* __restrict__ dx, int rows, int cols) {
    const Place at = place(cols);
    if (at.col >= cols) return;
    const size_t m = cols, n = HALVES * m, first = at.row * n + at.col;
    Loaded g[ROWS] = {}, x1[ROWS] = {}, x2[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (at.row + r < rows) {
            g[r] = load(grad + (at.row + r) * m + at.col);
            x1[r] = load(x + first + r * n);
            if constexpr (GATED) x2[r] = load(x + first + r * n + m);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (at.row + r < rows) {
            Wide out[HALVES];
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                float d[HALVES];
                backward(element(g[r], i), element(x1[r], i), element(x2[r], i), d);
#pragma unroll
                for (int h = 0; h < HALVES; ++h) out[h][i] = d[h];
            }
#pragma unroll
            for (int h = 0; h < HALVES; ++h) store(dx + first + r * n + h * m, out[h]);
        }
    }
}
