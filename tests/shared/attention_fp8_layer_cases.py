"""Layers whose attention runs in FP8, and their training."""

from typing import Any

import numpy as np
import torch
from shared.bits import assert_same_bits

import reference as te

RECIPE = te.DelayedScaling(amax_history_len=4, fp8_dpa=True)
PLAIN = te.DelayedScaling(amax_history_len=4)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).bfloat16()


def layer(seed: int = 0, **more: Any) -> te.TransformerLayer:
    torch.manual_seed(seed)
    given: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "params_dtype": torch.bfloat16} | more
    return te.TransformerLayer(64, 96, 4, **given)


def train(module: Any, x: torch.Tensor, recipe: te.DelayedScaling = RECIPE, **more: Any) -> dict[str, torch.Tensor]:
    """One step: y, and the gradients."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(99)
    with te.autocast(recipe=recipe):
        y = module(x, **more)
    y.backward(numbers(1000, *y.shape))
    return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in module.named_parameters()}}  # type: ignore[dict-item]


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert_same_bits(x, b[name], name)


def core_of(module: Any) -> te.DotProductAttention:
    return module.self_attention.core_attention
