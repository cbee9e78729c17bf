// adam_states: a step of Adam whose moments and masters are kept in fewer bits (stored_state.cuh) or whose numbers lie
// on the device. Formulas and order: reference/ops/optimizers/adam_states.py, adam_capturable.py and adam.py.
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
//     TILES            of 2048 numbers, of a block
//
// `control` is null, or [lr, c1, c2, inverse scale, skip] on the device (reference/ops/optimizers/adam_capturable.py).
#include "adam_update.cuh"

using namespace twin;

// Of a multiprocessor. Without it ptxas spills a register of some configurations to fit more blocks.
constexpr int kBlocks = 4;
// A block takes kTiles times 2048 numbers, one after the other: its scales and maxima cost it once.
constexpr int kTiles = TILES;

constexpr int kOwn = 0, kMaster = 1, kScaledMaster = 2, kRemainder = 3;
constexpr int kWide = WIDE == 0 ? kFp32 : WIDE == 1 ? kBf16 : kFp16Scaled;  // how gradients and copies are kept
constexpr int kParam = PARAM == kOwn ? kWide : PARAM == kMaster ? kFp32 : PARAM == kScaledMaster ? kFp16Scaled : kBf16;
constexpr bool kScaled = PARAM == kScaledMaster || is_scaled(FIRST) || is_scaled(SECOND);

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

// Eight numbers of each kind as they lie in memory.
struct Raw {
    Codes<kWide> grad;
    Codes<kParam> param;
    Codes<kBf16> high;  // of remainders only
    Codes<FIRST> exp_avg;
    Codes<SECOND> exp_avg_sq;
};

// The scales with which a tensor's numbers are read.
struct Scales {
    float param = 1.0f, exp_avg = 1.0f, exp_avg_sq = 1.0f;

    __device__ __forceinline__ explicit Scales(const Entry& t) {
        if constexpr (PARAM == kScaledMaster) param = *t.param_scale;
        if constexpr (is_scaled(FIRST)) exp_avg = *t.exp_avg_scale;
        if constexpr (is_scaled(SECOND)) exp_avg_sq = *t.exp_avg_sq_scale;
    }
};

__device__ __forceinline__ long long first_of(const Entry& t, int block) {
    const long long tile = static_cast<long long>(block - t.first_block) * kTiles;
    return (tile * kThreads + threadIdx.x) * kElements;
}

__device__ __forceinline__ bool whole(const Entry& t, long long at) { return t.aligned && at + kElements <= t.count; }

__device__ __forceinline__ void load(Raw& raw, const Entry& t, long long at, bool with_param) {
    if (at >= t.count) return;
    const bool all = whole(t, at);
    raw.grad = load_codes<kWide>(t.grad, at, t.count, all);
    if (with_param) raw.param = load_codes<kParam>(t.param, at, t.count, all);
    if constexpr (PARAM == kRemainder) {
        if (with_param) raw.high = load_codes<kBf16>(t.rounded, at, t.count, all);
    }
    raw.exp_avg = load_codes<FIRST>(t.exp_avg, at, t.count, all);
    raw.exp_avg_sq = load_codes<SECOND>(t.exp_avg_sq, at, t.count, all);
}

__device__ __forceinline__ void decode(Numbers& x, const Raw& raw, const Scales& scales) {
    twin::decode<kWide>(x.g, raw.grad);
    twin::decode<FIRST>(x.m, raw.exp_avg, scales.exp_avg);
    twin::decode<SECOND>(x.v, raw.exp_avg_sq, scales.exp_avg_sq);
    if constexpr (PARAM == kScaledMaster) {
        twin::decode<kParam>(x.p, raw.param, scales.param);
    } else if constexpr (PARAM == kRemainder) {
#pragma unroll
        for (int i = 0; i < kElements; i++)
            x.p[i] = __uint_as_float(raw.high.code(i) - (raw.param.code(i) >> 15) << 16 | raw.param.code(i));
    } else {
        twin::decode<kParam>(x.p, raw.param);
    }
}

__device__ __forceinline__ void store_param(const float (&p)[kElements], const Entry& t, float inverse, long long at,
                                            bool all) {
    if constexpr (PARAM == kRemainder) {
        Codes<kBf16> low = {}, high = {};
#pragma unroll
        for (int i = 0; i < kElements; i++) {
            const unsigned word = isnan(p[i]) ? 0x7FC00000 : __float_as_uint(p[i]);
            low.put(i, word & 0xFFFF);
            high.put(i, (word >> 16) + (word >> 15 & 1) & 0xFFFF);
        }
        store_codes<kBf16>(t.param, low, at, t.count, all);
        store_codes<kBf16>(t.rounded, high, at, t.count, all);
    } else {
        if constexpr (PARAM == kScaledMaster)
            store_codes<kParam>(t.param, encode<kParam>(p, inverse), at, t.count, all);
        else
            store_codes<kParam>(t.param, encode<kParam>(p), at, t.count, all);
        if (t.rounded != nullptr) store_codes<kWide>(t.rounded, encode<kWide>(p), at, t.count, all);
    }
}

__device__ __forceinline__ void update(Numbers& x, const Scalars& s, const Rates& rates) {
    if (!update_usual(x, s, rates)) update_any(x, s, rates);
}

// The block's largest magnitude into a slot, as integers: a maximum does not depend on which block comes first.
__device__ __forceinline__ void commit(unsigned* slot, float most, unsigned* shared) {
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

__device__ __forceinline__ float largest(float so_far, const float (&value)[kElements]) {
#pragma unroll
    for (int i = 0; i < kElements; i++) so_far = fmaxf(so_far, fabsf(value[i]));  // gives the other operand of a NaN
    return so_far;
}

// Bounds new parameters from above, in few instructions: most cannot be the largest, and need no division.
//
//     |new p| <= |p| (1 + |lr decay|) + |lr| sqrt(c2) / c1 |m| min(1 / sqrt(v), 1 / (eps sqrt(c2)))
//
// Both terms are enlarged by 2^-10, far more than the error of the approximate root and of all roundings.
struct Bound {
    float of_param, of_step, steepest;
    bool usual;

    __device__ __forceinline__ Bound(const Scalars& s, const Rates& rates) {
        const float c = sqrtf(rates.c2), decay = fabsf(rates.lr * s.decay);
        of_param = (1.0f + decay) * 1.0009765625f;
        of_step = fabsf(rates.lr) * c / rates.c1 * 1.0009765625f;
        steepest = 1.0f / (s.eps * c);
        usual = rates.usual && decay <= 1.0f && of_step <= 1048576.0f;
    }

    // Whether new parameters may be larger than `most`. NaN never is; fmaxf drops it. Above 2^-100 no term of a bound
    // is so small that its own rounding counts.
    __device__ __forceinline__ bool may_exceed(float most, const Numbers& x) const {
        float step = 0.0f;
#pragma unroll
        for (int i = 0; i < kElements; i++) step = fmaxf(step, fabsf(x.m[i]) * fminf(rsqrt_approx(x.v[i]), steepest));
        return !(usual && most >= 7.888609052210118e-31f && largest(0.0f, x.p) * of_param + step * of_step < most);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    adam_states_amax(const __grid_constant__ Table table, int tensors, const __grid_constant__ Scalars scalars,
                     unsigned* amaxes) {
    __shared__ unsigned shared[3][kThreads / 32];
    const Entry& t = tensor_of_block<CAPACITY>(table.tensors, tensors);
    unsigned* slots = amaxes + 3 * t.index;
    const bool with_param = PARAM == kScaledMaster || !scalars.decoupled;
    long long at = first_of(t, blockIdx.x);
    const Rates rates(scalars.lr, scalars.c1, scalars.c2, scalars.eps);
    const Bound bound(scalars, rates);
    const Scales scales(t);
    float param = 0.0f, exp_avg = 0.0f, exp_avg_sq = 0.0f, known = 0.0f;
    if constexpr (PARAM == kScaledMaster) known = __uint_as_float(*static_cast<volatile unsigned*>(slots));
#pragma unroll 1
    for (int tile = 0; tile < kTiles; tile++, at += kThreads * kElements) {
        // What lies behind the end is zeros, and their new numbers, zero or NaN, are not the largest.
        Raw raw = {};
        load(raw, t, at, with_param);
        Numbers x;
        decode(x, raw, scales);
        update_moments(x, scalars);
        if constexpr (is_scaled(FIRST)) exp_avg = largest(exp_avg, x.m);
        if constexpr (is_scaled(SECOND)) exp_avg_sq = largest(exp_avg_sq, x.v);
        if constexpr (PARAM == kScaledMaster) {
            if (__any_sync(0xFFFFFFFF, bound.may_exceed(known, x))) {
                update_any(x, scalars, rates);
                param = largest(param, x.p);
                known = fmaxf(known, __uint_as_float(__reduce_max_sync(0xFFFFFFFF, __float_as_uint(param))));
            }
        }
    }
    if constexpr (PARAM == kScaledMaster) commit(slots, param, shared[0]);
    if constexpr (is_scaled(FIRST)) commit(slots + 1, exp_avg, shared[1]);
    if constexpr (is_scaled(SECOND)) commit(slots + 2, exp_avg_sq, shared[2]);
}

// 1 / scale of what is written, by three threads for the block.
__device__ __forceinline__ void invert_scales(float (&inverse)[3], const float* amax) {
    if constexpr (PARAM == kScaledMaster)
        if (threadIdx.x == 0) inverse[0] = 1.0f / scale_of<kFp16Scaled>(amax[0]);
    if constexpr (is_scaled(FIRST))
        if (threadIdx.x == 32) inverse[1] = 1.0f / scale_of<FIRST>(amax[1]);
    if constexpr (is_scaled(SECOND))
        if (threadIdx.x == 64) inverse[2] = 1.0f / scale_of<SECOND>(amax[2]);
    if constexpr (kScaled) __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    adam_states(const __grid_constant__ Table table, int tensors, const __grid_constant__ Scalars scalars,
                const float* amaxes, const float* control, int unscale) {
    __shared__ float inverse[3];
    if (control != nullptr && control[4] != 0.0f) return;
    const Entry& t = tensor_of_block<CAPACITY>(table.tensors, tensors);
    long long at = first_of(t, blockIdx.x);
    const bool given = control != nullptr;
    const Rates rates(given ? control[0] : scalars.lr, given ? control[1] : scalars.c1, given ? control[2] : scalars.c2,
                      scalars.eps);
    const Scales scales(t);
    invert_scales(inverse, amaxes + 3 * t.index);
#pragma unroll 1
    for (int tile = 0; tile < kTiles && at < t.count; tile++, at += kThreads * kElements) {
        const bool all = whole(t, at);
        Raw raw = {};
        load(raw, t, at, true);
        Numbers x;
        decode(x, raw, scales);
        if (unscale) {
#pragma unroll
            for (int i = 0; i < kElements; i++) x.g[i] = x.g[i] * control[3];
            store_codes<kWide>(t.grad, encode<kWide>(x.g), at, t.count, all);
        }
        update_moments(x, scalars);
        update(x, scalars, rates);
        store_codes<FIRST>(t.exp_avg, encode<FIRST>(x.m, inverse[1]), at, t.count, all);
        store_codes<SECOND>(t.exp_avg_sq, encode<SECOND>(x.v, inverse[2]), at, t.count, all);
        store_param(x.p, t, inverse[0], at, all);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    adam_states_scales(const __grid_constant__ Table table, int tensors, const float* amaxes) {
    const int i = static_cast<int>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= tensors) return;
    const Entry& t = table.tensors[i];
    const float* amax = amaxes + 3 * t.index;
    if constexpr (PARAM == kScaledMaster) *t.param_scale = scale_of<kFp16Scaled>(amax[0]);
    if constexpr (is_scaled(FIRST)) *t.exp_avg_scale = scale_of<FIRST>(amax[1]);
    if constexpr (is_scaled(SECOND)) *t.exp_avg_sq_scale = scale_of<SECOND>(amax[2]);
}
