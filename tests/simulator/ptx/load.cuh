// kernels/ptx/load.cuh on a CPU.
#pragma once

namespace twin {

template <class T, class... Words>
inline void fetch(const T* pointer, Words&... words) {
    unsigned found[sizeof...(words)], i = 0;
    if (reinterpret_cast<uintptr_t>(pointer) % sizeof found) simulator::fail("a load of %zu bytes is not aligned", sizeof found);
    memcpy(found, pointer, sizeof found);
    ((words = found[i++]), ...);
}
template <class T>
inline void load_read_only(unsigned& a, unsigned& b, unsigned& c, unsigned& d, const T* pointer) { fetch(pointer, a, b, c, d); }
template <class T>
inline void load_read_only(unsigned& a, unsigned& b, const T* pointer) { fetch(pointer, a, b); }
template <class T>
inline void load_if(unsigned (&words)[4], const T* pointer, bool exists) {
    for (unsigned& word : words) word = 0;
    if (exists) fetch(pointer, words[0], words[1], words[2], words[3]);
}
template <class T>
inline void load_if(unsigned (&words)[2], const T* pointer, bool exists) {
    for (unsigned& word : words) word = 0;
    if (exists) fetch(pointer, words[0], words[1]);
}

}  // namespace twin
