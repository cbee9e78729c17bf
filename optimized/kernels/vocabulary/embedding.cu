// Rows of a table by their numbers, and the table's gradient. Definition: reference/ops/vocabulary/embedding.py.
//
//     out[i] = weight[ids[i]]                                      embedding
//     dweight[v] = round(sum over i with ids[i] = v of grad[i])    chunks of 64 terms in order; the chunks in order
//
// weight [rows, width], grad and out [count, width] of one type. A warp takes a row, up to kSpan of its columns.
//
// Backward, torch has sorted the ids stably: `order` says where the terms came from, `starts` [rows + 1] where each
// row's begin. Few rows of a table have long sums (a text's commonest words), and one warp would add them for longer
// than the rest takes together. So `embedding_chunks` first adds whole chunks, wherever they are: every 64 positions
// of the sorted ids contain the start of at most one whole chunk, and its sum goes to the slot of that number.
// `embedding_backward` adds a row's chunks and the terms behind them. Bound by memory: it writes the whole table.
//
// Defines: WIDE (0 fp32, 1 bf16, 2 fp16), VECTOR (1: width a multiple of 8, rows at multiples of 16 bytes).
#include "common/wide.cuh"
#include "common/wide_store.cuh"

using namespace twin;

constexpr int kElements = 8;  // of a lane, neighbours
constexpr int kWarps = 8;
constexpr int kPart = 32 * kElements;  // columns of a warp at a time
constexpr int kSpan = 4 * kPart;       // and in all
constexpr int kChunk = 64;
constexpr int kAhead = WIDE == 0 ? 4 : 8;  // terms that are loaded before they are added

__device__ __forceinline__ Eight load(const wide_t* x, int left) {
#if VECTOR
    return left > 0 ? load8(x) : Eight{};
#else
    return load_elements<kElements>(x, left);
#endif
}

__device__ __forceinline__ void store(wide_t* y, const float (&v)[kElements], int left) {
#if VECTOR
    if (left > 0) store_eight(y, v);
#else
    store_elements(y, v, left);
#endif
}

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    embedding(const wide_t* weight, const long long* ids, wide_t* out, long long count, long long rows, int width) {
    const long long i = static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (i >= count) return;
    const long long id = ids[i];
    const bool known = id >= 0 && id < rows;
    const int first = blockIdx.y * kSpan + static_cast<int>(threadIdx.x) % 32 * kElements;
    Eight v[kSpan / kPart];
#pragma unroll
    for (int n = 0; n < kSpan / kPart; n++) {
        const int at = first + kPart * n;
        v[n] = known ? load(weight + id * width + at, width - at) : Eight{};
    }
#pragma unroll
    for (int n = 0; n < kSpan / kPart; n++) {
        const int at = first + kPart * n;
        float values[kElements];  // widening and narrowing keeps every number
#pragma unroll
        for (int j = 0; j < kElements; j++) values[j] = known ? widen(v[n], j) : __int_as_float(0x7FC00000);
        store(out + i * width + at, values, width - at);
    }
}

// Adds to `sum` the terms of `order` from `from` to `to`, in order; `empty`: the first of them is the sum so far.
__device__ __forceinline__ void add_terms(float (&sum)[kElements], bool empty, const wide_t* grad,
                                          const long long* order, long long from, long long to, int width, int at) {
    for (; from < to; from += kAhead) {
        Eight v[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; i++)
            if (from + i < to) v[i] = load(grad + order[from + i] * width + at, width - at);
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            if (from + i >= to) break;
#pragma unroll
            for (int j = 0; j < kElements; j++) sum[j] = empty ? widen(v[i], j) : sum[j] + widen(v[i], j);
            empty = false;
        }
    }
}

// One block row of the grid for each slot, that is for each 64 positions of the sorted ids; sums [slots, width] fp32.
extern "C" __global__ void __launch_bounds__(32 * kSpan / kPart)
    embedding_chunks(const wide_t* grad, const long long* order, const int* sorted, const int* starts, float* sums,
                     int rows, int width) {
    const long long last = (blockIdx.x + 1ll) * kChunk - 1;  // every whole chunk of this slot contains this position
    const int id = sorted[last];
    if (id < 0 || id >= rows) return;
    const long long from = last - (last - starts[id]) % kChunk;
    const int at = blockIdx.y * kSpan + static_cast<int>(threadIdx.x) * kElements;
    if (from + kChunk > starts[id + 1] || at >= width) return;
    float sum[kElements] = {};
    add_terms(sum, true, grad, order, from, from + kChunk, width, at);
    float* const to = sums + blockIdx.x * static_cast<long long>(width) + at;
#pragma unroll
    for (int j = 0; j < kElements; j++)
        if (VECTOR || at + j < width) to[j] = sum[j];
}

extern "C" __global__ void __launch_bounds__(32 * kWarps, 3)
    embedding_backward(const wide_t* grad, const long long* order, const int* starts, const float* sums, wide_t* out,
                       int rows, int width, int padding) {
    const int row = blockIdx.x * kWarps + threadIdx.x / 32;
    if (row >= rows) return;
    const long long from = starts[row], to = row == padding ? from : starts[row + 1];
    const long long rest = to - (to - from) % kChunk;  // where the last chunk begins, which is not whole
    const int first = blockIdx.y * kSpan + static_cast<int>(threadIdx.x) % 32 * kElements;
#pragma unroll 1
    for (int at = first; at < min(first + kSpan, width); at += kPart) {
        float sum[kElements] = {};
#pragma unroll 2
        for (long long chunk = from; chunk < rest; chunk += kChunk) {
            const float* const part = sums + chunk / kChunk * width + at;
#pragma unroll
            for (int j = 0; j < kElements; j++) {
                const float term = VECTOR || at + j < width ? part[j] : 0.0f;
                sum[j] = chunk == from ? term : sum[j] + term;
            }
        }
        if (rest < to) {
            float last[kElements];
            add_terms(last, true, grad, order, rest, to, width, at);
#pragma unroll
            for (int j = 0; j < kElements; j++) sum[j] = rest == from ? last[j] : sum[j] + last[j];
        }
        store(out + static_cast<long long>(row) * width + at, sum, width - at);
    }
}
