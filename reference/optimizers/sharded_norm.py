"""`twin::grad_norm` of gradients whose rows ranks share (`fully_shard`): the same word as of the whole gradients.

A chunk of 32,768 neighbours is summed by the rank that has its first number. Ranks send the numbers before their first
chunk to that rank, as fp32 (fewer than a chunk of each gradient), and then all chunks' sums to all ranks, which add
them in the order of the list.

    sums    of squares in float64, by PyTorch's products and sums in the written order: one addition an operation
    max     each rank's, and the maximum of their words, which has no order

Nothing waits for a GPU.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from reference.ops.library import twin
from reference.ops.optimizers.grad_norm import CHUNK, COLUMNS, LANES
from reference.support.dtensor import placed, shard
from reference.support.groups import largest

_SLAB = 64  # chunks that are widened to float64 at once


class Span(NamedTuple):
    """The numbers that a rank has of a whole gradient of `size` numbers: from `start` on, below `stop`."""

    start: int
    stop: int
    size: int

    @property
    def first(self) -> int:
        """The first chunk that begins here; its numbers before belong to another rank's."""
        return -(-self.start // CHUNK)

    @property
    def begins(self) -> range:
        """The chunks that begin here."""
        return range(self.first, max(self.first, -(-self.stop // CHUNK)))

    @property
    def before(self) -> int:
        """How many numbers there are before that chunk."""
        return min(self.first * CHUNK, self.stop) - self.start


def spans(x: Any, ranks: int) -> list[Span]:
    """Every rank's numbers of a DTensor that is sharded by rows: torch's chunks."""
    rows, each = x.shape[0], x.numel() // max(1, x.shape[0])
    size = -(-rows // ranks)
    cuts = [min(rows, size * rank) * each for rank in range(ranks + 1)]
    return [Span(*pair, x.numel()) for pair in itertools.pairwise(cuts)]


def sharded_norm(grads: list[Any], kind: str) -> torch.Tensor:
    """The norm of all numbers of DTensors, fp32 `[]`, on every rank of their mesh.

    Args:
        grads: DTensors of rows, over one mesh of one dimension, or copies of that over its first one.
        kind: "l2" or "max", `twin::grad_norm`'s.
    """
    mesh = placed(grads[0])[0]  # type: ignore[index]
    group = mesh.get_group(mesh.ndim - 1)
    local = [shard(x).detach().contiguous().view(-1) for x in grads]
    if kind == "max":
        norm: torch.Tensor = twin.grad_norm(local, kind)
        largest(norm.view(1), group)
        return norm
    total = _total(_all_sums(grads, local, group))
    # On a CPU torch's square root of float64 is not always the nearest number; CUDA's and NumPy's are.
    root = total.sqrt() if total.is_cuda else torch.from_numpy(np.sqrt(total.numpy()[None]))[0]
    norm = root.float()
    return norm.masked_fill_(norm.isnan(), float("nan"))  # one word for NaN, as the op has


def _all_sums(grads: list[Any], local: list[torch.Tensor], group: Any) -> torch.Tensor:
    """The sums of all chunks, float64 [chunks], in the order of the list."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    where = [spans(x, ranks) for x in grads]
    parts = _exchanged(where, local, ranks, me, group)
    mine = torch.cat([_sums(*part) for part in parts])
    counts = [sum(len(one[rank].begins) for one in where) for rank in range(ranks)]
    if not sum(counts):
        return mine
    room = mine.new_zeros(max(counts))
    room[: len(mine)] = mine
    found = list(room.new_empty(ranks, len(room)).unbind())
    dist.all_gather(found, room, group=group)
    places, taken = [], [0] * ranks
    for one in where:
        for rank in range(ranks):
            start = taken[rank]
            taken[rank] += len(one[rank].begins)
            places.append(found[rank][start : taken[rank]])
    return torch.cat(places)


def _exchanged(
    where: list[list[Span]], local: list[torch.Tensor], ranks: int, me: int, group: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each gradient this rank's numbers from its first chunk on, and what follows them on other ranks, in fp32."""
    sizes = [[0] * ranks for _ in range(ranks)]  # numbers that go from a rank to another
    moves = []  # gradient, from, to, numbers
    for i, one in enumerate(where):
        owner = 0
        for rank, span in enumerate(one):
            if span.before and rank:
                moves.append((i, rank, owner, span.before))
                sizes[rank][owner] += span.before
            if len(span.begins):
                owner = rank
    given = [
        torch.cat([local[i][:n].float() for i, a, b, n in moves if (a, b) == (me, to)] or [local[0][:0].float()])
        for to in range(ranks)
    ]
    arrived = given[0].new_empty(sum(sizes[rank][me] for rank in range(ranks)))
    dist.all_to_all_single(
        arrived, torch.cat(given), [sizes[rank][me] for rank in range(ranks)], sizes[me], group=group
    )
    rest: list[list[torch.Tensor]] = [[] for _ in where]
    at = 0
    for rank in range(ranks):
        for i, a, b, n in moves:
            if (a, b) == (rank, me):
                rest[i].append(arrived[at : at + n])
                at += n
    return [
        (x[one[me].before :], torch.cat(more) if more else arrived[:0])
        for x, one, more in zip(local, where, rest, strict=True)
    ]


def _sums(own: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Sums of squares of the chunks of flat numbers and what follows them, float64."""
    whole = own.numel() // CHUNK
    found = [_of_rows(own[start * CHUNK : min(start + _SLAB, whole) * CHUNK]) for start in range(0, whole, _SLAB)]
    last = torch.cat([own[whole * CHUNK :].double(), more.double()])
    if last.numel():
        room = last.new_zeros(-(-last.numel() // CHUNK) * CHUNK)
        room[: last.numel()] = last
        found.append(_of_rows(room))
    return torch.cat(found) if found else last


def _of_rows(x: torch.Tensor) -> torch.Tensor:
    rows = x.double().view(-1, CHUNK // COLUMNS, COLUMNS)
    rows = rows * rows
    columns = torch.zeros_like(rows[:, 0])
    for i in range(CHUNK // COLUMNS):
        columns = columns + rows[:, i]
    return _halves(_halves(_halves(columns, 8), 32), 8)[:, 0]


def _halves(x: torch.Tensor, count: int) -> torch.Tensor:
    """`reference.ops.optimizers.grad_norm.halves`."""
    x = x.view(*x.shape[:-1], -1, count)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _total(sums: torch.Tensor) -> torch.Tensor:
    padded = sums.new_zeros(-(-len(sums) // LANES), LANES)
    padded.view(-1)[: len(sums)] = sums
    lanes = sums.new_zeros(LANES)
    for row in padded:
        lanes = lanes + row
    return _halves(_halves(lanes, 32), 32)[0]
