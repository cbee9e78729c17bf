// elect.sync: true in one thread of a converged warp. ptxas then knows that a single thread runs the guarded code;
// otherwise it puts a loop over the threads around each bulk copy.
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
