// kernels/ptx/cp_async.cuh on a CPU.
#pragma once

namespace twin {

template <bool kThroughL1 = false>
inline void cp_async_16(void* shared, const void* global) { simulator::copy_16(shared, global, true); }
inline void cp_async_16_or_zeros(void* shared, const void* global, bool there) { simulator::copy_16(shared, global, there); }
inline void cp_async_16(void* shared, const void* global, unsigned long long) { simulator::copy_16(shared, global, true); }
inline void cp_async_commit_group() { simulator::copy_commit(); }
template <int kCount>
inline void cp_async_wait_group() { simulator::copy_wait(kCount); }

}  // namespace twin
