// kernels/ptx/count.cuh on a CPU.
#pragma once

namespace twin {

inline unsigned count_arrival(unsigned* word) {
    const unsigned before = __atomic_fetch_add(word, 1u, __ATOMIC_ACQ_REL);
    simulator::progressed();
    return before;
}

}  // namespace twin
