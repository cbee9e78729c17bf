// New tokens' queries rotated, their keys rotated and put into a cache with their values. Definition:
// reference/ops/attentions/rotary_append.py.
//
// q [t, groups, together, d], k [t, groups, d], v [t, groups, e], any strides with the last dimension contiguous; out
// [t, together, groups, d], any strides too; freqs [positions, d2] fp32; keys [rows, groups, d], values [rows, groups, e].
//
// A block has one token's group: it computes the sines and cosines of the token's angles once, in float64, and a thread
// takes a pair of elements at a time. A step of one token is short of everything but launches, of which this is one for
// seven (docs/log/inference.md).
//
// Defines: WIDE (0 fp32, 1 bf16, 2 fp16), INTERLEAVED.
#include "common/wide.cuh"
#include "rotary_angle.cuh"

using namespace twin;

constexpr int kThreads = 128;

// The fields of optimized/ops/attentions/rotary_append.py's structured array, in its order.
struct Arguments {
    const wide_t *q, *k, *v;
    wide_t *out, *keys, *values;
    const float* freqs;
    const int* positions;
    const long long* rows;
    long long q_t, q_g, q_p, k_t, k_g, v_t, v_g, out_t, out_p, out_g;  // strides in elements
    long long cache_rows;
    int groups, together, d, e, d2, angles;
};

extern "C" __global__ void __launch_bounds__(kThreads) rotary_append(const __grid_constant__ Arguments a) {
    extern __shared__ SineCosine table[];
    const int token = blockIdx.x, group = blockIdx.y, half = a.d2 / 2;
    const int position = min(max(a.positions[token], 0), a.angles - 1);
    const long long row = a.rows[token];
    const bool there = row >= 0 && row < a.cache_rows;
    for (int j = threadIdx.x; j < a.d2; j += kThreads)
        table[j] = sine_cosine(a.freqs[static_cast<long long>(position) * a.d2 + j]);
    __syncthreads();
    const wide_t* const queries = a.q + token * a.q_t + group * a.q_g;
    wide_t* const results = a.out + token * a.out_t + group * a.out_g;
    const wide_t* const key = a.k + token * a.k_t + group * a.k_g;
    wide_t* const own_key = a.keys + (row * a.groups + group) * a.d;

    // Head `together` is the key's. A pair is rotated; an element behind d2 is copied.
    const int pairs = half + (a.d - a.d2);
    for (int n = threadIdx.x; n < (a.together + 1) * pairs; n += kThreads) {
        const int head = n / pairs, pair = n % pairs;
        const bool of_key = head == a.together;
        if (of_key && !there) continue;
        const wide_t* const from = of_key ? key : queries + head * a.q_p;
        wide_t* const to = of_key ? own_key : results + head * a.out_p;
        if (pair >= half) {
            const int at = a.d2 + pair - half;
            to[at] = from[at];
            continue;
        }
        const int low = INTERLEAVED ? 2 * pair : pair, high = INTERLEAVED ? low + 1 : low + half;
        const float x = widen(from[low]), y = widen(from[high]);
        to[low] = narrow(turned(x, y, table[low].cosine, -table[low].sine));
        to[high] = narrow(turned(y, x, table[high].cosine, table[high].sine));
    }
    if (!there) return;
    const wide_t* const value = a.v + token * a.v_t + group * a.v_g;
    wide_t* const own_value = a.values + (row * a.groups + group) * a.e;
    for (int j = threadIdx.x; j < a.e; j += kThreads) own_value[j] = value[j];
}
