// tree_mean: the sum of some tensors as a tree, times a factor; formulas: reference/ops/optimizers/tree_mean.py.
//
//     out = round(S factor)      out is WIDE; nodes are NODES, float or WIDE's type
//
// ADDITIONS says for each node how many additions follow it. Eight neighbours of all nodes are in registers.
#include "common/multi_tensor.cuh"

using namespace twin;

using node_t = NODES;
constexpr int kAdditions[] = {ADDITIONS};
constexpr int kNodes = sizeof(kAdditions) / sizeof(int);

struct Nodes {
    const node_t* node[kNodes];
};

extern "C" __global__ void __launch_bounds__(kThreads)
    tree_mean(const __grid_constant__ Nodes nodes, wide_t* out, long long count, int aligned, float factor) {
    const long long first = (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) * kElements;
    if (first >= count) return;
    const bool whole = aligned && first + kElements <= count;
    float sum[kNodes][kElements];
    int height = 0;
#pragma unroll
    for (int i = 0; i < kNodes; i++) {
        load(sum[height++], nodes.node[i], first, count, whole);
#pragma unroll
        for (int k = 0; k < kAdditions[i]; k++) {
            height--;
#pragma unroll
            for (int j = 0; j < kElements; j++) sum[height - 1][j] = sum[height - 1][j] + sum[height][j];
        }
    }
#pragma unroll
    for (int j = 0; j < kElements; j++) sum[0][j] = sum[0][j] * factor;
    store(out, sum[0], first, count, whole);
}
