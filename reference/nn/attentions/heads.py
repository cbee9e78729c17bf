"""Queries, keys and values side by side in one projection, and the pair of functions that splits them."""

from typing import Any, NamedTuple

import torch

from reference.nn.core.context import BlockContext
from reference.ops.casts.cat_cast_transpose import side_by_side
from reference.support.nested import Tensors


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x with a contiguous last dimension: PyTorch's own attention and expanded gradients have any strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _laid_out(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """x in a shape, its last dimension as it was; what has to be copied is copied by 8 bytes, not number by number."""
    if torch.compiler.is_compiling():  # which writes its own kernel
        return x.reshape(shape)
    each = 8 // x.element_size()
    apart = (*x.stride()[:-1], x.storage_offset(), x.shape[-1])
    if each == 1 or x.is_contiguous() or x.stride(-1) != 1 or any(number % each for number in apart):
        return x.reshape(shape)
    return x.view(torch.int64).reshape(*shape[:-1], shape[-1] // each).view(x.dtype)


class Heads(NamedTuple):
    """Layout of q, k and v in a projection: `[group, part, channel]` if interleaved, else `[part, group, channel]`."""

    parts: tuple[int, ...]
    groups: int
    channels: int
    interleaved: bool

    @property
    def rows(self) -> int:
        """The number of groups for `side_by_side`."""
        return self.groups if self.interleaved else 1

    def split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v `[.., .., heads, channels]` of the projection."""
        rows, lead = sum(self.parts), mixed.shape[:-1]
        whole = (self.groups, rows) if self.interleaved else (rows, self.groups)
        pieces = mixed.unflatten(-1, (*whole, self.channels)).split(self.parts, dim=-2 if self.interleaved else -3)
        sizes = [(*lead, self.groups * part, self.channels) for part in self.parts]
        return tuple([_laid_out(piece, size) for piece, size in zip(pieces, sizes, strict=True)])

    def of_groups(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[tokens, groups, queries, channels]`, k and v `[tokens, groups, channels]` of the projection `[tokens,
        features]`, where they lie.
        """
        queries = self.parts[0]
        if self.interleaved:
            pieces = mixed.unflatten(1, (self.groups, sum(self.parts), self.channels))
            return pieces[:, :, :queries], pieces[:, :, queries], pieces[:, :, queries + 1]
        q, k, v = mixed.split([part * self.groups * self.channels for part in self.parts], 1)
        of_keys = (self.groups, self.channels)
        return q.unflatten(1, (self.groups, queries, self.channels)), k.unflatten(1, of_keys), v.unflatten(1, of_keys)


class SplitPlan(NamedTuple):
    """Whether the gradient is wanted, and the layout of the heads."""

    needs: tuple[bool, ...]
    heads: Heads


def split_forward(plan: SplitPlan, context: BlockContext, mixed: torch.Tensor) -> tuple[Any, tuple[()]]:
    """q, k and v `[.., .., heads, channels]`."""
    return plan.heads.split(mixed), ()


def split_backward(plan: SplitPlan, context: BlockContext, saved: tuple[()], *grads: torch.Tensor) -> Tensors:
    """The gradients of q, k and v, side by side."""
    heads, lead = plan.heads, grads[0].shape[:-2]
    grads = tuple(dense_rows(grad) for grad in grads)
    rows = [grad.reshape(lead.numel(), grad.shape[-2] * grad.shape[-1]) for grad in grads]
    return (side_by_side(rows, heads.rows).view(*lead, sum(heads.parts) * heads.groups * heads.channels),)
