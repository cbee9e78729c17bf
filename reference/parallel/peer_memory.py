"""What ranks of one host exchange by their GPUs' copy engines, which take no multiprocessor from other kernels.

NCCL sends by kernels. A persistent kernel has a block on each multiprocessor, so it waits for those of NCCL, or they
for it. Here a rank writes to memory of the others (PyTorch's symmetric memory, over NVLink):

    exchange k of a rank:   copy each part into half k mod 2 of the memory of the rank that it is for
                            write k to that rank's word for this rank
                            wait until the own words say k for all other ranks

All of it is work of one stream: copies by engines, words written and waited for by the stream itself
(`cuStreamWriteValue32`, `cuStreamWaitValue32`). The host waits for nothing.

What was received is there until this rank's next exchange but one. Two halves suffice: a rank writes to half k mod 2
again in exchange k + 2, when it has k + 1 from the rank whose memory it is, which sent that after it had read k.

Single messages are in `reference.parallel.messages`.

A rank that is gone leaves the others' streams waiting, which no time-out of the process group would see. So who uses
this also has a collective of the process group in flight (`Beat`).
"""

import ctypes
import functools
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from reference.support import groups, streams

ALIGNED = 256  # bytes: where the part of each rank begins
WORDS = 4096  # bytes before the halves, in which each rank has a word
HALVES = 2


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _word(function: str, address: int, value: int) -> None:
    """`value`, modulo 2^32, written or waited for by torch's current stream."""
    stream = ctypes.c_void_p(streams.current().cuda_stream)
    # Flags 0: a wait ends where the word minus the value, as a signed number, is 0 or more.
    status = getattr(_driver(), function)(stream, ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(0))
    if status:
        raise RuntimeError(f"{function} gave error {status}.")


def write(address: int, value: int) -> None:
    _word("cuStreamWriteValue32_v2", address, value)


def wait(address: int, value: int) -> None:
    _word("cuStreamWaitValue32_v2", address, value)


class _WordOp(ctypes.Structure):
    """`CUstreamBatchMemOpParams` of a 32-bit word."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


@functools.lru_cache(4096)
def _swapped(address: int, old: int, new: int) -> Any:
    # Operations 1 and 2 wait and write; with flag 1 a wait ends where the word is the value.
    return (_WordOp * 2)(_WordOp(1, address, old, 1), _WordOp(2, address, new, 0))


def swap(address: int, old: int, new: int) -> None:
    """On torch's current stream: wait until a word is `old`, then write `new`."""
    stream = ctypes.c_void_p(streams.current().cuda_stream)
    status = _driver().cuStreamBatchMemOp_v2(stream, ctypes.c_uint(2), _swapped(address, old, new), ctypes.c_uint(0))
    if status:
        raise RuntimeError(f"cuStreamBatchMemOp gave error {status}.")


def copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)


def shared(size: int, device: torch.device, name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """`size` bytes of this rank, and those of each rank, which this one may write to; all ranks call it.

    torch counts these calls in a process, whatever the group. Where ranks have made more of them than others, in groups
    of their own, theirs do not meet.
    """
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle: Any = symmetric.rendezvous(own, name)  # type: ignore[arg-type]
    return own, [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(handle.world_size)]


def obstacle(group: Any, device: torch.device, wanted: bool | None = None) -> str:
    """Why the group's ranks cannot write to each other's memory, the same on all of them; "" if they can.

    They cannot where each sees one GPU alone (`CUDA_VISIBLE_DEVICES`), which is then of one number. `wanted` is the
    user's word, which must be one on all ranks.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (socket.gethostname(), device.index, wanted), group=group)
    hosts, indices, words = zip(*found, strict=True)
    if len(set(words)) > 1:
        raise RuntimeError(f"peer_memory is {list(words)} on the ranks of a group; one value on all is accepted.")
    if wanted is False:
        return "peer_memory=False"
    if len(set(hosts)) > 1:
        return "the ranks are on several hosts"
    alone = [other for other in indices if other != device.index]
    if len(alone) + 1 != len(found):
        return "two ranks have a GPU of one number"
    reached = all(
        other < torch.cuda.device_count() and torch.cuda.can_device_access_peer(device, other) for other in alone
    )
    every: list[Any] = [None] * len(found)
    dist.all_gather_object(every, reached, group=group)
    return "" if all(every) else "a GPU cannot write to the memory of another"


def fresh(size: int, device: torch.device, name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """`shared`, `WORDS` that are 0 and `size` bytes; what is under way ends first, on all ranks of the group."""
    group = groups.group_of(name)
    torch.cuda.synchronize(device)
    dist.barrier(group)
    own, theirs = shared(WORDS + size, device, name)
    own[:WORDS].zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)
    return own, theirs


class Beat:
    """A collective of a process group that is in flight beside work in peers' memory.

    A rank that is gone leaves the others' streams waiting for its words. The process group sees that this collective
    does not end.
    """

    def __init__(self) -> None:
        self._word: torch.Tensor | None = None

    def start(self, group: Any, device: torch.device) -> None:
        """Begin one; all ranks of the group call it alike."""
        if self._word is None:
            self._word = torch.zeros(1, dtype=torch.float32, device=device)
        dist.all_reduce(self._word, group=group, async_op=True)


class PeerMemory:
    """Exchanges of the ranks of a group: `exchange`, which all of them call alike.

    Args:
        group: a process group of at most 1024 ranks of one host.
        device: this rank's.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._name, self._device = groups.name_of(group), device  # a name: the group is a weak key of `_OF_GROUPS`
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._half = 0  # bytes
        self._own = torch.empty(0, dtype=torch.uint8, device=device)
        self._theirs: list[torch.Tensor] = []
        self._number = 0  # of the last exchange
        self._stream: Any = None  # of the last exchange

    def _grow(self, size: int) -> None:
        """Have halves of `size` bytes."""
        self._own, self._theirs = fresh(HALVES * size, self._device, self._name)
        self._half, self._number = size, 0

    def exchange(self, given: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Send `given[r]` to rank r, and get what each rank sends.

        Args:
            given: contiguous uint8 `[sizes[this rank]]`, one for each rank.
            sizes: how many bytes each rank sends to each; the same on all ranks.

        Returns:
            What rank r sent, uint8 `[sizes[r]]`, in the order of ranks; of this rank its own, not copied.
        """
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // ALIGNED) * ALIGNED)
        if starts[-1] > self._half or not self._theirs:
            self._grow(starts[-1])
        current = streams.current(self._device)
        if self._stream is not None and self._stream != current:  # exchanges come one after the other
            current.wait_stream(self._stream)
        self._stream = current
        self._number += 1
        half = WORDS + self._number % HALVES * self._half
        own, others = self._rank, [r for r in range(self._ranks) if r != self._rank]
        # Each rank begins with the next one, so that all links are used at once.
        for other in (*others[own:], *others[:own]):
            first = half + starts[own]
            copy(self._theirs[other][first : first + sizes[own]], given[other])
            write(self._theirs[other].data_ptr() + 4 * own, self._number)
        for other in others:
            wait(self._own.data_ptr() + 4 * other, self._number)
        return [
            given[own] if r == own else self._own[half + starts[r] : half + starts[r] + sizes[r]]
            for r in range(self._ranks)
        ]

    def gather(self, own: torch.Tensor, out: torch.Tensor) -> None:
        """Write to contiguous uint8 `out` what all ranks send to all, one after the other.

        Args:
            own: contiguous uint8 [size], the same size on all ranks; it may be this rank's place in `out`.
            out: at most [ranks · size]; what is beyond it is left out.
        """
        size = own.numel()
        for rank, part in enumerate(self.exchange([own] * self._ranks, [size] * self._ranks)):
            if part.data_ptr() != out.data_ptr() + rank * size:
                place = out[rank * size : (rank + 1) * size]
                copy(place, part if len(place) == size else part[: len(place)])


T = TypeVar("T")
_OF_GROUPS: "weakref.WeakKeyDictionary[Any, dict[Any, Any]]" = weakref.WeakKeyDictionary()


def member(group: Any, device: torch.device, cls: Callable[[Any, torch.device], T]) -> T | None:
    """The one `PeerMemory` or `Messages` of a group, if its ranks can write to each other's memory.

    Whether they can the ranks find out together, at their first call that is not in a CUDA graph's capture.
    """
    found = _OF_GROUPS.setdefault(group, {})
    if cls not in found:
        if torch.cuda.is_current_stream_capturing():
            return None
        found[cls] = None if obstacle(group, device) else cls(group, device)
    return found[cls]  # type: ignore[no-any-return]


def of_group(group: Any, x: torch.Tensor, cls: Callable[[Any, torch.device], T]) -> T | None:
    """`member` for tensors like x, but not in a capture: a graph would wait for the same numbers at each replay."""
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    return member(group, x.device, cls)
