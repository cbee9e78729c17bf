"""Training a layer on the CPU and its copy on a GPU side by side."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import reference as te

LEARNING_RATE = 0.03125
GROWTH = (1.0, 4.0, 0.25, 1.0, 16.0, 1.0, 1e-2, 1.0)  # of x and of the gradient, by step


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32) * scale).to(dtype)


def states(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Scales, histories and random states of every layer inside."""
    found = {}
    for name, part in module.named_modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            if key in getattr(part, "fp8_meta", {}):
                found[f"{name}.{key}.scale"] = part.fp8_meta[key].scale
                found[f"{name}.{key}.amax_history"] = part.fp8_meta[key].amax_history
        if hasattr(part, "generator"):
            found[f"{name}.generator"] = part.generator.state
    return found


def train_both(
    layer: torch.nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    recipe: te.DelayedScaling | None,
    same_bits: Callable[..., None],
    steps: int = 8,
    growth: tuple[float, ...] = GROWTH,
    cached: bool = False,
    **extra: Any,
) -> None:
    """Train a layer and its copy on the GPU side by side and compare everything they compute.

    With `cached`, weights are cast at every fourth step and kept for the next three.
    """
    pair = (layer, copy.deepcopy(layer).to("cuda"))
    for step in range(steps):
        x0, size, both = numbers(2 * step, shape, dtype, growth[step % 8]), 1e-2 * growth[step % 8], []
        extra |= {"is_first_microbatch": step % 4 == 0} if cached else {}
        for module in pair:
            device = next(module.parameters()).device
            x = x0.to(device, copy=True).requires_grad_()
            module.zero_grad(set_to_none=True)
            arguments = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in extra.items()}
            torch.manual_seed(step)  # of the masks
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = module(x, **arguments)
            y.backward(numbers(2 * step + 1, tuple(y.shape), dtype, size).to(device))
            found = {"y": y, "dx": x.grad} | {f"d {n}": p.grad for n, p in module.named_parameters()}
            both.append(found | states(module))
            with torch.no_grad():
                for p in module.parameters():
                    p.copy_(p - (p.grad * LEARNING_RATE))
        assert both[0].keys() == both[1].keys()
        for name, value in both[0].items():
            same_bits(value, both[1][name], f"step {step}, {name}")
        for (name, p), q in zip(pair[0].named_parameters(), pair[1].parameters(), strict=True):
            same_bits(p, q, f"step {step}, updated {name}")
