"""Which modules compute an RMSNorm: found by trying, because every architecture has a class of its own for it.

y = x · 1/√(mean(x²) + eps) · γ          γ is `weight`, or `weight + 1` (Gemma's)

Tried are rows from tiny to huge, several shapes, training and evaluation, and the gradients of x and γ: a norm that
clamps, or detaches or clips what goes back, is another function.
"""

import copy
import inspect
import itertools
import math
from typing import Any, NamedTuple

import torch

# Root mean squares of the rows that are tried; the small ones show eps, the large ones a limit. Beyond 1e12 rstd³,
# which PyTorch's backward computes in fp32, underflows.
ROWS = (1.0, 30.0, 1e-3, 3e-5, 1e3, 1e6, 1e8, 1e10)
GRADS = (1.0, 1e-6, 30.0, 1e4, 1e8, 1.0, 1e12, 1e3)  # root mean squares of the rows' gradients
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
        with torch.device("cpu"), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            results = {dtype: _tried(module, dtype) for dtype in RTOL}
    except Exception:  # whatever it needs, it is no plain norm
        return None
    for eps, zero_centered in itertools.product(sorted(found), (False, True)):
        if all(_fits(one, eps, zero_centered, dtype) for dtype, several in results.items() for one in several):
            return RMSNorm(eps, zero_centered)
    return None


class _Trial(NamedTuple):
    """x, γ, the gradient of y, and what a module makes of them."""

    x: torch.Tensor
    weight: torch.Tensor
    grad: torch.Tensor
    y: torch.Tensor
    dx: torch.Tensor
    dweight: torch.Tensor


def _tried(module: Any, dtype: torch.dtype) -> list[_Trial]:
    """What a copy of `module` in `dtype` makes of a matrix, of one row and of two batches, training and not."""
    found = []
    for training, shape in ((True, (len(ROWS),)), (False, (2, len(ROWS) // 2)), (True, (1,)), (False, (1, len(ROWS)))):
        one = copy.deepcopy(module).to_empty(device="cpu").to(dtype).train(training)
        one.weight.requires_grad_(True)
        hidden = torch.arange(one.weight.numel(), dtype=torch.float32, device="cpu")
        with torch.no_grad():
            one.weight.copy_(0.5 + hidden % 7 / 8)
        x = (hidden % 5 - 2.25) * (1 - 2 * (hidden % 2))
        rows, grads = (torch.tensor(sizes, dtype=torch.float32, device="cpu")[:, None] for sizes in (ROWS, GRADS))
        x = (x / x.square().mean().sqrt() * rows)[-math.prod(shape) :].reshape(*shape, -1).to(dtype).requires_grad_()
        grad = ((hidden % 3 - 0.75) * grads)[-math.prod(shape) :].reshape(*shape, -1).to(dtype)
        y = one(x)
        dx, dweight = torch.autograd.grad(y, (x, one.weight), grad)
        found.append(_Trial(x.detach(), one.weight.detach(), grad, y.detach(), dx, dweight))
    return found


def _fits(found: _Trial, eps: float, zero_centered: bool, dtype: torch.dtype) -> bool:
    """Whether a trial has the numbers of the formula, computed in float64; gradients within rounding of their terms."""
    x, weight = (one.double().requires_grad_() for one in (found.x, found.weight))
    gamma = weight + float(zero_centered)
    expected = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gamma
    if found.y.dtype is not dtype or found.y.shape != x.shape:
        return False
    if not torch.allclose(found.y.double(), expected.detach(), RTOL[dtype], 0.0):
        return False
    grad = found.grad.double()
    dx, dweight = torch.autograd.grad(expected, (x, weight), grad)
    # Both are differences or sums: what rounding may change is a part of the largest term.
    rstd = (x.detach().square().mean(-1, keepdim=True) + eps).rsqrt()
    terms = (grad * gamma.detach()).abs().amax(-1, keepdim=True) * rstd
    rows = (grad * expected.detach() / gamma.detach()).abs().reshape(-1, weight.numel()).sum(0)
    close = 10 * RTOL[dtype]
    fits = (found.dx.double() - dx).abs() <= close * terms
    return bool(fits.all() and ((found.dweight.double() - dweight).abs() <= close * rows).all())
