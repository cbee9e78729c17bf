// kernels/ptx/turn.cuh on a CPU.
#pragma once

namespace twin {

inline void wait_for_turn(const unsigned* word, unsigned turn) {
    while (*word != turn) simulator::yield("its turn");
}
inline void wait_for_turn_together(const unsigned* word, unsigned turn) { wait_for_turn(word, turn); }
inline void pass_turn(unsigned* word, unsigned turn) {
    *word = turn;
    simulator::progressed();
}

}  // namespace twin
