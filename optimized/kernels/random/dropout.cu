// out = round(round(m round(keep ? round(x + bias) scale : 0)) + residual), element by element; each part may be absent.
// `backward`: m comes first, and what is dropped is |x| 0, NaN where x, a gradient, is not finite.
//
// Definition, the mask included: reference/ops/random/dropout.py. x, residual, out [rows, hidden], bias [hidden], of one type.
// A thread takes 8 consecutive elements, which share one Philox counter.
//
// `advance` adds 1 to a generator's offset; it is launched after the kernel that has read the state.
//
// Defines: WIDE (0 fp32, 1 bf16, 2 fp16), DEPTH (0 | 1: m, of stochastic depth), PLACED (0 | 1: rng_state's third number
// is that of x's first element in a larger tensor).
#include "common/philox.cuh"
#include "common/wide.cuh"
#include "common/wide_store.cuh"

#ifndef DEPTH
#define DEPTH 0
#endif
#ifndef PLACED
#define PLACED 0
#endif

using namespace twin;

constexpr int kElements = 8;

struct Values {
    float value[kElements];
};

// Elements from `at` on; those from `end` on read as zero. `whole`: all eight exist, at an aligned address.
__device__ __forceinline__ Values load(const wide_t* x, long long at, long long end, bool whole) {
    const Eight loaded = whole ? load8(x + at) : load_elements<kElements>(x + at, end - at);
    Values eight;
#pragma unroll
    for (int i = 0; i < kElements; i++) eight.value[i] = widen(loaded, i);
    return eight;
}

__device__ __forceinline__ void store(wide_t* out, const Values& eight, long long at, long long end, bool whole) {
    if (whole)
        store_eight(out + at, eight.value);
    else
        store_elements(out + at, eight.value, end - at);
}

#if PLACED
// Which of the eight elements from number `index` of a tensor on are kept, a bit for each: of one counter, or of two.
__device__ __forceinline__ unsigned kept_from(const Generator& generator, unsigned long long index,
                                              unsigned threshold) {
    unsigned bits = 0;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        unsigned words[4];
        philox(words, generator, index / kElements + n);
#pragma unroll
        for (int i = 0; i < kElements; i++) bits |= kept(words[i / 2], i % 2, threshold) << (kElements * n + i);
    }
    return bits >> index % kElements;
}
#endif

#if DEPTH
// m of each element's entry, times the element. An entry is `per_entry` consecutive elements.
__device__ __forceinline__ void times_kept(Values& t, const float* m, long long per_entry, long long at,
                                           long long end) {
    long long entry = end >> 32 ? at / per_entry : static_cast<unsigned>(at) / static_cast<unsigned>(per_entry);
    long long within = at - entry * per_entry;
#pragma unroll
    for (int i = 0; i < kElements; i++) {
        if (at + i < end) t.value[i] = widen(narrow(__fmul_rn(t.value[i], m[entry])));
        if (++within == per_entry) {
            within = 0;
            entry++;
        }
    }
}
#endif

// `aligned`: every pointer is at a multiple of 16 bytes. The bias is loaded whole if hidden % 8 == 0 as well.
extern "C" __global__ void __launch_bounds__(256)
    bias_dropout_add(const wide_t* x, const wide_t* bias, const wide_t* residual, wide_t* out, long long count,
                     int hidden, unsigned threshold, float scale, const unsigned long long* rng_state, int aligned,
                     int backward
#if DEPTH
                     ,
                     const float* m, long long per_entry
#endif
    ) {
    const long long at = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * kElements;
    if (at >= count) return;
    const bool whole = aligned && at + kElements <= count;
    Values t = load(x, at, count, whole);
    Values other{};
    if (residual != nullptr) other = load(residual, at, count, whole);
    if (bias != nullptr) {
        // A 32-bit remainder where it suffices: the 64-bit one is a subroutine.
        int column = count >> 32 ? static_cast<int>(at % hidden) : static_cast<int>(static_cast<unsigned>(at) % hidden);
        if (whole && hidden % kElements == 0) {
            const Values b = load(bias, column, hidden, true);
#pragma unroll
            for (int i = 0; i < kElements; i++) t.value[i] = widen(narrow(t.value[i] + b.value[i]));
        } else {
#pragma unroll
            for (int i = 0; i < kElements; i++) {
                t.value[i] = widen(narrow(t.value[i] + widen(bias[column])));
                column = column + 1 == hidden ? 0 : column + 1;
            }
        }
    }
#if DEPTH
    if (backward) times_kept(t, m, per_entry, at, count);
#endif
    if (threshold > 0) {
#if PLACED
        const unsigned keep = kept_from(read_state(rng_state), rng_state[2] + at, threshold);
#else
        unsigned words[4];
        philox(words, read_state(rng_state), at / kElements);
#endif
#pragma unroll
        for (int i = 0; i < kElements; i++) {
            const float scaled = widen(narrow(__fmul_rn(t.value[i], scale)));
            const float nothing = backward ? __fmul_rn(fabsf(t.value[i]), 0.0f) : 0.0f;
#if PLACED
            t.value[i] = keep >> i & 1 ? scaled : nothing;
#else
            t.value[i] = kept(words[i / 2], i % 2, threshold) ? scaled : nothing;
#endif
        }
    }
#if DEPTH
    if (!backward) times_kept(t, m, per_entry, at, count);
#endif
    if (residual != nullptr) {
#pragma unroll
        for (int i = 0; i < kElements; i++) t.value[i] = t.value[i] + other.value[i];
    }
    store(out, t, at, count, whole);
}

extern "C" __global__ void advance(unsigned long long* rng_state) { rng_state[1] += 1; }
