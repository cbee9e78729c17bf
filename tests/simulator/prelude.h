// CUDA C++ as a C++ compiler for CPUs reads it: what a kernel file finds where NVRTC has its built-in names.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "engine.h"

using std::isfinite;
using std::isinf;
using std::isnan;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __constant__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
// A block runs on one thread of the operating system, so its shared memory is that thread's.
#define __shared__ static __thread

struct uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
struct __align__(16) double2 { double x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define threadIdx (simulator::self->index)
#define blockIdx (simulator::self->block_index)
#define blockDim (simulator::self->block_size)
#define gridDim (simulator::self->grid_size)

// --- words ------------------------------------------------------------------------------------------------------------
template <class To, class From>
inline To twin_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(unsigned x) { return twin_bits<float>(x); }
inline float __int_as_float(int x) { return twin_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return twin_bits<unsigned>(x); }
inline int __float_as_int(float x) { return twin_bits<int>(x); }
inline double __longlong_as_double(long long x) { return twin_bits<double>(x); }
inline long long __double_as_longlong(double x) { return twin_bits<long long>(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned pick = selector >> 4 * i & 15;
        unsigned byte = bytes >> 8 * (pick & 7) & 255;
        if (pick & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<uint64_t>(x) * y >> 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }

// --- arithmetic: each operation is rounded once (-ffp-contract=off) ---------------------------------------------------
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }

// The larger, or the one that is a number; +0 is larger than -0.
template <class T>
inline T twin_larger(T x, T y) {
    if (x != x) return y;
    if (y != y) return x;
    if (x == y) return std::signbit(x) ? y : x;
    return x > y ? x : y;
}
inline float twin_fmaxf(float x, float y) { return twin_larger(x, y); }
inline float twin_fminf(float x, float y) { return -twin_larger(-x, -y); }
inline double twin_fmax(double x, double y) { return twin_larger(x, y); }
inline double twin_fmin(double x, double y) { return -twin_larger(-x, -y); }
#define fmaxf twin_fmaxf
#define fminf twin_fminf
#define fmax twin_fmax
#define fmin twin_fmin
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    const T x = static_cast<T>(a), y = static_cast<T>(b);
    if constexpr (std::is_floating_point_v<T>) return twin_larger(x, y);
    else return x > y ? x : y;
}
template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    const T x = static_cast<T>(a), y = static_cast<T>(b);
    if constexpr (std::is_floating_point_v<T>) return -twin_larger(-x, -y);
    else return x < y ? x : y;
}

// --- memory -----------------------------------------------------------------------------------------------------------
inline unsigned __cvta_generic_to_shared(const void* pointer) { return simulator::to_shared(pointer); }
inline void* __cvta_shared_to_generic(size_t address) { return simulator::from_shared(address, 1); }
template <class T>
inline T __ldg(const T* pointer) { return *pointer; }
template <class T, class U>
inline T atomicAdd(T* to, U value) {
    const T old = *to;
    *to = old + static_cast<T>(value);
    simulator::progressed();
    return old;
}
template <class T, class U>
inline T atomicMax(T* to, U value) {
    const T old = *to;
    if (static_cast<T>(value) > old) *to = static_cast<T>(value);
    simulator::progressed();
    return old;
}
template <class T, class U>
inline T atomicOr(T* to, U value) {
    const T old = *to;
    *to = old | static_cast<T>(value);
    simulator::progressed();
    return old;
}

// --- threads of a block and of a warp ---------------------------------------------------------------------------------
inline void __syncthreads() { simulator::block_barrier(0, 0); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFF) { simulator::exchange(mask, 0); }

template <class T>
inline T twin_of_lane(unsigned mask, T value, unsigned lane) {
    static_assert(sizeof(T) <= 8);
    uint64_t word = 0;
    memcpy(&word, &value, sizeof value);
    word = simulator::exchange(mask, word)[lane];
    memcpy(&value, &word, sizeof value);
    return value;
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int other, int width = 32) {
    const unsigned lane = simulator::self->lane, from = lane ^ other;
    return twin_of_lane(mask, value, from / width > lane / width ? lane : from);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const unsigned lane = simulator::self->lane;
    return twin_of_lane(mask, value, lane % width + delta >= static_cast<unsigned>(width) ? lane : lane + delta);
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    const unsigned lane = simulator::self->lane;
    return twin_of_lane(mask, value, lane / width * width + static_cast<unsigned>(from) % width);
}
template <class T, class Join>
inline T twin_reduce(unsigned mask, T value, Join join) {
    const uint64_t* words = simulator::exchange(mask, static_cast<uint64_t>(value));
    T result{};
    bool first = true;
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        const T one = static_cast<T>(words[lane]);
        result = first ? one : join(result, one);
        first = false;
    }
    return result;
}
template <class T>
inline T __reduce_max_sync(unsigned mask, T value) { return twin_reduce(mask, value, [](T a, T b) { return a > b ? a : b; }); }
template <class T>
inline T __reduce_add_sync(unsigned mask, T value) { return twin_reduce(mask, value, [](T a, T b) { return T(a + b); }); }
inline int __any_sync(unsigned mask, int value) { return twin_reduce(mask, unsigned(value != 0), [](unsigned a, unsigned b) { return a | b; }); }
inline int __all_sync(unsigned mask, int value) { return twin_reduce(mask, unsigned(value != 0), [](unsigned a, unsigned b) { return a & b; }); }
