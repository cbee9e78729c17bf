// Rows of a norm: parameters, and the written order of a row's sum.
//
// The order (`reference/ops/norm.py`): the complete binary tree over neighbours, the row being padded with +0.0 to a
// power of two, 1024 at least. A lane adds its 8 neighbours, shuffles over 1, 2, 4, 8, 16 lanes make that 256, and
// the sums of 256 are added in pairs again. (Addition commutes, so a butterfly gives every lane the same bits.)
//
// KIND: 0 layernorm, 1 rmsnorm. WIDE: the element type (wide.cuh). A parameter's type is a run-time argument with
// WIDE's numbers: 0 fp32, 1 bf16, 2 fp16.
#pragma once
#include "wide.cuh"
#include "wide_store.cuh"

constexpr unsigned ALL = 0xFFFFFFFFu;
constexpr int STRIPE = 256;  // elements of a row that a warp holds at a time, 8 a lane

// 8 neighbouring parameters of type TYPE, widened. They are read by every row: kept in L1.
template <int TYPE>
__device__ __forceinline__ void parameters8(const void* parameters, int at, float (&out)[8]) {
    if constexpr (TYPE == 0) {
        const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(parameters) + at);
        const float4 low = __ldg(from), high = __ldg(from + 1);
        out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
        out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
    } else {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(parameters) + at));
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned word = words[i / 2];
            if constexpr (TYPE == 1)
                out[i] = __uint_as_float(i & 1 ? word & 0xFFFF0000u : word << 16);
            else
                out[i] = cvt_f32_f16(static_cast<unsigned short>(i & 1 ? word >> 16 : word & 0xFFFFu));
        }
    }
}

// One parameter of a type known at run time, widened.
__device__ __forceinline__ float parameter(const void* parameters, int type, int at) {
    if (type == 0) return __ldg(static_cast<const float*>(parameters) + at);
    const unsigned short word = __ldg(static_cast<const unsigned short*>(parameters) + at);
    return type == 1 ? __uint_as_float(static_cast<unsigned>(word) << 16) : cvt_f32_f16(word);
}

__device__ __forceinline__ float tree8(const float (&v)[8]) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

__device__ constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

// The sum of a row from the lanes' sums of 8 in stripes 0 .. V - 1; every lane gets it. Lanes trade halves, so that
// V stripes cost about V shuffles instead of 5 V: after the level of `bit`, lanes with that bit hold odd stripes.
template <int V>
__device__ __forceinline__ float row_sum(const float (&stripes)[V]) {
    constexpr int N = power_of_two(V);
    const int lane = threadIdx.x % 32;
    float v[N];
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = i < V ? stripes[i < V ? i : 0] : 0.0f;
#pragma unroll
    for (int n = N / 2, bit = 1; n > 0; n /= 2, bit *= 2) {
        const bool odd = lane & bit;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float keep = odd ? v[2 * i + 1] : v[2 * i];
            const float give = odd ? v[2 * i] : v[2 * i + 1];
            v[i] = keep + __shfl_xor_sync(ALL, give, bit);
        }
    }
#pragma unroll
    for (int bit = N; bit < 32; bit *= 2) v[0] = v[0] + __shfl_xor_sync(ALL, v[0], bit);
    // The low bits of the lane's number are now its stripe's: the tree goes on over the stripes.
#pragma unroll
    for (int bit = 1; bit < N; bit *= 2) v[0] = v[0] + __shfl_xor_sync(ALL, v[0], bit);
    return v[0];
}

// A row as ROW_WARPS warps hold it: warp p has elements 1024 p .. + 1023, lane l of it 256 i + 8 l .. + 7 of those, in
// stripe i < 4, so that a warp's sum is a subtree of the row's. +0.0 beyond the end.
constexpr int STRIPES = 4;

struct Packed {
    Eight stripe[STRIPES];

    // `row` and `hidden` count from the lane's first element.
    __device__ __forceinline__ void load(const wide_t* row, int hidden) {
#pragma unroll
        for (int i = 0; i < STRIPES; ++i) stripe[i] = STRIPE * i < hidden ? load8(row + STRIPE * i) : Eight{};
    }
};

struct Values {
    float v[STRIPES][8];

    __device__ __forceinline__ explicit Values(const Packed& packed) {
#pragma unroll
        for (int i = 0; i < STRIPES; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] = widen(packed.stripe[i], j);
    }
};

// x - mean; rmsnorm: x.
__device__ __forceinline__ float centered(float x, float mean) {
#if KIND == 0
    return x - mean;
#else
    return x;
#endif
}

// Continue the tree over the SPAN warps of a row, +0.0 beyond the last; every lane gets the sum. `slots` are two sets of
// SPAN, used in turn: a set is written again only after the barrier of the sum between.
template <int SPAN>
__device__ __forceinline__ float sum_over_warps(float sum, float (&slots)[2][SPAN], int& turn, int barrier) {
    if constexpr (SPAN == 1) return sum;
    const int lane = threadIdx.x % 32;
    float* const mine = slots[turn];
    turn ^= 1;
    if (lane == 0) mine[threadIdx.x / 32 % SPAN] = sum;
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(32 * SPAN) : "memory");
    constexpr int LEAVES = power_of_two(SPAN);
    float v = lane % LEAVES < SPAN ? mine[lane % LEAVES] : 0.0f;
#pragma unroll
    for (int bit = 1; bit < LEAVES; bit *= 2) v = v + __shfl_xor_sync(ALL, v, bit);
    return v;
}

struct Statistics {
    float mean, rstd;
};

// The row's statistics; leaves x - mean (rmsnorm: x) in `row`. `left`: elements from the lane's first to the end.
template <int SPAN>
__device__ __forceinline__ Statistics center(
    Values& row, int left, int hidden, float eps, float (&slots)[2][SPAN], int& turn, int barrier) {
    const float n = static_cast<float>(hidden);
    Statistics s = {0.0f, 0.0f};
    float sums[STRIPES];
#if KIND == 0
#pragma unroll
    for (int i = 0; i < STRIPES; ++i) sums[i] = tree8(row.v[i]);
    s.mean = sum_over_warps<SPAN>(row_sum<STRIPES>(sums), slots, turn, barrier) / n;
#pragma unroll
    for (int i = 0; i < STRIPES; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) row.v[i][j] = row.v[i][j] - s.mean;
#endif
#pragma unroll
    for (int i = 0; i < STRIPES; ++i) {
        float squares[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) squares[j] = row.v[i][j] * row.v[i][j];
        sums[i] = STRIPE * i < left ? tree8(squares) : 0.0f;
    }
    const float mean_square = sum_over_warps<SPAN>(row_sum<STRIPES>(sums), slots, turn, barrier) / n;
    s.rstd = 1.0f / sqrtf(mean_square + eps);
    return s;
}

// gamma and beta as fp32 in shared memory: [gamma, beta][first or second 4 of 8 columns][8 columns][4], the halves apart
// so that a warp's 16-byte reads touch all banks. `hidden` floats each; gamma is weight, or weight + 1.
__device__ __forceinline__ void stage_parameters(
    float* shared, const void* weight, const void* bias, int type, bool zero_centered, int hidden) {
    for (int at = threadIdx.x * 8; at < hidden; at += blockDim.x * 8) {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const void* const from = which == 0 ? weight : bias;
            if (from == nullptr) continue;
            float v[8];
            if (type == 0)
                parameters8<0>(from, at, v);
            else if (type == 1)
                parameters8<1>(from, at, v);
            else
                parameters8<2>(from, at, v);
            if (which == 0 && zero_centered)
#pragma unroll
                for (int j = 0; j < 8; ++j) v[j] = v[j] + 1.0f;
            float4* const to = reinterpret_cast<float4*>(shared + which * hidden + at / 2);
            to[0] = make_float4(v[0], v[1], v[2], v[3]);
            to[hidden / 8] = make_float4(v[4], v[5], v[6], v[7]);
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void staged8(const float* shared, int hidden, int at, float (&out)[8]) {
    const float4* const from = reinterpret_cast<const float4*>(shared + at / 2);
    const float4 low = from[0], high = from[hidden / 8];
    out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
    out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}

// y of a row, 8 columns at a time: store(at, y) for the stripes inside the row; `first` is the lane's first column.
// Without a bias nothing is added.
template <typename Store>
__device__ __forceinline__ void for_each_output(
    const Values& row, float rstd, const float* shared, bool has_bias, int first, int hidden, Store store) {
#pragma unroll
    for (int i = 0; i < STRIPES; ++i) {
        const int at = first + STRIPE * i;
        if (at < hidden) {
            float gamma[8], y[8];
            staged8(shared, hidden, at, gamma);
#pragma unroll
            for (int j = 0; j < 8; ++j) y[j] = (row.v[i][j] * rstd) * gamma[j];
            if (has_bias) {
                float beta[8];
                staged8(shared + hidden, hidden, at, beta);
#pragma unroll
                for (int j = 0; j < 8; ++j) y[j] = y[j] + beta[j];
            }
            store(at, y);
        }
    }
}
