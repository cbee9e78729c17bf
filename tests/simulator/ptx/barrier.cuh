// kernels/ptx/barrier.cuh on a CPU.
#pragma once

namespace twin {

template <int kThreads>
inline void barrier_sync(int id) { simulator::block_barrier(id, kThreads); }

}  // namespace twin
