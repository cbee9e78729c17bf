"""Tapes: a layer's kernels are launched again without running its Python.

The launches of a pair of functions (`reference.nn.core.autograd`) follow from its plan and from the shapes, dtypes and
addresses of its tensors. So a call that agrees in all of them with an earlier one makes the same launches, and a loop
over a list of launches can make them: with other addresses in their arguments, if only these differ. Such a loop skips
the layer's Python, which dominates small layers.

    watch.py     what a function does on the GPU besides launching
    memory.py    where its tensors lie
    launches.py  a tape: its launches, which are made again one by one or as a CUDA graph
    collectives.py  a collective of torch.distributed on it
    relocation.py  a tape at other addresses
    calls.py     which calls agree: the one cache of tapes
    player.py    runs the pairs of `reference.nn.core.autograd`

docs/tapes.md explains it as a whole.
"""

from optimized.tapes.calls import relaunch
from optimized.tapes.collectives import collective
from optimized.tapes.launches import Launches
from optimized.tapes.player import Player

__all__ = ["Launches", "Player", "collective", "relaunch"]
