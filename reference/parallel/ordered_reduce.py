"""A sum over K that ranks share: one chain that passes through them.

A GEMM adds in order of K, and its state between two steps is one fp32 word an output (`reference.ops.gemms.gemm_part`).
Rank r of t has the r-th part of K:

    rank 0            acc = its part, from +0           sends acc to rank 1
    rank r            acc = its part, from rank r - 1's     sends acc to rank r + 1
    rank t - 1        the same, and out = the end of a GEMM: scales, bias, one rounding

These are the additions of one process, in its order; nothing is added that it would not add. Where a rank's part of K
is not consecutive, as that of [gate; up] or [q; k; v] whose halves or thirds are split, the chain goes around once for
each piece. The last rank hands `out` to the others, all of it or to each its rows.

The output is cut into bands of rows, which pass through the ranks one after the other: while a band is on its way, its
sender computes the next. So with p bands the last of t ranks waits for (t - 1) / p of a rank's work.

`schedule` says in which order a rank does that. Receives are posted ahead, so that a band arrives while another is
computed; nothing waits on the host of a GPU. NCCL may run all of a rank's sends and receives one after the other, each
until its other end is there (of two ranks it does, in both directions). The order is such that even so every one finds
its other end: the first and the last rank post a piece's receives before its parts, so the last begins to send around
when it has all that it needs. A rank between two others, which sends on what it gets, posts `AHEAD` of them.

Memory: what has been received and is not used yet, at most the accumulators of one output, fp32 `[m, n]`; between two
ranks `AHEAD` bands. What is sent is kept until the end, as much again for each piece.

Ranks of one host send messages (`reference.parallel.messages`), and the last one hands out a band as soon as it has
it. All that is work of streams, which a CUDA graph may hold: the functions that do it return True
(`groups.collective`). Other ranks use the process group's collectives. They move bytes: their backends need not know a
dtype.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reference.parallel import messages, peer_memory
from reference.parallel.messages import ROOMS, Messages, UnderWay
from reference.support import groups
from reference.support.groups import bytes_of

Band = tuple[int, int]
"""The first row of a band and the one after its last."""
Part = Callable[[int, Band, torch.Tensor | None], torch.Tensor]
"""(piece of K, band, accumulators or None) → accumulators, fp32 `[rows of the band, n]`, or the last part's result."""
BAND = 128
"""Bands begin at multiples of it, as blocks of scales do."""
BANDS = 4
"""At most so many: a band costs the host some tenths of a millisecond."""
AHEAD = 2
"""How many bands a rank between two others asks for before it needs them."""


def bands(rows: int) -> list[Band]:
    """The bands of an output, the same on every rank."""
    count = -(-rows // BAND)
    step = BAND * -(-count // BANDS)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def ranks_of(group: str) -> tuple[int, int]:
    """This process's rank in a group, and how many there are."""
    found = groups.group_of(group)
    return dist.get_rank(found), dist.get_world_size(found)


def shapes_on_ranks(group: str, shape: tuple[int, ...], device: torch.device) -> list[tuple[int, ...]]:
    """The shapes that ranks have of a tensor, in their order; at most seven dimensions."""
    own = torch.tensor([len(shape), *shape, *[0] * (7 - len(shape))], dtype=torch.int64, device=device)
    return [tuple(one[1 : 1 + one[0]]) for one in gathered_rows(group, own[None]).tolist()]


def schedule(rank: int, count: int, rounds: int, number: int) -> Iterator[tuple[str, int, int]]:
    """What a rank of `count` does with `number` bands: ("receive", "part" or "send", round, band), in its order.

    A receive is posted, and has to be complete before its part; a send begins after its part.
    """
    ahead = AHEAD if 0 < rank < count - 1 else number
    for piece in range(rounds):
        receives, sends = piece or rank, piece + 1 < rounds or rank + 1 < count
        for band in range(min(ahead, number) if receives else 0):
            yield "receive", piece, band
        for band in range(number):
            yield "part", piece, band
            if sends:
                yield "send", piece, band
            if receives and band + ahead < number:
                yield "receive", piece, band + ahead


def rows_of(band: Band, rank: int, rows: int | None) -> Band:
    """Which rows of a band a rank gets: all of them, or those among its own, of which each rank has `rows`."""
    if rows is None:
        return band
    first, end = max(band[0], rank * rows), min(band[1], (rank + 1) * rows)
    return (first, max(first, end))


def _peers(group: str, device: torch.device, ahead: int, size: int, rooms: int = 1) -> Messages | None:
    """The messages of a group, if its ranks can write to each other's memory; with rooms of `size` bytes for those to
    each of the `ahead` next ranks."""
    found = messages.of_group(group, device)
    return found if found is not None and found.prepare(range(1, ahead + 1), size, rooms) else None


# `size` is that of a sum's first band; the last one may have less. `number` is a band's.


def _receive(x: torch.Tensor, group: str, source: int, size: int, number: int) -> bool:
    peers = _peers(group, x.device, 1, size, ROOMS)
    if peers is None:
        work: Any = dist.irecv(bytes_of(x), group=groups.group_of(group), group_src=source)
    else:
        work = peers.receive(bytes_of(x), source, size, ROOMS, number)
    groups.under_way.works[x.data_ptr()] = work
    return peers is not None


def _send(x: torch.Tensor, group: str, to: int, size: int, number: int) -> bool:
    peers = _peers(group, x.device, 1, size, ROOMS)
    if peers is None:
        work: Any = dist.isend(bytes_of(x), group=groups.group_of(group), group_dst=to)
    else:
        work = peers.send(bytes_of(x), to, size, ROOMS, number)
    groups.under_way.works[x.data_ptr()] = work
    return peers is not None


def _end(some: list[torch.Tensor]) -> bool:
    """Let torch's current stream, or on a CPU this thread, wait until these are there, or sent."""
    works = [groups.under_way.works.pop(x.data_ptr()) for x in some]
    for work in works:
        work.wait()
    return all(isinstance(work, UnderWay) for work in works)


def passed_on(
    group: str,
    shape: tuple[int, int],
    part: Part,
    last: Part,
    rounds: int,
    dtype: torch.dtype,
    scatter: bool,
    device: torch.device,
    meanwhile: Callable[[], object] | None = None,
) -> torch.Tensor:
    """The sum `[m, n]` on every rank; with `scatter` this rank's rows of it, `[m / t, n]`.

    Args:
        group: its name.
        shape: `[m, n]`.
        part: this rank's part of a round, for a band.
        last: the last part of all and what follows it, `[rows of the band, n]` of `dtype`; of the last rank.
        rounds: how many pieces of K each rank has: round 0 goes through all ranks, then round 1.
        dtype: of the result.
        scatter: whether each rank gets its rows alone; m is a multiple of the ranks.
        device: of the result.
        meanwhile: what else this rank has to compute. It is called once, when the rank has nothing of the sum left to
            do but to wait for another: the last rank begins with it, the first ends with it.
    """
    (rank, count), cut = ranks_of(group), bands(shape[0])
    rows = shape[0] // count if scatter else None
    out = torch.empty((shape[0] if rows is None else rows, shape[1]), dtype=dtype, device=device)
    # Bytes of a band's sums, and of its results.
    of_sums, of_results = ((cut[0][1] - cut[0][0]) * shape[1] * one.itemsize for one in (torch.float32, dtype))
    received: dict[int, torch.Tensor] = {}
    sent: list[torch.Tensor] = []
    ended: list[torch.Tensor] = []
    accumulator: torch.Tensor | None = None
    todo = [] if meanwhile is None else [meanwhile]
    try:
        for what, piece, number in schedule(rank, count, rounds, len(cut)):
            band = cut[number]
            if what == "receive":
                room = torch.empty((band[1] - band[0], shape[1]), dtype=torch.float32, device=device)
                received[number] = room
                groups.collective(_receive, room, group, (rank - 1) % count, of_sums, number)
            elif what == "part":
                accumulator = received.pop(number, None)
                if accumulator is not None:
                    while todo:
                        todo.pop()()
                    groups.collective(_end, [accumulator])
                if piece + 1 < rounds or rank + 1 < count:
                    accumulator = part(piece, band, accumulator).contiguous()
                else:
                    ended.append(last(piece, band, accumulator))
                    parts = [ended[-1][slice(*_from(rows_of(band, to, rows), band[0]))] for to in range(count)]
                    groups.collective(_hand_out, out, parts, group, of_results, number)
            else:
                assert accumulator is not None
                sent.append(accumulator)  # its memory, until it has been read
                groups.collective(_send, accumulator, group, (rank + 1) % count, of_sums, number)
        while todo:
            todo.pop()()
        if sent:
            groups.collective(_end, sent)
        places = [out[slice(*_from(rows_of(band, rank, rows), rank * (rows or 0)))] for band in cut]
        groups.collective(_take, out, places, ended, group, of_results, scatter)
    except BaseException:
        groups.abandon()
        raise
    return out


def _from(rows: Band, first: int) -> Band:
    return rows[0] - first, rows[1] - first


def _hand_out(out: torch.Tensor, parts: list[torch.Tensor], group: str, size: int, number: int) -> bool:
    """The last rank's: send each rank its part of a band's results. What waits for the last of them is `out`'s."""
    rank, count = ranks_of(group)
    peers = _peers(group, out.device, count - 1, size, ROOMS)
    if peers is None:
        return False
    for to in range(rank):
        if parts[to].numel():
            wait_too(out, peers.send(bytes_of(parts[to]), to, size, ROOMS, number))
    return True


def wait_too(x: torch.Tensor, work: UnderWay) -> None:
    """Let who waits for x wait for this, too."""
    before = groups.under_way.works.get(x.data_ptr())
    groups.under_way.works[x.data_ptr()] = work if before is None else work._replace(events=before.events + work.events)


def _take(
    out: torch.Tensor,
    places: list[torch.Tensor],
    ended: list[torch.Tensor],
    group: str,
    size: int,
    scatter: bool,
) -> bool:
    """Write to `out` what the last rank has `ended`; `places` are those of each band in `out`."""
    rank, count = ranks_of(group)
    peers = _peers(group, out.device, count - 1, size, ROOMS)
    if peers is None:
        whole = torch.cat(ended) if ended else None
        if scatter:
            parts = [] if whole is None else [bytes_of(one) for one in whole.chunk(count)]
            dist.scatter(bytes_of(out), parts or None, group=groups.group_of(group), group_src=count - 1)
        else:
            if whole is not None:
                out.copy_(whole)
            dist.broadcast(bytes_of(out), group=groups.group_of(group), group_src=count - 1)
        return False
    if rank + 1 < count:
        for number, place in enumerate(places):
            if place.numel():
                wait_too(out, peers.receive(bytes_of(place), count - 1, size, ROOMS, number))
    else:
        for place, one in zip(places, ended, strict=True):
            if place.numel():
                peer_memory.copy(place, one[-len(place) :])  # of each band the last rank has the last rows
    work = groups.under_way.works.pop(out.data_ptr(), None)
    if work is not None:
        work.wait()
    return True


class Gathering(NamedTuple):
    """Rows of all ranks that are under way, from this rank's, whose memory stays until they are there."""

    whole: torch.Tensor
    own: torch.Tensor

    def rows(self) -> torch.Tensor:
        """The rows; called once."""
        if self.whole.numel():
            groups.collective(_end, [self.whole])
        return self.whole


def gathering(group: str, x: torch.Tensor, out: torch.Tensor | None = None) -> Gathering:
    """Begin to gather the rows of all ranks `[t · m, n]`, rank 0's first, from this rank's x `[m, n]`.

    Args:
        group: its name.
        x: this rank's, of the same shape on all.
        out: where to, contiguous; None allocates it.
    """
    if out is None:
        out = x.new_empty((ranks_of(group)[1] * x.shape[0], *x.shape[1:]))
    one = Gathering(out, x.contiguous())
    if one.whole.numel():
        groups.collective(_gather, *one, group)
    return one


def gathered_rows(group: str, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The rows of all ranks; the arguments are those of `gathering`."""
    return gathering(group, x, out).rows()


class _Done:
    """What a collective of the process group leaves to wait for."""

    def wait(self) -> None:
        pass


def _gather(whole: torch.Tensor, x: torch.Tensor, group: str) -> bool:
    rank, count = ranks_of(group)
    peers = _peers(group, x.device, count - 1, x.nbytes)
    if peers is None:
        groups.all_gather(bytes_of(whole), bytes_of(x), group=groups.group_of(group))
        groups.under_way.works[whole.data_ptr()] = _Done()
        return False
    own, parts = bytes_of(x), bytes_of(whole).split(x.nbytes)
    # Each rank begins with the next one, so that all links are used at once. Streams do it in order: the last of each
    # ends last.
    for distance in range(1, count):
        sent = peers.send(own, (rank + distance) % count, x.nbytes)
    for distance in range(1, count):
        received = peers.receive(parts[(rank - distance) % count], (rank - distance) % count, x.nbytes)
    peer_memory.copy(parts[rank], own)
    groups.under_way.works[whole.data_ptr()] = UnderWay(sent.events + received.events, peers.abandoned)
    return True
