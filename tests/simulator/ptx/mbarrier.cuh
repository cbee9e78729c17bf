// kernels/ptx/mbarrier.cuh on a CPU.
#pragma once

namespace twin {

inline unsigned shared_address(const void* pointer) { return simulator::to_shared(pointer); }
inline void mbarrier_init(unsigned barrier, unsigned arrivals) { simulator::mbarrier_init(barrier, arrivals); }
inline void mbarrier_arrive(unsigned barrier) { simulator::mbarrier_arrive(barrier, 0); }
inline void mbarrier_arrive_cluster(unsigned barrier) { simulator::mbarrier_arrive(barrier, 0); }
inline void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) { simulator::mbarrier_arrive(barrier, bytes); }
inline bool mbarrier_try_wait(unsigned barrier, unsigned parity) { return simulator::mbarrier_try_wait(barrier, parity); }
inline void mbarrier_wait(unsigned barrier, unsigned parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

}  // namespace twin
