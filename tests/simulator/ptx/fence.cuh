// kernels/ptx/fence.cuh on a CPU.
#pragma once

namespace twin {

inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}
inline void fence_proxy_async_all() {}

}  // namespace twin
