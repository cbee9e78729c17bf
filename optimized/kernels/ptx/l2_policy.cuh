// How long L2 is to keep a line. PTX ISA, "Data Movement and Conversion Instructions: createpolicy".
#pragma once

namespace twin {

// For what a kernel writes and another one reads soon.
__device__ __forceinline__ unsigned long long evict_last() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// For what nobody reads again.
__device__ __forceinline__ unsigned long long evict_first() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void store(float* to, const float (&v)[1], unsigned long long policy) {
    asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(to), "f"(v[0]), "l"(policy) : "memory");
}

__device__ __forceinline__ void store(float* to, const float (&v)[2], unsigned long long policy) {
    asm volatile("st.global.L2::cache_hint.v2.f32 [%0], {%1, %2}, %3;" ::"l"(to), "f"(v[0]), "f"(v[1]), "l"(policy)
                 : "memory");
}

}  // namespace twin
