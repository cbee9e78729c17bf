// A row in the registers of kRowWarps warps. Warp p holds elements 1024 p .. + 1023, so that its sum is a subtree of
// the row's; its lane l holds 256 i + 8 l .. + 7 of those, in stripe i < 4. +0.0 beyond the end.
//
// kWhole: rows have 1024 * kRowWarps elements, a constant, and no lane asks where the row ends.
#pragma once
#include "norm_row.cuh"
#include "ptx/barrier.cuh"

namespace twin {

// What follows from a configuration: kLayerNorm, kRowWarps and kWhole.
template <class Config>
struct RegisterRows {
    static constexpr bool kLayerNorm = Config::kLayerNorm;
    static constexpr int kRowWarps = Config::kRowWarps;
    static constexpr int kStripes = 4;

    struct Packed {
        Eight stripe[kStripes];
    };

    // One lane's part of rows.
    struct Held {
        int first, hidden;  // the lane's first element; the row's length

        __device__ __forceinline__ explicit Held(int length)
            : first(threadIdx.x / 32 % kRowWarps * kStripe * kStripes + threadIdx.x % 32 * 8),
              hidden(Config::kWhole ? kStripe * kStripes * kRowWarps : length) {}

        __device__ __forceinline__ bool inside(int stripe) const {
            return Config::kWhole || first + kStripe * stripe < hidden;
        }

        __device__ __forceinline__ Packed load(const wide_t* x, int row) const {
            const wide_t* const from = x + static_cast<size_t>(row) * hidden + first;
            Packed packed;
#pragma unroll
            for (int i = 0; i < kStripes; i++) packed.stripe[i] = inside(i) ? load8(from + kStripe * i) : Eight{};
            return packed;
        }
    };

    // Where the warps of a row exchange their sums. One set is for the mean and one for the squares; rmsnorm alternates.
    // Between two writes to a set lies the barrier of the other's sum.
    using Slots = Leaves<kRowWarps>[2];

    // The row's sum from a lane's sums of its stripes; every lane of its warps gets it.
    static __device__ __forceinline__ float row_sum(const float (&stripes)[kStripes], Leaves<kRowWarps>& slots,
                                                    int barrier) {
        float sum = lane_sum(stripes);
#pragma unroll
        for (int bit = 1; bit < kStripes; bit *= 2) sum = sum + __shfl_xor_sync(kAllLanes, sum, bit);
        if constexpr (kRowWarps == 1) return sum;
        if (threadIdx.x % 32 == 0) slots.sum[threadIdx.x / 32 % kRowWarps] = sum;
        barrier_sync<32 * kRowWarps>(barrier);
        return tree<kRowWarps>(slots.sum);
    }

    struct Row {
        float v[kStripes][8];  // centered
        float mean, rstd;

        __device__ __forceinline__ Row(const Packed& packed, const Held& held, float eps, Slots& slots, int turn,
                                       int barrier)
            : mean(0.0f) {
            const float n = static_cast<float>(held.hidden);
            float sums[kStripes];
#pragma unroll
            for (int i = 0; i < kStripes; i++) {
#pragma unroll
                for (int j = 0; j < 8; j++) v[i][j] = widen(packed.stripe[i], j);
                sums[i] = tree8(v[i]);
            }
            if constexpr (kLayerNorm) mean = row_sum(sums, slots[0], barrier) / n;
#pragma unroll
            for (int i = 0; i < kStripes; i++) {
                float squares[8];
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    v[i][j] = centered<kLayerNorm>(v[i][j], mean);
                    squares[j] = v[i][j] * v[i][j];
                }
                sums[i] = held.inside(i) ? tree8(squares) : 0.0f;
            }
            rstd = 1.0f / sqrtf(row_sum(sums, slots[kLayerNorm ? 1 : turn], barrier) / n + eps);
        }

        __device__ __forceinline__ void store_statistics(float* means, float* rstds, int row, const Held& held) const {
            if (held.first != 0) return;
            if (kLayerNorm) means[row] = mean;
            rstds[row] = rstd;
        }

        // y, 8 columns at a time: store(i, y) for the stripes inside the row.
        template <class Store>
        __device__ __forceinline__ void for_each_output(const float* parameters, const Held& held, Store store) const {
#pragma unroll
            for (int i = 0; i < kStripes; i++) {
                if (held.inside(i)) {
                    const int at = held.first + kStripe * i;
                    float gamma[8], beta[8], y[8];
                    staged8(parameters, held.hidden, at, gamma);
                    if (kLayerNorm) staged8(parameters + held.hidden, held.hidden, at, beta);
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        y[j] = (v[i][j] * rstd) * gamma[j];
                        if (kLayerNorm) y[j] = y[j] + beta[j];
                    }
                    store(i, y);
                }
            }
        }
    };

    static constexpr int kParameters = kLayerNorm ? 2 : 1;  // gamma, and layernorm's beta

    static __device__ __forceinline__ void stage8(float* shared, int hidden, int at, const float (&v)[8]) {
        float4* const to = reinterpret_cast<float4*>(shared + at / 2);
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[hidden / 8] = make_float4(v[4], v[5], v[6], v[7]);
    }

    // gamma and beta (`hidden` floats each; rmsnorm has no beta) as fp32 in shared memory: [gamma, beta][first or second 4
    // of 8 columns][8 columns][4]. The halves are apart so that a warp's 16-byte reads touch all banks.
    static __device__ __forceinline__ void stage_parameters(float* shared, const void* weight, const void* bias,
                                                            int type, bool zero_centered, int hidden) {
        for (int at = threadIdx.x * 8; at < hidden; at += blockDim.x * 8) {
#pragma unroll
            for (int which = 0; which < kParameters; which++) {
                float v[8];
                affine8(which == 0, which == 0 ? weight : bias, type, zero_centered, at, v);
                stage8(shared + which * hidden, hidden, at, v);
            }
        }
        __syncthreads();
    }

    // The same where a thread loads several: kAtOnce times 8 of both are in flight before one is used, so that a latency,
    // often DRAM's, is paid once.
    template <int kType, int kAtOnce = 2>
    static __device__ __forceinline__ void stage_at_once(float* shared, const void* weight, const void* bias,
                                                         bool zero_centered, int hidden) {
        const int step = blockDim.x * 8;
        for (int first = threadIdx.x * 8; first < hidden; first += kAtOnce * step) {
            float v[kAtOnce][kParameters][8];
#pragma unroll
            for (int k = 0; k < kAtOnce; k++)
#pragma unroll
                for (int which = 0; which < kParameters; which++) {
                    const void* const from = which == 0 || bias == nullptr ? weight : bias;
                    parameters8<kType>(from, min(first + k * step, hidden - 8), v[k][which]);
                }
#pragma unroll
            for (int k = 0; k < kAtOnce; k++) {
                const int at = first + k * step;
                if (at >= hidden) break;
#pragma unroll
                for (int which = 0; which < kParameters; which++) {
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        if (which == 0 && zero_centered) v[k][which][j] = v[k][which][j] + 1.0f;
                        if (which == 1 && bias == nullptr) v[k][which][j] = -0.0f;  // as affine8
                    }
                    stage8(shared + which * hidden, hidden, at, v[k][which]);
                }
            }
        }
        __syncthreads();
    }

    static __device__ __forceinline__ void staged8(const float* shared, int hidden, int at, float (&out)[8]) {
        const float4* const from = reinterpret_cast<const float4*>(shared + at / 2);
        const float4 low = from[0], high = from[hidden / 8];
        out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
        out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
    }
};

}  // namespace twin
