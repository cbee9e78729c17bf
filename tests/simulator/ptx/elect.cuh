// kernels/ptx/elect.cuh on a CPU.
#pragma once

namespace twin {

inline bool elect_one() { return simulator::self->lane == 0; }

}  // namespace twin
