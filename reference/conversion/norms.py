"""Which modules compute an RMSNorm: found by trying, because every architecture has a class of its own for it.

y = x · 1/√(mean(x²) + eps) · γ          γ is `weight`, or `weight + 1` (Gemma's)
"""

import copy
import inspect
import itertools
from typing import Any, NamedTuple

import torch

ROWS = (1.0, 30.0, 1e-3, 3e-5)  # root mean squares of the rows that are tried; the small ones show eps
RTOL = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class RMSNorm(NamedTuple):
    """The settings of a module's RMSNorm."""

    eps: float
    zero_centered_gamma: bool


def rms_norm_of(module: torch.nn.Module) -> RMSNorm | None:
    """The settings with which `module` computes an RMSNorm over its last dimension; None where it does not.

    Its one parameter must be `weight` `[hidden]`, its forward must take one argument, and eps must be an attribute.
    """
    weight = module._parameters.get("weight")
    if list(module._parameters) != ["weight"] or weight is None or weight.dim() != 1 or module._buffers:
        return None
    if module._modules or len(inspect.signature(module.forward).parameters) != 1:
        return None
    found = {value for value in vars(module).values() if type(value) is float and value > 0}
    try:
        with torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False):
            results = {dtype: _tried(module, dtype) for dtype in RTOL}
    except Exception:  # whatever it needs, it is no plain norm
        return None
    for eps, zero_centered in itertools.product(sorted(found), (False, True)):
        if all(_fits(*results[dtype], eps, zero_centered, dtype) for dtype in RTOL):
            return RMSNorm(eps, zero_centered)
    return None


def _tried(module: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, γ and y of a copy of `module` in `dtype`."""
    one = copy.deepcopy(module).to_empty(device="cpu").to(dtype)
    hidden = torch.arange(one.weight.numel(), dtype=torch.float32, device="cpu")
    one.weight.copy_(0.5 + hidden % 7 / 8)
    x = (hidden % 5 - 2.25) * (1 - 2 * (hidden % 2))
    x = x / x.square().mean().sqrt() * torch.tensor(ROWS, dtype=torch.float32, device="cpu")[:, None]
    return x.to(dtype), one.weight.detach(), one(x.to(dtype))


def _fits(x: Any, weight: Any, y: Any, eps: float, zero_centered: bool, dtype: torch.dtype) -> bool:
    wide = x.double()
    gamma = weight.double() + zero_centered
    expected = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * gamma
    return y.dtype is dtype and y.shape == x.shape and torch.allclose(y.double(), expected, RTOL[dtype], 0.0)
