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

Messages from each rank to the next (`Messages`) go through rooms of the receiver's memory, in turn:

    send n      on a stream of its own: wait until message n - ROOMS is taken; copy; write n to the receiver's word
    receive n   on torch's current stream, where it is needed: wait for n; copy it out; write n to the sender's word

No wait comes before what the other rank needs to end it, even if a GPU does the work of all streams in the order in
which the host gave it (`CUDA_DEVICE_MAX_CONNECTIONS=1`): there are as many rooms as a sum over ranks has bands.

A rank that is gone leaves the others' streams waiting, which no time-out of the process group would see. So who uses
this also has a collective of the process group in flight (`GradientOrder.beat`; a shared layer gathers by one).
"""

import ctypes
import functools
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from reference.support import groups

ALIGNED = 256  # bytes: where the part of each rank begins
WORDS = 4096  # bytes before the halves, in which each rank has a word
HALVES = 2
ROOMS = 4
GIVEN, TAKEN = 0, 4  # bytes: where the words of messages are


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _word(function: str, address: int, value: int) -> None:
    """`value`, modulo 2^32, written or waited for by torch's current stream."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    # Flags 0: a wait ends where the word minus the value, as a signed number, is 0 or more.
    status = getattr(_driver(), function)(stream, ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(0))
    if status:
        raise RuntimeError(f"{function} gave error {status}.")


def write(address: int, value: int) -> None:
    _word("cuStreamWriteValue32_v2", address, value)


def wait(address: int, value: int) -> None:
    _word("cuStreamWaitValue32_v2", address, value)


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
        current = torch.cuda.current_stream(self._device)
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


class _Sent(NamedTuple):
    """As `dist.isend` returns it: torch's current stream waits until what was sent may be written again."""

    event: torch.cuda.Event
    abandoned: Callable[[], None]

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class _Received(NamedTuple):
    """As `dist.irecv` returns it."""

    wait: Callable[[], None]
    abandoned: Callable[[], None]


class Messages:
    """Messages of a ring: each rank of a group sends to the next, and receives from the one before.

    Where a message is larger than all before, the ranks wait for each other; so all send or receive one of its size.

    Args:
        group, device: as of `PeerMemory`.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._name, self._device = groups.name_of(group), device  # a name: the group is a weak key of `_OF_GROUPS`
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._next, self._before = (self._rank + 1) % self._ranks, (self._rank - 1) % self._ranks
        self._room = 0  # bytes
        self._own = torch.empty(0, dtype=torch.uint8, device=device)
        self._theirs: list[torch.Tensor] = []
        self._sent = self._received = 0
        self._stream: Any = None  # of sends
        self._taking: Any = None  # of the last receive
        self._broken = False

    def _fit(self, size: int) -> None:
        """Have rooms of `size` bytes."""
        if self._broken:
            raise RuntimeError(
                "a sum over these ranks has ended by an error, and their messages no longer agree; a new process group "
                "is accepted."
            )
        if size > self._room or not self._theirs:
            self._room = -(-size // ALIGNED) * ALIGNED
            self._own, self._theirs = fresh(ROOMS * self._room, self._device, self._name)
            self._sent = self._received = 0

    def _abandoned(self) -> None:
        self._broken = True

    def _place(self, memory: torch.Tensor, number: int, size: int) -> torch.Tensor:
        first = WORDS + number % ROOMS * self._room
        return memory[first : first + size]

    def send(self, x: torch.Tensor) -> _Sent:
        """Send contiguous uint8 [n] to the next rank; its memory stays until the result has been waited for."""
        self._fit(x.numel())
        self._sent += 1
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        theirs = self._theirs[self._next]
        with torch.cuda.stream(self._stream):
            if self._sent > ROOMS:
                wait(self._own.data_ptr() + TAKEN, self._sent - ROOMS)
            copy(self._place(theirs, self._sent, x.numel()), x)
            write(theirs.data_ptr() + GIVEN, self._sent)
            return _Sent(self._stream.record_event(), self._abandoned)

    def receive(self, x: torch.Tensor) -> _Received:
        """Receive contiguous uint8 [n] from the rank before, where the result is waited for, in the order of calls."""
        self._fit(x.numel())
        self._received += 1
        return _Received(functools.partial(self._take, x, self._received), self._abandoned)

    def _take(self, x: torch.Tensor, number: int) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._taking is not None and self._taking != current:  # receives come one after the other
            current.wait_stream(self._taking)
        self._taking = current
        wait(self._own.data_ptr() + GIVEN, number)
        copy(x, self._place(self._own, number, x.numel()))
        write(self._theirs[self._before].data_ptr() + TAKEN, number)


T = TypeVar("T")
_OF_GROUPS: "weakref.WeakKeyDictionary[Any, dict[Any, Any]]" = weakref.WeakKeyDictionary()


def of_group(group: Any, x: torch.Tensor, kind: Callable[[Any, torch.device], T]) -> T | None:
    """The one `PeerMemory` or `Messages` of a group, if its ranks can write to each other's memory, for tensors like x.

    Not in a CUDA graph's capture: a graph would wait for the same numbers at each replay.
    """
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    found = _OF_GROUPS.setdefault(group, {})
    if kind not in found:
        found[kind] = None if obstacle(group, x.device) else kind(group, x.device)
    return found[kind]  # type: ignore[no-any-return]
