"""Process groups in plans: by name, because plans are hashed, compared, pickled and traced by compilers.

And what more than one room does with their ranks: bytes to send, the largest of amaxes.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist


def name_of(group: Any) -> str:
    """The name of a process group; None is the default one."""
    found: str = dist.distributed_c10d._get_default_group().group_name if group is None else group.group_name
    return found


def group_of(name: str) -> Any:
    """The process group with that name."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,unused-ignore]


def are_open(some: Iterable[Any]) -> bool:
    """Whether there are process groups, and these, or those with these names, are among them; None is the default."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    try:
        return all(group_of(one if isinstance(one, str) else name_of(one)) is not None for one in some)
    except (RuntimeError, ValueError):  # it was destroyed
        return False


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, uint8 `[n]`: a backend can send it that does not know the dtype."""
    if not x.numel():
        return x.new_empty(0, dtype=torch.uint8)
    return (x if x.dim() == 1 else x.view(-1)).view(torch.uint8)


# Its name in later torches than 2.11, which warn of the other.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
"""`all_gather(out, x, group=group)`: the x of all ranks, one after the other."""


class _UnderWay(threading.local):
    """Of each thread: by a tensor's address, what sends it or receives into it (`reference.parallel.ordered_reduce`).

    `ahead`: what was begun to be sent before it is known with what it is multiplied (`reference.parallel.tensor`).
    Whoever makes such calls, for the first time or from a tape, forgets them after an error.
    """

    def __init__(self) -> None:
        self.works: dict[int, Any] = {}
        self.ahead: dict[int, Any] = {}


under_way = _UnderWay()


def abandon() -> None:
    """After an error: forget what was begun to be sent and received, and tell whoever counts messages."""
    for work in under_way.works.values():
        if hasattr(work, "abandoned"):
            work.abandoned()
    under_way.works.clear()
    under_way.ahead.clear()


def _called(function: Callable[..., Any], args: list[Any]) -> None:
    function(*args)


_run: Callable[[Callable[..., Any], list[Any]], None] = _called


def register(run: Callable[[Callable[..., Any], list[Any]], None]) -> None:
    """Let `run(function, args)` make the calls of `collective`: `optimized` repeats them where it plays a tape."""
    global _run
    _run = run


def collective(function: Callable[..., Any], *args: Any) -> None:
    """Call `function(*args)`, which communicates: what pairs of functions (`reference.nn.core.autograd`) do it by.

    The function reads and writes tensors among its arguments, or in lists there, on torch's current stream, and does
    what depends on no value. Its first argument is such a tensor or list. It returns True if all that it did is work of
    streams that a CUDA graph may hold; anything else is dropped.
    """
    _run(function, list(args))


def largest(amaxes: torch.Tensor, group: Any) -> None:
    """Replace contiguous fp32 amaxes, from +0 on, by their maximum over the ranks of a process group.

    Their words are compared as integers, as by `twin::amax`: a maximum of floats has no order that all backends share
    if one is NaN.
    """
    dist.all_reduce(amaxes.view(torch.int32), op=dist.ReduceOp.MAX, group=group)


def largest_together(parts: list[torch.Tensor], group: Any) -> None:
    """`largest` of several 1-D tensors, in one collective."""
    together = torch.cat(parts)
    largest(together, group)
    torch._foreach_copy_(parts, together.split([part.numel() for part in parts]))  # on a GPU one launch


def largest_in(amaxes: torch.Tensor, name: str) -> None:
    """`largest` of the group with that name, inside of a pair of functions."""
    collective(_largest, amaxes, name)


def _largest(amaxes: torch.Tensor, name: str) -> None:
    largest(amaxes, group_of(name))
