"""A sum over K that ranks share, of many rows: each rank computes some of the rows, from the codes of all.

Rank r of t has the r-th part of K of both operands, a `[m, K / t]` and b `[n, K / t]`. A sum of few rows passes through
the ranks (`reference.parallel.ordered_reduce`), which send each other fp32 accumulators. Of many rows their codes are
less, and no rank waits for the work of another:

    each rank   sends b to all others, and to each the rows of a that are that rank's
                acc = its rows, rank 0's part of K, from +0;  then rank 1's, from acc;  ...
                out = the end of a GEMM: scales, bias, one rounding

These are the additions of one process, in its order.

b is there in time: to send it takes as long as a GEMM of some rows, whatever n and K are. A GPU that multiplies 1.2e15
times a second in FP8 and sends 380 GB/s needs 1,600 rows for each rank that it sends to; in 16 bits it sends twice the
bytes at half the speed. So the rule, `pays`, counts rows alone.

Memory: b of all other ranks, and their columns of a's rows, which all maps of one size share. Ranks of one host compute
from the room that a message has arrived in (`reference.parallel.messages`), and all that is work of streams, which a
CUDA graph may hold. Others use the process group's sends and receives.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reference.parallel import messages, ordered_reduce
from reference.parallel.messages import Messages
from reference.support import groups
from reference.support.groups import bytes_of

ROWS = 2048
"""So many for each other rank are many."""

KINDS = ("b", "a", "scales of b", "scales of a")
"""Messages of different kinds are under way at once; those of a and of b on different streams."""


def pays(group: str, rows: int) -> bool:
    """Whether a sum of so many rows is computed in this way."""
    count = ordered_reduce.ranks_of(group)[1]
    return rows >= ROWS * (count - 1) and not rows % (ordered_reduce.BAND * count)


class Arriving(NamedTuple):
    """What ranks send each other; contiguous, of one shape.

    Attributes:
        given: what this rank sends, by rank; its own stays.
        rooms: what it has from each rank, when that has arrived; its own is the one given.
        group: the group's name.
        kind: of the messages, one of `KINDS`.
    """

    given: list[torch.Tensor]
    rooms: list[torch.Tensor]
    group: str
    kind: str

    def of(self, rank: int) -> torch.Tensor:
        """A rank's; asked once for each."""
        if rank != ordered_reduce.ranks_of(self.group)[0]:
            groups.collective(_arrive, self.rooms[rank], self.given, self.group, rank, self.kind)
        return self.rooms[rank]

    def end(self) -> None:
        """After the last use of what has arrived."""
        groups.collective(_end, self.given, self.group, self.kind)


def begin(given: list[torch.Tensor], group: str, kind: str) -> Arriving:
    """Begin to send `given[r]` to rank r."""
    rank = ordered_reduce.ranks_of(group)[0]
    given = [x.contiguous() for x in given]
    rooms: list[torch.Tensor] = []
    groups.collective(_find_rooms, given, rooms, group, kind)
    if not rooms:
        rooms = [x if r == rank else torch.empty_like(x) for r, x in enumerate(given)]
    groups.collective(_send, given, rooms, group, kind)
    return Arriving(given, rooms, group, kind)


def _peers(group: str, x: torch.Tensor, kind: str) -> Messages | None:
    """The messages of a group, with a room for those like x to each rank, if ranks can write to each other's memory."""
    found = messages.of_group(group, x.device)
    distances = range(1, ordered_reduce.ranks_of(group)[1])
    return found if found is not None and found.prepare(distances, x.nbytes, kind=kind) else None


def _find_rooms(given: list[torch.Tensor], rooms: list[torch.Tensor], group: str, kind: str) -> bool:
    """Have `rooms` be where messages arrive; or leave it empty."""
    rank, peers = ordered_reduce.ranks_of(group)[0], _peers(group, given[0], kind)
    if peers is None:
        return False
    rooms[:] = [
        x if r == rank else peers.room(r, x.nbytes, kind).view(x.dtype).view(x.shape) for r, x in enumerate(given)
    ]
    return True


def _send(given: list[torch.Tensor], rooms: list[torch.Tensor], group: str, kind: str) -> bool:
    (rank, count), peers = ordered_reduce.ranks_of(group), _peers(group, given[0], kind)
    # Each rank begins with the next one, so that all links are used at once.
    others = [(rank + distance) % count for distance in range(1, count)]
    if peers is not None:
        for to in others:
            work = peers.send(bytes_of(given[to]), to, given[to].nbytes, number=KINDS.index(kind), kind=kind)
            ordered_reduce.wait_too(given[to], work)
        return True
    found = groups.group_of(group)
    both = [dist.P2POp(dist.isend, bytes_of(given[to]), group=found, group_peer=to) for to in others]
    both += [dist.P2POp(dist.irecv, bytes_of(rooms[to]), group=found, group_peer=to) for to in reversed(others)]
    groups.under_way.works[given[rank].data_ptr()] = _Works(dist.batch_isend_irecv(both))
    return False


class _Works:
    """Sends and receives of the process group."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()


def _arrive(room: torch.Tensor, given: list[torch.Tensor], group: str, source: int, kind: str) -> bool:
    """Let torch's current stream, or on a CPU this thread, wait until it is there."""
    peers = _peers(group, room, kind)
    if peers is not None:
        peers.arrive(source, room.nbytes, kind)
        return True
    groups.under_way.works[given[ordered_reduce.ranks_of(group)[0]].data_ptr()].wait()
    return False


def _end(given: list[torch.Tensor], group: str, kind: str) -> bool:
    """Rooms may be written again, and so may what was sent."""
    rank, peers = ordered_reduce.ranks_of(group)[0], _peers(group, given[0], kind)
    for other, x in enumerate(given):
        if peers is not None and other != rank:
            peers.used(other, x.nbytes, kind)
        work = groups.under_way.works.pop(x.data_ptr(), None)
        if work is not None:
            work.wait()
    return peers is not None
