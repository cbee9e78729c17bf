"""Replay: a layer's kernels launched again without running its Python.

What a pair of functions (`reference.nn.autograd`) launches follows from the shapes and dtypes of its tensors, from its
plan, and from addresses. So a call that agrees in all of them with an earlier one makes the same launches, and a loop
over a list makes them in a fraction of the time, which for a layer of a few hundred tokens is most of its time.

    watch.py     what a function does on the GPU besides launching
    memory.py    where its tensors lie
    launches.py  a tape: its launches, made again one by one or as a CUDA graph
    calls.py     which calls agree: the one cache of tapes
    player.py    runs the pairs of `reference.nn.autograd`

`docs/replay.md` has the whole picture.
"""

from optimized.replay.calls import relaunch
from optimized.replay.launches import Launches
from optimized.replay.player import Player

__all__ = ["Launches", "Player", "relaunch"]
