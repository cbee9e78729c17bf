"""Embedding and cross-entropy of a vocabulary that the ranks of a group share, with the words of one process.

Rank r of t has V / t neighbouring classes from r · V / t on: rows of a table, columns of logits.

    embedding        out[i] is a row that one rank has. The others have zeros, and words are added as integers, so that
                     nothing is rounded, and -0 stays.
    its gradient     a row's sum has its own terms alone, in order of the tokens (`reference.ops.vocabulary.embedding`):
                     its rank leaves out the terms of other rows.

    cross-entropy    a row's sums have an order over all its classes, in tiles of 8192 that begin where no rank does
                     (`reference.ops.vocabulary.cross_entropy`). So no sum is cut: ranks exchange columns of all rows
                     for some whole rows (rank r of t gets those from ⌊r · n / t⌋ to ⌊(r + 1) · n / t⌋ of n), in the
                     logits' dtype. A rank computes loss, m and 1 / S of its rows, and all ranks gather them.
    its gradient     of the same whole rows, which are exchanged again and not kept; then the columns of all rows.

Every rank does 1 / t of the work, but for the table's gradient, in which it passes over all tokens. It sends (t - 1) /
t of its logits twice and of their gradients once, and 12 bytes a row.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from reference.ops.library import twin
from reference.ops.vocabulary.cross_entropy import check_targets
from reference.ops.vocabulary.embedding import check_range
from reference.parallel.gradient_tree import owned
from reference.parallel.ordered_reduce import gathered_rows, ranks_of
from reference.support import groups
from reference.support.groups import bytes_of


class Shard(NamedTuple):
    """What a rank has of a vocabulary: the group's name, how many classes, and whether it has its own tokens only."""

    group: str
    classes: int
    sequence: bool = False

    @property
    def whole(self) -> int:
        """All classes."""
        return self.classes * ranks_of(self.group)[1]

    @property
    def first(self) -> int:
        """The number of this rank's first class."""
        return self.classes * ranks_of(self.group)[0]


def rows_of_table(shard: Shard, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows `ids` [n] of all ranks' table, `[n, width]`; with `sequence` the r-th part of n, `[n / t, width]`."""
    rank, count = ranks_of(shard.group)
    here = (ids >= shard.first) & (ids < shard.first + shard.classes)
    if not ids.is_cuda:
        check_range("twin::embedding", ids, shard.whole)
    elif rank == 0:  # what is no row at all becomes one of NaN
        here |= (ids < 0) | (ids >= shard.whole)
    out = twin.embedding(weight, torch.where(here, ids - shard.first, 0)).masked_fill_(~here[:, None], 0)
    if out.numel():
        groups.collective(_added, out, shard.group)
    if shard.sequence:
        out = out.chunk(count)[rank].clone() if len(out) else out
    return out


def gradient_of_table(shard: Shard, grad: torch.Tensor, ids: torch.Tensor, padding: int) -> torch.Tensor:
    """The gradient `[classes, width]` of this rank's rows from those of all tokens; `padding`: the row of the whole
    table that gets none."""
    # Terms of no row here go to one more row: choosing the others would wait for a GPU.
    here = (ids >= shard.first) & (ids < shard.first + shard.classes) & (ids != padding)
    rows = torch.where(here, ids - shard.first, shard.classes)
    return twin.embedding_backward(grad, rows, shard.classes + 1, shard.classes)[:-1]


def whole_rows(shard: Shard, logits: torch.Tensor) -> torch.Tensor:
    """This rank's rows of all columns `[its rows, V]`, from its columns of all rows `[n, V / t]`."""
    rank, count = ranks_of(shard.group)
    share = [len(owned(logits.shape[0], count, one)) for one in range(count)]
    size, mine = logits.shape[1] * logits.element_size(), share[rank]
    found = logits.new_empty(count, mine, logits.shape[1])
    given = [rows * size for rows in share]
    if logits.numel():
        groups.collective(_exchanged, found, logits, [mine * size] * count, given, shard.group)
    return found.transpose(0, 1).reshape(mine, count * logits.shape[1])


def columns(shard: Shard, own: torch.Tensor, n: int) -> torch.Tensor:
    """The inverse: this rank's columns of all n rows `[n, V / t]`, from all columns of its rows `[its rows, V]`."""
    rank, count = ranks_of(shard.group)
    share = [len(owned(n, count, one)) for one in range(count)]
    size, mine = shard.classes * own.element_size(), share[rank]
    given = own.view(mine, count, shard.classes).transpose(0, 1).contiguous()
    found = own.new_empty(n, shard.classes)
    if n:
        sizes = [rows * size for rows in share]
        groups.collective(_exchanged, found, given, sizes, [mine * size] * count, shard.group)
    return found


def _added(x: torch.Tensor, group: str) -> None:
    """x = the sum of all ranks' bytes, of which at most one rank's is not zero."""
    dist.all_reduce(bytes_of(x), group=groups.group_of(group))


def _exchanged(found: torch.Tensor, given: torch.Tensor, taken: list[int], sent: list[int], group: str) -> None:
    dist.all_to_all_single(bytes_of(found), bytes_of(given), taken, sent, group=groups.group_of(group))


def losses(
    shard: Shard, logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float
) -> list[torch.Tensor]:
    """Loss, m and 1 / S of all rows, fp32 `[n]`, from this rank's columns of logits `[n, V / t]`."""
    n, (rank, count) = logits.shape[0], ranks_of(shard.group)
    if not target.is_cuda:
        check_targets("twin::cross_entropy", target, shard.whole, ignore_index)
    mine = owned(n, count, rank)
    found = logits.new_zeros(3, -(-n // count), dtype=torch.float32)
    own = whole_rows(shard, logits)
    if len(mine):
        of_rows = twin.cross_entropy(own, target[mine.start : mine.stop], ignore_index, label_smoothing)
        found[:, : len(mine)] = torch.stack(of_rows)
    of_all = gathered_rows(shard.group, found[None])
    parts = [of_all[one, :, : len(owned(n, count, one))] for one in range(count)]
    return list(torch.cat(parts, 1).contiguous())


def gradient_of_logits(
    shard: Shard,
    grad: torch.Tensor,
    divisor: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    maximum: torch.Tensor,
    inverse: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """As `twin::cross_entropy_backward`, of this rank's columns."""
    n, (rank, count) = logits.shape[0], ranks_of(shard.group)
    mine = owned(n, count, rank)
    of_rows = [x[mine.start : mine.stop] for x in (target, maximum, inverse)]
    grad, own = grad[mine.start : mine.stop] if grad.dim() else grad, whole_rows(shard, logits)
    dx = twin.cross_entropy_backward(grad, divisor, own, *of_rows, ignore_index, label_smoothing) if len(mine) else own
    return columns(shard, dx, n)
