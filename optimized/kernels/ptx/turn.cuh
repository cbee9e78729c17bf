// A word of global memory by which blocks take turns.
#pragma once

namespace twin {

// Returns when the word is `turn`; what was written before it was passed on can be read.
__device__ __forceinline__ void wait_for_turn(const unsigned* word, unsigned turn) {
    unsigned now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    } while (now != turn);
}

// The same for a whole warp. The vote shows the compiler that all lanes leave the loop together. Otherwise it would keep
// addresses out of uniform registers in the code that follows.
__device__ __forceinline__ void wait_for_turn_together(const unsigned* word, unsigned turn) {
    unsigned now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    } while (!__all_sync(0xFFFFFFFF, now == turn));
}

// What this thread has written, or waited for, is seen by whoever waits for `turn`.
__device__ __forceinline__ void pass_turn(unsigned* word, unsigned turn) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(turn) : "memory");
}

}  // namespace twin
