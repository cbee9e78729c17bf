// kernels/ptx/wgmma.cuh on a CPU.
#pragma once

namespace twin {

struct E4M3 { static constexpr simulator::Format kFormat = simulator::kE4M3; };
struct E5M2 { static constexpr simulator::Format kFormat = simulator::kE5M2; };
struct BF16 { static constexpr simulator::Format kFormat = simulator::kBF16; };
struct FP16 { static constexpr simulator::Format kFormat = simulator::kFP16; };

template <class A, class B>
constexpr bool same_type = false;
template <class A>
constexpr bool same_type<A, A> = true;

inline void wgmma_fence() {}
inline void wgmma_commit() { simulator::multiply_commit(); }
template <int kPending>
inline void wgmma_wait() { simulator::multiply_wait(kPending); }
template <int kCount>
inline void wgmma_hold(float (&)[kCount]) {}

inline unsigned long long wgmma_descriptor(unsigned address, unsigned leading, unsigned stride) {
    return static_cast<unsigned long long>((address & 0x3FFFF) >> 4) |
           static_cast<unsigned long long>(leading >> 4) << 16 |
           static_cast<unsigned long long>(stride >> 4) << 32 | 1ull << 62;
}

template <class A, class B, int kCount>
inline void wgmma_k32(float (&d)[kCount], unsigned long long a, unsigned long long b, int scale_d) {
    simulator::multiply({A::kFormat, B::kFormat, 2 * kCount, false, false, scale_d != 0, a, b}, d, nullptr);
}
template <class T, int kTransposeA, int kTransposeB, int kCount>
inline void wgmma_k16(float (&d)[kCount], unsigned long long a, unsigned long long b, int scale_d) {
    simulator::multiply({T::kFormat, T::kFormat, 2 * kCount, kTransposeA != 0, kTransposeB != 0, scale_d != 0, a, b}, d, nullptr);
}

}  // namespace twin
