"""A sum over K that ranks share: one chain that passes through them.

A GEMM adds in order of K, and its state between two steps is one fp32 word an output (`reference.ops.gemms.gemm_part`).
Rank r of t has the r-th part of K:

    rank 0            acc = its part, from +0           sends acc to rank 1
    rank r            acc = its part, from rank r - 1's     sends acc to rank r + 1
    rank t - 1        out = the end of a GEMM: scales, bias, one rounding

These are the additions of one process, in its order; nothing is added that it would not add. Where a rank's part of K
is not consecutive, as that of [gate; up] or [q; k; v] whose halves or thirds are split, the chain goes around once for
each piece. The last rank then hands `out` to the others, all of it or to each its rows.

The output is cut into bands of rows, which pass through the ranks one after the other: while a band is on its way, its
sender computes the next. So with p bands the last of t ranks waits for (t - 1) / p of a rank's work.

`schedule` says in which order a rank does that. Receives are posted ahead, so that a band arrives while another is
computed; nothing waits on the host of a GPU. NCCL may run all of a rank's sends and receives one after the other, each
until its other end is there (of two ranks it does, in both directions). The order is such that even so every one finds
its other end: the first and the last rank post a piece's receives before its parts, so the last begins to send around
when it has all that it needs. A rank between two others, which sends on what it gets, posts `AHEAD` of them.

Memory: what has been received and is not used yet, at most the accumulators of one output, fp32 `[m, n]`; between two
ranks `AHEAD` bands. What is sent is kept until the end, as much again for each piece.

Collectives move bytes: their backends need not know a dtype.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from reference.parallel.peer_memory import Messages, of_group
from reference.support import groups
from reference.support.groups import bytes_of

Band = tuple[int, int]
"""The first row of a band and the one after its last."""
Part = Callable[[int, Band, torch.Tensor | None], torch.Tensor]
"""(piece of K, band, accumulators or None) → accumulators, fp32 `[rows of the band, n]`."""
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


# `Messages` go to the next rank and come from the one before, as all bands do: `to` and `source` are for others.


def _receive(x: torch.Tensor, group: str, source: int) -> None:
    found = groups.group_of(group)
    peers = of_group(found, x, Messages)
    work = dist.irecv(bytes_of(x), group=found, group_src=source) if peers is None else peers.receive(bytes_of(x))
    groups.under_way.works[x.data_ptr()] = work


def _send(x: torch.Tensor, group: str, to: int) -> None:
    found = groups.group_of(group)
    peers = of_group(found, x, Messages)
    work = dist.isend(bytes_of(x), group=found, group_dst=to) if peers is None else peers.send(bytes_of(x))
    groups.under_way.works[x.data_ptr()] = work


def _end(some: list[torch.Tensor]) -> None:
    """Let torch's current stream, or on a CPU this thread, wait until these are there, or sent."""
    for x in some:
        groups.under_way.works.pop(x.data_ptr()).wait()


def passed_on(
    group: str,
    shape: tuple[int, int],
    part: Part,
    end: Callable[[Band, torch.Tensor], torch.Tensor],
    rounds: int,
    device: torch.device,
) -> torch.Tensor | None:
    """The chain; the last rank gets what `end` makes of the accumulators, the others None.

    Args:
        group: its name.
        shape: of the accumulators.
        part: this rank's part of a round, for a band.
        end: what follows the last part.
        rounds: how many pieces of K each rank has: round 0 goes through all ranks, then round 1.
    """
    (rank, count), cut = ranks_of(group), bands(shape[0])
    received: dict[int, torch.Tensor] = {}
    sent: list[torch.Tensor] = []
    ended: list[torch.Tensor] = []
    accumulator: torch.Tensor | None = None
    try:
        for what, piece, number in schedule(rank, count, rounds, len(cut)):
            band = cut[number]
            if what == "receive":
                room = torch.empty((band[1] - band[0], shape[1]), dtype=torch.float32, device=device)
                received[number] = room
                groups.collective(_receive, room, group, (rank - 1) % count)
            elif what == "part":
                accumulator = received.pop(number, None)
                if accumulator is not None:
                    groups.collective(_end, [accumulator])
                accumulator = part(piece, band, accumulator).contiguous()
                if piece + 1 == rounds and rank + 1 == count:
                    ended.append(end(band, accumulator))
            else:
                assert accumulator is not None
                sent.append(accumulator)  # its memory, until it has been read
                groups.collective(_send, accumulator, group, (rank + 1) % count)
        if sent:
            groups.collective(_end, sent)
    except BaseException:
        groups.abandon()
        raise
    if not ended:
        return None
    return ended[0] if len(ended) == 1 else torch.cat(ended)


def from_last(
    group: str,
    out: torch.Tensor | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
    scatter: bool,
    device: torch.device,
) -> torch.Tensor:
    """What the last rank has, `[m, n]` on every rank; with `scatter` this rank's rows of it, `[m / t, n]`."""
    count = ranks_of(group)[1]
    if not scatter:
        whole = torch.empty(shape, dtype=dtype, device=device) if out is None else out.contiguous()
        groups.collective(_broadcast, whole, group, count - 1)
        return whole
    own = torch.empty((shape[0] // count, shape[1]), dtype=dtype, device=device)
    pieces = [] if out is None else list(out.contiguous().chunk(count))
    groups.collective(_scatter, own, pieces, group, count - 1)
    return own


def gathered_rows(group: str, x: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks `[t · m, n]`, rank 0's first, from this rank's x `[m, n]`; all have as many."""
    whole = x.new_empty((ranks_of(group)[1] * x.shape[0], *x.shape[1:]))
    if whole.numel():
        groups.collective(_gather, whole, x.contiguous(), group)
    return whole


def _broadcast(x: torch.Tensor, group: str, source: int) -> None:
    dist.broadcast(bytes_of(x), group=groups.group_of(group), group_src=source)


def _scatter(own: torch.Tensor, pieces: list[torch.Tensor], group: str, source: int) -> None:
    parts = [bytes_of(one) for one in pieces]
    dist.scatter(bytes_of(own), parts or None, group=groups.group_of(group), group_src=source)


def _gather(whole: torch.Tensor, x: torch.Tensor, group: str) -> None:
    groups.all_gather(bytes_of(whole), bytes_of(x), group=groups.group_of(group))
