"""A model's state, whole and in parts: what one process has in a file, on the ranks of a tensor-parallel group.

    rank r of t:    model.load_state_dict(part_of_state(model, torch.load(file), r, t))
    back:           whole_state(model, [the t ranks' state_dicts, in order of rank])

Scales and amax histories are those of whole tensors, the same on every rank, so FP8 state goes as it is. Stopped on any
number of ranks, a run goes on on any other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reference.parallel.tensor import part_of


def partitions_of(model: torch.nn.Module) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Name in a state → (dimension along which ranks have parts, sizes of a rank's pieces) of each such parameter."""
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    for prefix, module in model.named_modules():
        one: Any = module
        if getattr(one, "tp_size", 1) > 1 and hasattr(one, "partitions"):  # reference.nn.core.tensor_parallel
            found |= {f"{prefix}.{name}" if prefix else name: how for name, how in one.partitions().items()}
    return found


def part_of_state(model: torch.nn.Module, state: Mapping[str, Any], rank: int, count: int) -> dict[str, Any]:
    """A rank's part of the whole model's state.

    Args:
        model: this rank's.
        state: the state_dict of the same model in one process.
        rank, count: in the tensor-parallel group.

    Raises:
        ValueError: a tensor is not `count` times as large as this rank's part.
    """
    found = dict(state)
    for name, (dim, sizes) in partitions_of(model).items():
        if name not in found:
            continue
        x, whole = found[name], sum(sizes) * count
        if x.shape[dim] != whole:
            raise ValueError(
                f"part_of_state: {name} has shape {list(x.shape)}; {whole} along dimension {dim} is accepted, the "
                f"whole parameter of {count} ranks."
            )
        found[name] = part_of(x, dim, sizes, rank, count)
    return found


def whole_state(model: torch.nn.Module, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state_dict of the model in one process from those of all ranks, in order; `model` is any rank's.

    Raises:
        ValueError: a layer is shared by another number of ranks than there are states.
    """
    for name, module in model.named_modules():
        size = getattr(module, "tp_size", 1)
        if hasattr(module, "partitions") and size not in (1, len(states)):
            raise ValueError(
                f"whole_state: {len(states)} states of a model whose {name or type(module).__name__} is shared by "
                f"{size} ranks; the states of all {size} are accepted."
            )
    found = dict(states[0])
    for name, (dim, sizes) in partitions_of(model).items():
        if name in found:
            pieces = zip(*[one[name].split(list(sizes), dim) for one in states], strict=True)
            found[name] = torch.cat([part for piece in pieces for part in piece], dim)
    return found
