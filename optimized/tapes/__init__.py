"""Tapes: a layer's kernels are launched again without running its Python.

The launches of a pair of functions (`reference.nn.core.autograd`) follow from its plan and from the shapes, dtypes and
addresses of its tensors. So a call that agrees in all of them with an earlier one makes the same launches, and a loop
over a list of launches can make them: with other addresses in their arguments, if only these differ. Such a loop skips
the layer's Python, which dominates small layers.

    tape_recorder.py  records a tape: what a function does on the GPU besides launching, and in which memory
    tape.py           a tape: its launches, and how they are played, one by one or as a CUDA graph
    collectives.py    a collective of torch.distributed on it
    relocation.py     a tape at other addresses
    memory.py         where a call's tensors lie
    call_groups.py    which calls agree, and so whether a call runs, is recorded or is played: the one cache of tapes
    runner.py         runs the pairs of `reference.nn.core.autograd` so

docs/tapes.md explains it as a whole.
"""

from optimized.tapes.call_groups import relaunch
from optimized.tapes.collectives import beside_launches, collective
from optimized.tapes.runner import TapeRunner
from optimized.tapes.tape import Tape

__all__ = ["Tape", "TapeRunner", "beside_launches", "collective", "relaunch"]
