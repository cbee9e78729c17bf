// Softmax cross-entropy of rows of logits, its backward and its mean. Definition: reference/ops/vocabulary/cross_entropy.py.
//
//     m = max x, S = sum exp(x - m)        each logit is read once: a lane's sum is rescaled when its maximum grows
//     loss = log S - (x[t] - m)            with SMOOTH: log S - (keep (x[t] - m) + smoothing ((sum x) / V - m))
//     dx = round(g (exp(x - m) (1 / S) - share))          at t: minus (keep + share)
//
// logits, dx [rows, cols] of one type; a block takes a row. Bound by memory, and nearly by instructions: 2 bytes and a
// dozen instructions an element forward, 4 bytes backward, in bf16. Rows that are ignored are not read.
//
// Forward, the order belongs to the row, so where rows do not start at multiples of 16 bytes (VECTOR 0) a lane shifts
// its 8 elements out of the aligned vectors that contain them. Backward nothing is added up: vectors start wherever
// logits and gradient are both aligned (VECTOR 1), or elements are taken one by one (VECTOR 0).
//
// Defines: WIDE (0 fp32, 1 bf16, 2 fp16), VECTOR, SMOOTH.
#include "common/elementary.cuh"
#include "common/log.cuh"
#include "ptx/max.cuh"
#include "common/row_sum.cuh"
#include "common/wide.cuh"
#include "common/wide_store.cuh"
#include "vocabulary/row_lanes.cuh"

using namespace twin;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kElements = 8;  // of a group: neighbours that a lane takes at a time
constexpr int kGroups = 4;    // of a lane's tile
constexpr int kStride = kThreads * kElements;
constexpr int kTile = kGroups * kStride;
constexpr int kBlocks = VECTOR && WIDE != 0 ? 5 : 4;  // on a multiprocessor, at least: forward
constexpr int kMeanThreads = 1024;

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7FC00000); }

struct Lane {
    float top, sum, plain;  // maximum, sum of exponentials, sum of logits
};

#if !VECTOR
// Eight elements at any address, out of the aligned vectors that contain them. The last of these may lie behind the
// elements by up to 16 bytes, which the caller knows to exist.
__device__ __forceinline__ Eight load_shifted(const wide_t* address) {
    constexpr int kWords = 8 * sizeof(wide_t) / 4;
    const unsigned long long at = reinterpret_cast<unsigned long long>(address);
    const wide_t* const base = reinterpret_cast<const wide_t*>(at & ~15ull);
    const int words = static_cast<int>(at & 15) / 4;
    unsigned w[kWords + 4];
#pragma unroll
    for (int i = 0; i < kWords + 4; i += 4) {
        const Vector<kLanes> part = load_once<kLanes>(base + i / 4 * kLanes);
#pragma unroll
        for (int j = 0; j < 4; j++) w[i + j] = part.words[j];
    }
#pragma unroll
    for (int i = 0; i < kWords + 3; i++) w[i] = words & 1 ? w[i + 1] : w[i];
#pragma unroll
    for (int i = 0; i < kWords + 1; i++) w[i] = words & 2 ? w[i + 2] : w[i];
    Eight found;
#pragma unroll
    for (int i = 0; i < kWords; i++)
        found.words[i] = WIDE == 0 ? w[i] : __funnelshift_r(w[i], w[i + 1], static_cast<unsigned>(at & 2) * 8);
    return found;
}
#endif

// A group of which `left` elements exist; the others are zeros. kWhole: all of them, and more of the row behind them.
template <bool kWhole>
__device__ __forceinline__ Eight load_group(const wide_t* x, int left) {
#if VECTOR
    if (kWhole || left >= kElements) return load8(x);
#if WIDE == 0
    if (left > 0) {  // half a group: what follows belongs to the next row
        const Vector<4> low = load_once<4>(x);
        return {low.words[0], low.words[1], low.words[2], low.words[3]};
    }
#endif
    return {};
#else
    if constexpr (kWhole) return load_shifted(x);
    return load_elements<kElements>(x, left);
#endif
}

// The maximum of a group and `top`; NaN is ignored.
__device__ __forceinline__ float group_maximum(float top, const Eight& v) {
#if WIDE == 0
#pragma unroll
    for (int j = 0; j < kElements; j++) top = fmaxf(top, widen(v, j));
    return top;
#else
    Vector<2> pair;
    pair.words[0] = max_pairs<WIDE>(max_pairs<WIDE>(v.words[0], v.words[1]), max_pairs<WIDE>(v.words[2], v.words[3]));
    return fmaxf(top, fmaxf(widen(pair, 0), widen(pair, 1)));
#endif
}

// The next tile of a lane, from x on, where `left` elements of the row are left.
template <bool kWhole>
__device__ __forceinline__ void take_tile(Lane& lane, const wide_t* x, int left) {
    Eight v[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; i++) v[i] = load_group<kWhole>(x + kStride * i, left - kStride * i);
    const float before = lane.top;
#pragma unroll
    for (int i = 0; i < kGroups; i++) {
        if (kWhole || left - kStride * i >= kElements) {
            lane.top = group_maximum(lane.top, v[i]);
        } else {
#pragma unroll
            for (int j = 0; j < kElements; j++)
                if (j < left - kStride * i) lane.top = fmaxf(lane.top, widen(v[i], j));
        }
    }
    const float origin = origin_of(lane.top);
    lane.sum = lane.sum * twin::exp(before - origin);
#pragma unroll
    for (int i = 0; i < kGroups; i++) {
        if (!kWhole && left <= kStride * i) break;
        float e[kElements];
#pragma unroll
        for (int j = 0; j < kElements; j++) {
            e[j] = twin::exp(widen(v[i], j) - origin);
            if (!kWhole && j >= left - kStride * i) e[j] = 0.0f;
        }
        lane.sum = lane.sum + halving_sum(e);
        if constexpr (SMOOTH) {
            float plain[kElements];
#pragma unroll
            for (int j = 0; j < kElements; j++) plain[j] = widen(v[i], j);
            lane.plain = lane.plain + halving_sum(plain);
        }
    }
}

// loss, maximum, inverse (of S): [rows].
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    cross_entropy(const wide_t* logits, const long long* target, float* loss, float* maximum, float* inverse, int cols,
                  long long ignored, float smoothing) {
    __shared__ float tops[kWarps], sums[kWarps], plains[kWarps];
    const long long row = blockIdx.x, t = target[row];
    if (t == ignored) {
        if (threadIdx.x == 0) loss[row] = 0.0f, maximum[row] = 0.0f, inverse[row] = 0.0f;
        return;
    }
    const wide_t* const x = logits + row * cols;
    const int first = static_cast<int>(threadIdx.x) * kElements;
    Lane lane = {lowest(), 0.0f, 0.0f};
    int at = 0;
    for (; at + kTile + (VECTOR ? 0 : kElements) <= cols; at += kTile) take_tile<true>(lane, x + at + first, cols);
    for (; at < cols; at += kTile)
        if (at + first < cols) take_tile<false>(lane, x + at + first, cols - at - first);

    float top = lane.top;
#pragma unroll
    for (int h = 16; h > 0; h /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, h));
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kWarps; warp++) top = fmaxf(top, tops[warp]);
    const float m = origin_of(top) + 0.0f;  // never -0
    const float total = add_lanes<kWarps>(lane.sum * twin::exp(lane.top - m), sums);
    const float plain = SMOOTH ? add_lanes<kWarps>(lane.plain, plains) : 0.0f;
    if (threadIdx.x != 0) return;
    const bool known = t >= 0 && t < cols;
    float at_target = known ? widen(x[t]) - m : not_a_number();
    if (SMOOTH) {
        const float rest = smoothing * (__fdiv_rn(plain, static_cast<float>(cols)) - m);
        at_target = (1.0f - smoothing) * at_target + rest;
    }
    loss[row] = twin::log(total) - at_target;
    maximum[row] = m;
    inverse[row] = known ? __fdiv_rn(1.0f, total) : not_a_number();
}

// What a row's gradients have in common.
struct Row {
    float m, inverse, g, share, hit;
    int target;

    __device__ __forceinline__ float gradient(float x, bool is_target) const {
        const float p = twin::exp(x - m) * inverse;
        return g * (p - (is_target ? hit : share));
    }
};

#if VECTOR
constexpr int kAhead = 2;  // groups of a lane in flight

__device__ __forceinline__ void gradient_group(const Row& r, const Eight& v, int at, wide_t* dx) {
    float d[kElements];
    if (static_cast<unsigned>(r.target - at) < kElements) {
#pragma unroll
        for (int j = 0; j < kElements; j++) d[j] = r.gradient(widen(v, j), at + j == r.target);
    } else {
#pragma unroll
        for (int j = 0; j < kElements; j++) d[j] = r.gradient(widen(v, j), false);
    }
    store_eight(dx + at, d);
}
#endif

// grad is [rows] with grad_step 1, or [] with 0; divisor is [] or null.
extern "C" __global__ void __launch_bounds__(kThreads, WIDE == 0 ? 5 : 6)
    cross_entropy_backward(const float* grad, const float* divisor, const wide_t* logits, const long long* target,
                           const float* maximum, const float* inverse, wide_t* gradient, int cols, int grad_step,
                           long long ignored, float smoothing) {
    const long long row = blockIdx.x, t = target[row];
    const wide_t* const x = logits + row * cols;
    wide_t* const dx = gradient + row * cols;
    const bool counted = t != ignored;
    Row r = {};
    if (counted) {
        r.m = maximum[row], r.inverse = inverse[row], r.g = grad[row * grad_step];
        if (divisor != nullptr) r.g = __fdiv_rn(r.g, *divisor);
        r.share = __fdiv_rn(smoothing, static_cast<float>(cols));
        r.hit = (1.0f - smoothing) + r.share;
    }
    r.target = t >= 0 && t < cols ? static_cast<int>(t) : cols;
    const auto one = [&](int at) { dx[at] = narrow(counted ? r.gradient(widen(x[at]), at == r.target) : 0.0f); };
#if VECTOR
    // From the first element at a multiple of 16 bytes, groups of eight.
    const int start = (16 - static_cast<int>(reinterpret_cast<unsigned long long>(x) & 15)) % 16 / sizeof(wide_t);
    const int groups = cols > start ? (cols - start) / kElements : 0;
    const float zeros[kElements] = {};
    for (int i = threadIdx.x; i < groups; i += kAhead * kThreads) {
        if (!counted) {
#pragma unroll
            for (int n = 0; n < kAhead; n++)
                if (i + kThreads * n < groups) store_eight(dx + start + kElements * (i + kThreads * n), zeros);
            continue;
        }
        Eight v[kAhead];
#pragma unroll
        for (int n = 0; n < kAhead; n++)
            if (i + kThreads * n < groups) v[n] = load8(x + start + kElements * (i + kThreads * n));
#pragma unroll
        for (int n = 0; n < kAhead; n++)
            if (i + kThreads * n < groups) gradient_group(r, v[n], start + kElements * (i + kThreads * n), dx);
    }
    const int end = start + kElements * groups, lane = threadIdx.x;
    if (lane < start && lane < cols) one(lane);
    if (lane < kElements && end + lane < cols) one(end + lane);
#else
    for (int at = threadIdx.x; at < cols; at += kThreads) one(at);
#endif
}

// The sum of losses over the divisor; counted: the divisor is the number of targets, `least` at least, instead of 1.
extern "C" __global__ void __launch_bounds__(kMeanThreads)
    cross_entropy_mean(const float* loss, const long long* target, float* mean, float* divisor, long long rows,
                       long long ignored, int counted, int least) {
    __shared__ float sums[32];
    __shared__ int counts[32];
    float sum = 0.0f;
    int count = 0;
#pragma unroll 8
    for (long long i = threadIdx.x; i < rows; i += kMeanThreads) {
        sum = sum + loss[i];
        count += target[i] != ignored;
    }
    count = __reduce_add_sync(kAllLanes, count);
    if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = count;
    const float total = add_lanes<32>(sum, sums);
    if (threadIdx.x >= 32) return;
    count = __reduce_add_sync(kAllLanes, counts[threadIdx.x]);
    if (threadIdx.x != 0) return;
    const float over = counted ? __int2float_rn(max(count, least)) : 1.0f;
    *mean = __fdiv_rn(total, over);
    *divisor = over;
}
