// elect.sync: one thread of a converged warp. ptxas then knows that a single thread runs what is guarded by it, and
// leaves out the loop over the threads that it puts around each bulk copy otherwise.
#pragma once

namespace twin {

__device__ __forceinline__ bool elect_one() {
    unsigned elected;
    asm volatile(
        "{\n .reg .pred elected;\n"
        " elect.sync _|elected, 0xFFFFFFFF;\n"
        " selp.u32 %0, 1, 0, elected;\n}"
        : "=r"(elected));
    return elected != 0;
}

}  // namespace twin
