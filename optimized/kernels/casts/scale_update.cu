// scale_update: from the amaxes of a step to the scales of the next one, for up to CAPACITY modules at a launch.
//
// Per module and column j, with H = amax_history [length, columns] and s = scale [columns], all fp32:
//
//     last = H[0, j];  if last == 0 the column is left alone
//     a = H[1, j], ..., H[length - 1, j], last;   H[0, j] = 0, H[r, j] = a[r] for r > 0
//     amax = max(a) without NaN and infinities (MOST_RECENT 0), or last (MOST_RECENT 1)
//     if amax is finite and > 0:  s[j] = min(scaled_max / amax, largest finite fp32), IEEE division
//
// scaled_max = 2^-margin * fp8_max. One block per module and column. The table of modules is a kernel argument by
// value: there is nothing to copy to the device, and a CUDA graph captures the launch.
constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr float kFP32Max = 3.402823466e+38f;

struct Module {
    float* scale;
    float* history;
    int length;
    int columns;
};

struct Table {
    Module modules[CAPACITY];
};

__device__ __forceinline__ float block_max(float value) {
    __shared__ float warps[kThreads / 32];
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, lane));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = warps[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / 32; warp++) value = fmaxf(value, warps[warp]);
    return value;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    scale_update(const __grid_constant__ Table table, float scaled_max) {
    const Module& module = table.modules[blockIdx.x];
    const int column = blockIdx.y, length = module.length, columns = module.columns;
    if (column >= columns) return;  // modules may differ in their number of columns
    float* const history = module.history + column;
    const float last = history[0];
    __syncthreads();  // everybody has read row 0 before it is overwritten
    if (last == 0.0f) return;

    // Row r takes row r + 1: a chunk reads its successors before it writes, and what it writes no later chunk
    // reads. Starting from 0 is harmless because only a positive amax is used; neither NaN nor infinity is <= kFP32Max.
    float most = 0.0f;
    for (int first = 0; first < length; first += kThreads * kUnroll) {
        float next[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            const int r = first + u * kThreads + threadIdx.x;
            next[u] = r < length - 1 ? history[static_cast<size_t>(r + 1) * columns] : last;
        }
        __syncthreads();
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            const int r = first + u * kThreads + threadIdx.x;
            if (r < length) history[static_cast<size_t>(r) * columns] = r == 0 ? 0.0f : next[u];
            most = fmaxf(most, next[u] <= kFP32Max ? next[u] : 0.0f);
        }
    }
#if MOST_RECENT
    const float amax = last;
#else
    const float amax = block_max(most);
#endif
    // Comparisons with NaN are false: neither NaN nor infinity passes.
    if (threadIdx.x == 0 && amax > 0.0f && amax <= kFP32Max) module.scale[column] = fminf(scaled_max / amax, kFP32Max);
}
