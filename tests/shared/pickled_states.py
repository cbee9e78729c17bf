"""A layer that has run in FP8, and `_extra_state`s as Transformer Engine pickles them, for the tests of checkpoints."""

from typing import Any

import torch

import reference as te
from reference.checkpoints import pickled

KEY = "_extra_state"
BF16 = torch.bfloat16


def trained(recipe: te.DelayedScaling | None = None) -> te.Linear:
    layer = te.Linear(32, 16, params_dtype=BF16)
    with te.autocast(recipe=recipe or te.DelayedScaling(amax_history_len=4)):
        y = layer(torch.linspace(-3, 3, 256).view(8, 32).to(BF16))
    y.sum().backward()
    return layer


def fresh_state() -> dict[str, torch.Tensor]:
    """The four tensors of a Linear, by Transformer Engine's names."""
    return {
        "scale_fwd": torch.ones(3),
        "amax_history_fwd": torch.zeros(4, 3),
        "scale_bwd": torch.ones(2),
        "amax_history_bwd": torch.zeros(4, 2),
    }


def written(change: dict[str, Any], columns: tuple[int, int] = (3, 2), drop: str = "") -> torch.Tensor:
    """A pickled state, changed."""
    tree: dict[str, Any] = {}
    for count, way in zip(columns, ("fwd", "bwd"), strict=True):
        tree |= {f"scale_{way}": torch.ones(count), f"amax_history_{way}": torch.zeros(4, count)}
    tree |= {"extra_fp8_variables": {}, **change}
    tree.pop(drop, None)
    return torch.frombuffer(bytearray(pickled.dump(tree)), dtype=torch.uint8)
