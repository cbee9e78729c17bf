// kernels/ptx/bulk.cuh on a CPU.
#pragma once

namespace twin {

inline void bulk_load(unsigned destination, const void* from, unsigned bytes, unsigned barrier) {
    simulator::bulk_load(destination, from, bytes, barrier);
}
inline void bulk_store(void* to, unsigned source, unsigned bytes) { simulator::bulk_store(to, source, bytes, false); }
inline void bulk_add(float* to, unsigned source, unsigned bytes) { simulator::bulk_store(to, source, bytes, true); }
inline void bulk_commit() { simulator::bulk_commit(); }
template <int kPending>
inline void bulk_wait_read() { simulator::bulk_wait(kPending, true); }
template <int kPending>
inline void bulk_wait() { simulator::bulk_wait(kPending, false); }

}  // namespace twin
