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

Collectives move bytes: their backends need not know a dtype.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from reference.support import groups
from reference.support.groups import bytes_of

Band = tuple[int, int]
"""The first row of a band and the one after its last."""
Part = Callable[[int, Band, torch.Tensor | None], torch.Tensor]
"""(piece of K, band, accumulators or None) → accumulators, fp32 `[rows of the band, n]`."""
BAND = 128
"""Bands begin at multiples of it, as blocks of scales do."""
BANDS = 8
"""At most so many."""


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
    found, (rank, count) = groups.group_of(group), ranks_of(group)
    on_their_way: list[Any] = []  # with the memory that they read
    ended: list[torch.Tensor] = []
    for piece in range(rounds):
        for band in bands(shape[0]):
            accumulator: torch.Tensor | None = None
            if piece or rank:
                accumulator = torch.empty((band[1] - band[0], shape[1]), dtype=torch.float32, device=device)
                dist.recv(bytes_of(accumulator), group=found, group_src=(rank - 1) % count)
            accumulator = part(piece, band, accumulator).contiguous()
            if piece + 1 == rounds and rank + 1 == count:
                ended.append(end(band, accumulator))
            else:
                sent = dist.isend(bytes_of(accumulator), group=found, group_dst=(rank + 1) % count)
                on_their_way.append((sent, accumulator))
    for sent, _ in on_their_way:
        sent.wait()
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
    found, (_, count) = groups.group_of(group), ranks_of(group)
    if not scatter:
        whole = torch.empty(shape, dtype=dtype, device=device) if out is None else out.contiguous()
        dist.broadcast(bytes_of(whole), group=found, group_src=count - 1)
        return whole
    own = torch.empty((shape[0] // count, shape[1]), dtype=dtype, device=device)
    pieces = None if out is None else [bytes_of(one) for one in out.contiguous().chunk(count)]
    dist.scatter(bytes_of(own), pieces, group=found, group_src=count - 1)
    return own


def gathered_rows(group: str, x: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks `[t · m, n]`, rank 0's first, from this rank's x `[m, n]`; all have as many."""
    found, (_, count) = groups.group_of(group), ranks_of(group)
    whole = x.new_empty((count * x.shape[0], *x.shape[1:]))
    if whole.numel():
        dist.all_gather([bytes_of(one) for one in whole.chunk(count)], bytes_of(x.contiguous()), group=found)
    return whole
