"""How processes share a run: ranks of torch.distributed's default group, in groups.

    rank = (d · context + c) · tensor + t        d: which microbatches; c: which tokens; t: which part of the weights

Ranks with one d share a microbatch: those with one c, too, the weights of the layers (heads, and features of the MLPs),
those with one t the tokens of each sequence. Ranks with one c and t share a step's groups of microbatches, and with
`shard` weights and moments, too. The bits are those of one process in every layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from optimized.training.settings import Settings
from reference.ops.gemms.gemm_part import CUTS
from reference.parallel.ordered_reduce import gathered_rows
from reference.parallel.tensor import part_of
from reference.parallel.tensor_state import partitions_of
from reference.parallel.tokens import BLOCK
from reference.support import groups

# What divides a rank's part of K in a layer's GEMMs: of proj and fc2 in forward, of QKV and fc1 in backward.
_PARTS = {
    "bf16": (CUTS["16 bits"], CUTS["16 bits"]),
    "delayed": (CUTS["fast"], CUTS["split"]),
    "current": (CUTS["fast"], CUTS["split"]),
    "block": (CUTS["blocks"], CUTS["blocks"]),
}


@dataclass(frozen=True)
class Layout:
    """A layout of all ranks.

    Attributes:
        shard: FSDP2's `fully_shard` over the ranks that share a step's microbatches.
        tensor: how many ranks share the layers' weights.
        context: how many ranks share the tokens of a sequence.
    """

    shard: bool = False
    tensor: int = 1
    context: int = 1

    @property
    def inner(self) -> int:
        """How many ranks share a microbatch."""
        return self.tensor * self.context

    def check(self, settings: Settings, world: int) -> None:
        """Refuse a layout that so many ranks cannot have, or that this model cannot be trained in.

        Raises:
            ValueError: in a sentence.
        """
        for name in ("tensor", "context"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}; an int from 1 is accepted.")
        if world % self.inner:
            raise ValueError(f"{world} ranks in groups of {self.inner}; a multiple of {self.inner} is accepted.")
        if self.inner > 1 and settings.precision not in _PARTS:
            accepted = ", ".join(_PARTS)
            raise ValueError(
                f"precision={settings.precision!r} with ranks that share a microbatch; {accepted} are accepted."
            )
        tokens = 2 * BLOCK * self.context
        if self.context > 1 and settings.sequence % tokens:
            raise ValueError(
                f"sequence={settings.sequence} with context={self.context}; a multiple of {tokens} is accepted."
            )
        if self.tensor > 1:
            self._check_tensor(settings)

    def _check_tensor(self, settings: Settings) -> None:
        if settings.heads % self.tensor:
            raise ValueError(
                f"heads={settings.heads} with tensor={self.tensor}; a multiple of {self.tensor} is accepted."
            )
        forward, backward = _PARTS[settings.precision]
        for what, size, cut in (
            ("columns of proj", settings.hidden, forward),
            ("rows of QKV", 3 * settings.hidden, backward),
            ("rows of fc1", 4 * settings.hidden, backward),
        ):
            if size % (cut * self.tensor):
                raise ValueError(
                    f"hidden={settings.hidden} with tensor={self.tensor} and precision={settings.precision!r}: the "
                    f"layers' {size} {what} go to the ranks in multiples of {cut}; another hidden, or fewer ranks, are "
                    f"accepted."
                )


class Places:
    """This rank's groups in a layout.

    Attributes:
        data: whose ranks share a step; None is the default group, or this process where there is none.
        tensor, context: whose ranks share a microbatch; None where nobody does.
    """

    data: Any = None
    tensor: Any = None
    context: Any = None

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        if layout.inner == 1:
            return
        ranks = torch.arange(dist.get_world_size(), device="cpu").view(-1, layout.context, layout.tensor)
        for dim, name in enumerate(("data", "context", "tensor")):
            if name != "data" and ranks.shape[dim] == 1:
                continue
            for members in ranks.movedim(dim, -1).flatten(0, -2).tolist():  # every rank makes every group
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    setattr(self, name, group)

    # --- tensors of which ranks have parts ---------------------------------------------------------------

    def joined(self, model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors by parameter (the name's second part), whole: all ranks of `tensor` ask for them."""
        if self.tensor is None:
            return dict(named)
        found, partitions, group = dict(named), partitions_of(model), groups.name_of(self.tensor)
        for name, x in named.items():
            if (how := partitions.get(_parameter(name))) is not None:
                dim, sizes = how
                parts = gathered_rows(group, x.detach().contiguous()[None])
                pieces = zip(*[one.split(list(sizes), dim) for one in parts], strict=True)
                found[name] = torch.cat([part for piece in pieces for part in piece], dim)
        return found

    def part(self, model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's parts of what `joined` gives."""
        if self.tensor is None:
            return dict(named)
        partitions, rank, count = partitions_of(model), dist.get_rank(self.tensor), self.layout.tensor
        return {
            name: part_of(x, *how, rank, count) if (how := partitions.get(_parameter(name))) is not None else x
            for name, x in named.items()
        }


def _parameter(name: str) -> str:
    """The parameter that a tensor of a checkpoint belongs to: "optimizer/layers.0.proj.weight/exp_avg"."""
    parts = name.split("/")
    return parts[1] if parts[0] in ("model", "optimizer") else ""
