// Zeros in the rows of [tokens, heads, d] that belong to no entry: between one's end and the next one's start, before the
// first and after the last one (reference/ops/attentions/attention_packed.py).
//
// x and, if it is not null, y of the same strides. grid: (entries + 1, blocks of a gap). `of_keys`: whether the rows are
// those of keys.
#include "attention_tile.cuh"

using namespace twin;

struct Config : AttentionDefaults {
    static constexpr bool kLengths = true, kPacked = true;
};
using Arguments = AttentionArguments<Config>;
using Limits = AttentionLimits<Config>;

extern "C" __global__ void __launch_bounds__(256)
    attention_gaps(const __grid_constant__ Arguments a, unsigned short* x, unsigned short* y, int of_keys) {
    const int entry = blockIdx.x, rows = of_keys ? a.kv_rows : a.q_rows;
    const int heads = of_keys ? a.heads / a.group : a.heads, units = a.d / 8;
    int from = 0, to = rows;
    if (entry > 0) {
        const Limits before = limits_of(a, entry - 1);
        from = of_keys ? before.kv_start + before.skv : before.q_start + before.sq;
    }
    if (entry < a.batches) {
        const Limits next = limits_of(a, entry);
        to = of_keys ? next.kv_start : next.q_start;
    }
    for (int row = from + blockIdx.y; row < to; row += gridDim.y) {
        for (int n = threadIdx.x; n < heads * units; n += 256) {
            const long long at = row * a.out_s + n / units * a.out_h + n % units * 8;
            *reinterpret_cast<uint4*>(x + at) = make_uint4(0, 0, 0, 0);
            if (y != nullptr) *reinterpret_cast<uint4*>(y + at) = make_uint4(0, 0, 0, 0);
        }
    }
}
