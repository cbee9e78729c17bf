// kernels/ptx/load.cuh on a CPU.
#pragma once

namespace twin {

template <int kWords>
inline void load_read_only(unsigned (&words)[kWords], const void* pointer) {
    if (reinterpret_cast<uintptr_t>(pointer) % sizeof words) simulator::fail("a load of %zu bytes is not aligned", sizeof words);
    memcpy(words, pointer, sizeof words);
}
template <int kWords>
inline void load_if(unsigned (&words)[kWords], const void* pointer, bool exists) {
    for (unsigned& word : words) word = 0;
    if (exists) load_read_only(words, pointer);
}

}  // namespace twin
