"""Layers of which statistics are collected, and one step of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import reference as te

BF16 = torch.bfloat16
DELAYED, CURRENT = te.DelayedScaling(amax_history_len=4), te.recipe.Float8CurrentScaling()
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(32, 48, params_dtype=BF16),
    "Linear, fp32 parameters": lambda: te.Linear(32, 48, params_dtype=torch.float32),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 48, params_dtype=BF16),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64, params_dtype=BF16, activation="swiglu"),
    "TransformerLayer": lambda: te.TransformerLayer(32, 64, 2, params_dtype=BF16),
    "grouped queries, no bias": lambda: te.TransformerLayer(32, 64, 4, num_gqa_groups=2, bias=False, params_dtype=BF16),
    "two layers": lambda: torch.nn.Sequential(*(te.TransformerLayer(32, 64, 2, params_dtype=BF16) for _ in range(2))),
}


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).to(BF16)


def step(model: Any, i: int = 0, recipe: Any = DELAYED, forward: Any = None) -> list[torch.Tensor]:
    """One step without an optimizer: outputs, gradients, FP8 state."""
    x = numbers(i, 16, 2, 32).requires_grad_()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(i)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = (forward or model)(x)
    y.backward(numbers(i + 100, *y.shape) * 2.0**-16)
    state = [meta for m in model.modules() for key, meta in getattr(m, "fp8_meta", {}).items() if key != "recipe"]
    grads = [p.grad for p in model.parameters()]
    return [y.detach(), x.grad, *grads, *(t.clone() for meta in state for t in (meta.scale, meta.amax_history))]


def made(name: str) -> torch.nn.Module:
    torch.manual_seed(3)
    return LAYERS[name]()
