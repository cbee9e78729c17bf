"""An FP8 step of a layer, unfused: casts with its scales, products with their accumulation, the amaxes it leaves.

Sizes are to be chosen so that every product is longer than 128: up to there fast and split accumulation are one.
"""

from typing import Any, NamedTuple

import torch
from shared.bits import assert_same_bits

import reference as te
from reference.numbers import formats, tensor_core

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPE = te.DelayedScaling(amax_history_len=4)
twin = torch.ops.twin


class Cast(NamedTuple):
    """Codes `[rows, cols]` and what they are multiplied by to be read."""

    codes: torch.Tensor
    inverse: torch.Tensor

    def t(self) -> "Cast":
        """Transposed."""
        return Cast(self.codes.view(torch.uint8).t().contiguous().view(self.codes.dtype), self.inverse)


class Step:
    """One step of `layer` in the activation dtype `dtype`; made before it, asked after it."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        self.layer, self.dtype = layer, dtype
        self.scales = {key: layer.fp8_meta[key].scale.clone() for key in ("scaling_fwd", "scaling_bwd")}
        self.amaxes = {key: torch.zeros(1, len(scale)) for key, scale in self.scales.items()}

    def cast(self, t: torch.Tensor, column: int, key: str = "scaling_fwd") -> Cast:
        """`t` with the scale of a column, and its amax noted there."""
        scale, amaxes = self.scales[key][column], self.amaxes[key][0]
        amaxes[column] = torch.maximum(amaxes[column], t.float().abs().max())
        format_ = formats.format_of(E4M3 if key == "scaling_fwd" else E5M2)
        return Cast(formats.cast(t, format_, float(scale)), 1 / scale)

    def grad(self, t: torch.Tensor, column: int) -> Cast:
        """A gradient."""
        return self.cast(t, column, "scaling_bwd")

    def state(self, column: int, key: str = "scaling_fwd") -> tuple[Any, ...]:
        """The arguments of an op that casts what it computes."""
        return self.scales[key], self.amaxes[key], column, E4M3 if key == "scaling_fwd" else E5M2

    def product(self, a: Cast, b: Cast, accumulate: str, bias: torch.Tensor | None = None) -> torch.Tensor:
        """a·bᵀ + bias; the other accumulation would have given other bits."""
        fast, split = (self._product(a, b, mode, bias) for mode in ("fast", "split"))
        assert not torch.equal(fast, split), "too short to tell"
        return fast if accumulate == "fast" else split

    def _product(self, a: Cast, b: Cast, mode: str, bias: torch.Tensor | None) -> torch.Tensor:
        y = tensor_core.gemm(a.codes, b.codes, mode) * (a.inverse * b.inverse)
        return (y if bias is None else y + bias.float()).to(self.dtype)

    def check(self, found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
        """Results, and amaxes: each in its column, 0 in the others."""
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same_bits(found[name], value, name)
        for key, amaxes in self.amaxes.items():
            assert_same_bits(self.layer.fp8_meta[key].amax_history[-1:], amaxes, f"amaxes of {key}")


def run(layer: Any, x: torch.Tensor, *grads: torch.Tensor, **arguments: Any) -> dict[str, Any]:
    """Outputs of a step, numbered, and the gradients of x and of every parameter."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with te.autocast(recipe=RECIPE):
        y = layer(x, **arguments)
    outputs = y if isinstance(y, tuple) else (y,)
    torch.autograd.backward(outputs[: len(grads)], grads)
    found = {f"output {i}": t.detach() for i, t in enumerate(outputs)} | {"dx": x.grad}
    return found | {f"d{name}": p.grad for name, p in layer.named_parameters() if p.requires_grad}
