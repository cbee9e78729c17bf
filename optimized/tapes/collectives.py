"""A collective of torch.distributed as an op of ours: on a tape, and left out by the dry pass of the compiler."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from optimized.cuda import launch
from optimized.tapes.memory import TensorRef, tensors_of

# The default process group in which the collectives on tapes were recorded; None before the first.
world: Callable[[], Any] | None = None
made = 0  # collectives, of all threads: a call that is measured has some where this grows


def outdated() -> bool:
    """Whether tapes have collectives of a default process group that is gone; once.

    They have ranks of peers as numbers, and the names of groups. After `destroy_process_group` these begin anew.
    """
    global world
    if world is None or world() is dist.group.WORLD:
        return False
    world = None
    return True


class Collective(NamedTuple):
    """One that is done again."""

    func: Callable[..., Any]
    args: list[Any]
    capturable: bool

    def moved(self, move: Callable[[int], int]) -> "Collective":
        """The same with tensors at other addresses."""
        return self._replace(args=TensorRef.moved(self.args, move))

    def play(self, stream: int) -> None:
        with _disable_current_modes():
            self.func(*tensors_of(self.args))


def beside_launches(function: Callable[..., Any], args: list[Any]) -> None:
    """What makes the calls of `reference.support.groups.collective`: those on a GPU become entries of a tape."""
    first = args[0][0] if isinstance(args[0], list) else args[0]
    if first.is_cuda:
        collective(function, args)
    else:
        function(*args)


def collective(function: Callable[..., Any], args: list[Any]) -> None:
    """Call `function(*args)`, and again wherever this call's tape is played.

    It is what the CUDA side of an op consists of, besides allocating its results. One rank may play while
    another records: both make the same collectives in the same order.

    Args:
        function: reads and writes tensors of `args` on torch's current stream, as `dist.all_reduce` does, and does what
            depends on no value. It returns True if it may become part of a CUDA graph, as NCCL's calls and messages
            between GPUs of one host may (`reference.parallel.messages`), and gloo's may not.
        args: tensors, lists of them, and what is no tensor, such as the name of a process group
            (`reference.support.groups`).
    """
    global world, made
    if launch.collects():
        return
    with _disable_current_modes():  # what it does inside is one entry of a tape
        capturable = function(*args) is True
    made += 1
    tape = launch.tape()
    if tape is not None:
        if world is None:
            ours = dist.group.WORLD
            world = (lambda: None) if ours is None else weakref.ref(ours)
        tape.append(Collective(function, TensorRef.of(args), capturable))
