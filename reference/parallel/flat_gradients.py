"""Gradients one after the other in one tensor, as ranks exchange them: its parts, and rows for each rank."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from reference.support.groups import bytes_of

BUCKET = 1 << 24  # numbers that travel together where no hook of DDP says so


def buckets(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype and device, about `BUCKET` numbers."""
    found: list[torch.Tensor] = []
    for p in parameters:
        if found and (
            (p.dtype, p.device) != (found[0].dtype, found[0].device) or sum(x.numel() for x in found) >= BUCKET
        ):
            yield found
            found = []
        found.append(p)
    if found:
        yield found


def views(flat: torch.Tensor, shapes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of `flat`, with the shapes of these tensors."""
    parts = flat.split([x.numel() for x in shapes])
    return [part.view(x.shape) for part, x in zip(parts, shapes, strict=True)]


def laid_out(view: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """DistributedDataParallel's place of p's gradient: in the order of p's memory, if that has no gaps.

    `GradBucket.gradients` does not say so.
    """
    dense = torch.empty_like(p, device="meta").stride() == p.stride()
    return view.as_strided(p.shape, p.stride(), view.storage_offset()) if dense else view


def part_of(node: torch.Tensor, part: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """The part of `node` that lies as `part` does in `flat`."""
    return node.as_strided(part.shape, part.stride(), part.storage_offset() - flat.storage_offset())


def write_rows(pieces: torch.Tensor, node: torch.Tensor) -> None:
    """Write `node` [n] to the rows of `pieces` [ranks, size], one after the other; what is left of them stays."""
    size = pieces.shape[1]
    full = node.numel() // size
    pieces[:full].copy_(node[: full * size].view(full, size))
    if node.numel() > full * size:
        pieces[full, : node.numel() - full * size].copy_(node[full * size :])


def all_to_all(
    out: torch.Tensor, given: torch.Tensor, counts: list[int], sent: list[int], size: int, group: Any
) -> None:
    """Rows of `size` numbers: `sent[r]` of `given` to rank r, `counts[r]` from it, in the order of ranks."""
    each = size * given.element_size()
    dist.all_to_all_single(
        bytes_of(out), bytes_of(given), [each * n for n in counts], [each * n for n in sent], group=group
    )
