"""Operations of `te.ops`, and their runs."""

from typing import Any

import torch
from shared.bits import assert_same_bits

import reference as te

BF16, FP16 = torch.bfloat16, torch.float16
RECIPES = [None, te.DelayedScaling(amax_history_len=4), te.recipe.Float8CurrentScaling()]
CLAMP = {"limit": 1.5, "alpha": 0.9, "glu_linear_offset": -0.25}


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype = BF16) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def run(module: Any, *inputs: torch.Tensor, recipe: Any = None, seed: int = 9) -> list[torch.Tensor]:
    """Results, gradients of the inputs and of the parameters."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    module.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = module(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(out, [numbers(100 + i, tuple(y.shape), y.dtype) for i, y in enumerate(out)])
    grads: list[Any] = [*(x.grad for x in inputs), *(p.grad for p in module.parameters())]
    return [*(y.detach() for y in out), *grads]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        assert_same_bits(a, b, f"result {i}")
