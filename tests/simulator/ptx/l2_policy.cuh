// kernels/ptx/l2_policy.cuh on a CPU.
#pragma once

namespace twin {

inline unsigned long long evict_last() { return 0; }
inline unsigned long long evict_first() { return 0; }
inline void store(float* to, const float (&v)[1], unsigned long long) { to[0] = v[0]; }
inline void store(float* to, const float (&v)[2], unsigned long long) { to[0] = v[0], to[1] = v[1]; }

}  // namespace twin
