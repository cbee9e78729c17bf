// kernels/ptx/cluster.cuh on a CPU.
#pragma once

namespace twin {

inline unsigned cluster_rank() { return simulator::cluster_rank(); }
inline unsigned map_to_rank(unsigned address, unsigned rank) { return (rank + 1) << 24 | (address & 0xFFFFFF); }
inline void cluster_arrive() { simulator::cluster_arrive(); }
inline void cluster_arrive_relaxed() { simulator::cluster_arrive(); }
inline void cluster_wait() { simulator::cluster_wait(); }

}  // namespace twin
