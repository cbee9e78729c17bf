// adam_states: a step of Adam whose moments and masters are kept in fewer bits (stored_state.cuh) or whose numbers lie
// on the device. Formulas and order: reference/ops/adam_states.py, adam_capturable.py and adam.py.
//
//     adam_states_amax    amaxes[3 index + 0, 1, 2] = max |new p|, |new m|, |new v| of what is scaled; needs zeros
//     adam_states         the step; new scales from those amaxes, which every block computes alike
//     adam_states_scales  writes the new scales, once no block needs the old ones
//
// The first and the last run only where something is scaled: a tensor's scale is known once all its numbers are, and the
// step is computed twice rather than kept in fp32 in between. grad is WIDE.
//
//     PARAM  0: WIDE   1: fp32   2: scaled fp16   3: int16 remainders of bf16 parameters
//     FIRST, SECOND    the kinds of m and v: 0 fp32, 1 bf16, 2 scaled fp16, 3 scaled E4M3
//
// `control` is null, or [lr, c1, c2, inverse scale, skip] on the device (reference/ops/adam_capturable.py).
#include "stored_state.cuh"

using namespace twin;

// Of a multiprocessor. Without it ptxas spills a register of some configurations to fit more blocks.
constexpr int kBlocks = 4;

constexpr int kOwn = 0, kMaster = 1, kScaledMaster = 2, kRemainder = 3;

struct Entry {
    wide_t* grad;
    void* param;
    void* exp_avg;
    void* exp_avg_sq;
    void* rounded;  // WIDE copies of masters, or null; the bf16 parameters of remainders
    float* param_scale;
    float* exp_avg_scale;
    float* exp_avg_sq_scale;
    long long count;
    int first_block, index, aligned, unused;
};

struct Table {
    Entry tensors[CAPACITY];
};

struct Scalars {
    float lr, beta1, rest1, beta2, rest2, eps, decay, c1, c2;
    int decoupled;
};

struct Numbers {
    float g[kElements], p[kElements], m[kElements], v[kElements];
};

__device__ __forceinline__ void load_param(float (&p)[kElements], const Entry& t, long long at, bool whole) {
    if constexpr (PARAM == kOwn) load(p, static_cast<const wide_t*>(t.param), at, t.count, whole);
    if constexpr (PARAM == kMaster) load(p, static_cast<const float*>(t.param), at, t.count, whole);
    if constexpr (PARAM == kScaledMaster) load_state<kFp16Scaled>(p, t.param, t.param_scale, at, t.count, whole);
    if constexpr (PARAM == kRemainder) {
        const Codes<kBf16> low = load_codes<kBf16>(t.param, at, t.count, whole);
        const Codes<kBf16> high = load_codes<kBf16>(t.rounded, at, t.count, whole);
#pragma unroll
        for (int i = 0; i < kElements; i++)
            p[i] = __uint_as_float(high.code(i) - (low.code(i) >> 15) << 16 | low.code(i));
    }
}

__device__ __forceinline__ void store_param(const float (&p)[kElements], const Entry& t, float scale, long long at,
                                            bool whole) {
    if constexpr (PARAM == kOwn) store(static_cast<wide_t*>(t.param), p, at, t.count, whole);
    if constexpr (PARAM == kMaster) store(static_cast<float*>(t.param), p, at, t.count, whole);
    if constexpr (PARAM == kScaledMaster) store_state<kFp16Scaled>(t.param, p, scale, at, t.count, whole);
    if constexpr (PARAM == kRemainder) {
        Codes<kBf16> low = {}, high = {};
#pragma unroll
        for (int i = 0; i < kElements; i++) {
            const unsigned word = isnan(p[i]) ? 0x7FC00000 : __float_as_uint(p[i]);
            low.put(i, word & 0xFFFF);
            high.put(i, (word >> 16) + (word >> 15 & 1) & 0xFFFF);
        }
        store_codes<kBf16>(t.param, low, at, t.count, whole);
        store_codes<kBf16>(t.rounded, high, at, t.count, whole);
    } else {
        if (t.rounded != nullptr) store(static_cast<wide_t*>(t.rounded), p, at, t.count, whole);
    }
}

__device__ __forceinline__ void load_all(Numbers& x, const Entry& t, long long at, bool whole, bool with_param) {
    load(x.g, t.grad, at, t.count, whole);
    if (with_param) load_param(x.p, t, at, whole);
    load_state<FIRST>(x.m, t.exp_avg, t.exp_avg_scale, at, t.count, whole);
    load_state<SECOND>(x.v, t.exp_avg_sq, t.exp_avg_sq_scale, at, t.count, whole);
}

// lr, c1 and c2 apart: NVRTC 13.0 reads the first field of the kernel's parameter where a changed copy of it is meant.
__device__ __forceinline__ void update(Numbers& x, const Scalars& s, float lr, float c1, float c2) {
#pragma unroll
    for (int i = 0; i < kElements; i++) {
        if (!s.decoupled) x.g[i] = x.g[i] + s.decay * x.p[i];
        x.m[i] = s.beta1 * x.m[i] + s.rest1 * x.g[i];
        x.v[i] = s.beta2 * x.v[i] + (s.rest2 * x.g[i]) * x.g[i];
        float u = (x.m[i] / c1) / (sqrtf(x.v[i] / c2) + s.eps);
        if (s.decoupled) u = u + s.decay * x.p[i];
        x.p[i] = x.p[i] - lr * u;
    }
}

__device__ __forceinline__ long long first_of(const Entry& t) {
    return (static_cast<long long>(blockIdx.x - t.first_block) * kThreads + threadIdx.x) * kElements;
}

// The block's largest magnitude into a slot, as integers: a maximum does not depend on which block comes first.
__device__ __forceinline__ void commit(unsigned* slot, const float (&value)[kElements], unsigned* shared) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kElements; i++) most = fmaxf(most, fabsf(value[i]));  // gives the other operand of a NaN
    const unsigned word = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(most));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = word;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned all = shared[0];
#pragma unroll
        for (int warp = 1; warp < kThreads / 32; warp++) all = max(all, shared[warp]);
        if (all != 0) atomicMax(slot, all);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) adam_states_amax(
    const __grid_constant__ Table table, int tensors, const __grid_constant__ Scalars scalars, unsigned* amaxes) {
    __shared__ unsigned shared[3][kThreads / 32];
    const Entry& t = tensor_of_block<CAPACITY>(table.tensors, tensors);
    const long long first = first_of(t);
    Numbers x = {};
    if (first < t.count) {
        const bool whole = t.aligned && first + kElements <= t.count;
        load_all(x, t, first, whole, PARAM == kScaledMaster || !scalars.decoupled);
        update(x, scalars, scalars.lr, scalars.c1, scalars.c2);
        // What lies behind the end is no number.
#pragma unroll
        for (int i = 0; i < kElements; i++)
            if (first + i >= t.count) x.p[i] = x.m[i] = x.v[i] = 0.0f;
    }
    unsigned* slots = amaxes + 3 * t.index;
    if constexpr (PARAM == kScaledMaster) commit(slots, x.p, shared[0]);
    if constexpr (is_scaled(FIRST)) commit(slots + 1, x.m, shared[1]);
    if constexpr (is_scaled(SECOND)) commit(slots + 2, x.v, shared[2]);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) adam_states(
    const __grid_constant__ Table table, int tensors, const __grid_constant__ Scalars scalars, const float* amaxes,
    const float* control, int unscale) {
    if (control != nullptr && control[4] != 0.0f) return;
    const Entry& t = tensor_of_block<CAPACITY>(table.tensors, tensors);
    const long long first = first_of(t);
    if (first >= t.count) return;
    const bool whole = t.aligned && first + kElements <= t.count;
    Numbers x;
    load_all(x, t, first, whole, true);
    float lr = scalars.lr, c1 = scalars.c1, c2 = scalars.c2;
    if (control != nullptr) {
        lr = control[0], c1 = control[1], c2 = control[2];
        if (unscale) {
#pragma unroll
            for (int i = 0; i < kElements; i++) x.g[i] = x.g[i] * control[3];
            store(t.grad, x.g, first, t.count, whole);
        }
    }
    update(x, scalars, lr, c1, c2);
    float param = 1.0f, exp_avg = 1.0f, exp_avg_sq = 1.0f;
    const float* amax = amaxes + 3 * t.index;
    if constexpr (PARAM == kScaledMaster) param = scale_of<kFp16Scaled>(amax[0]);
    if constexpr (is_scaled(FIRST)) exp_avg = scale_of<FIRST>(amax[1]);
    if constexpr (is_scaled(SECOND)) exp_avg_sq = scale_of<SECOND>(amax[2]);
    store_state<FIRST>(t.exp_avg, x.m, exp_avg, first, t.count, whole);
    store_state<SECOND>(t.exp_avg_sq, x.v, exp_avg_sq, first, t.count, whole);
    store_param(x.p, t, param, first, whole);
}

extern "C" __global__ void __launch_bounds__(kThreads) adam_states_scales(
    const __grid_constant__ Table table, int tensors, const float* amaxes) {
    const int i = static_cast<int>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= tensors) return;
    const Entry& t = table.tensors[i];
    const float* amax = amaxes + 3 * t.index;
    if constexpr (PARAM == kScaledMaster) *t.param_scale = scale_of<kFp16Scaled>(amax[0]);
    if constexpr (is_scaled(FIRST)) *t.exp_avg_scale = scale_of<FIRST>(amax[1]);
    if constexpr (is_scaled(SECOND)) *t.exp_avg_sq_scale = scale_of<SECOND>(amax[2]);
}
