"""A quantizer that shows what it is given and what it makes of it."""

from collections.abc import Callable, Sequence

import torch

from reference.ops.casts.cat_cast_transpose import side_by_side
from reference.ops.library import twin
from reference.recipes.quantized import Operand, Quantized, dgrad
from reference.recipes.quantizer import ActivationPlan, Around, NormPlan, Produced, Quantizer

Record = Callable[[Quantizer, torch.Tensor, Quantized], None]


class Observed(Around):
    """Runs `inner`, fused kernels included, then calls `record(inner, x, quantized)`.

    x is the tensor that a GEMM in 16 bits would read. What a fused kernel casts without writing it is computed once
    more, in the activation dtype.
    """

    def __init__(self, inner: Quantizer, record: Record) -> None:
        self.inner, self.record = inner, record
        self.key, self.dtype, self.dtype_t, self.fp8 = inner.key, inner.dtype, inner.dtype_t, inner.fp8

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        found = self.inner.quantize(x, transpose)
        self.record(self.inner, x, found)
        return found

    def quantize_together(self, others: Sequence[Quantizer], xs: list[torch.Tensor]) -> list[Quantized]:
        every = (self, *others)
        plain = [one.inner if isinstance(one, Observed) else one for one in every]
        found = plain[0].quantize_together(plain[1:], xs)
        for one, x, quantized in zip(every, xs, found, strict=True):
            if isinstance(one, Observed):
                one.record(one.inner, x, quantized)
        return found

    def norm(
        self,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        plan: NormPlan,
        dtype: torch.dtype,
        transpose: bool,
    ) -> tuple[Quantized, torch.Tensor, torch.Tensor]:
        found = self.inner.norm(x, gamma, beta, plan, dtype, transpose)
        self.record(self.inner, twin.norm(x, gamma, beta, *plan, dtype)[0], found[0])
        return found

    def activation(
        self, x: Quantized, w: Quantized, bias: torch.Tensor | None, plan: ActivationPlan, transpose: bool
    ) -> tuple[torch.Tensor, Quantized]:
        h, found = self.inner.activation(x, w, bias, plan, transpose)
        self.record(self.inner, twin.activation(h, plan.kind), found)
        return h, found

    def grad(self, g: torch.Tensor, transpose: bool, dbias: bool) -> Produced:
        found = self.inner.grad(g, transpose, dbias)
        self.record(self.inner, g, found[0])
        return found

    def joined_grad(self, parts: list[torch.Tensor], groups: int, transpose: bool, dbias: bool) -> Produced:
        found = self.inner.joined_grad(parts, groups, transpose, dbias)
        self.record(self.inner, side_by_side(parts, groups), found[0])
        return found

    def activation_grad(
        self, g: Quantized, w: Operand, h: torch.Tensor, plan: ActivationPlan, transpose: bool, dbias: bool
    ) -> Produced:
        found = self.inner.activation_grad(g, w, h, plan, transpose, dbias)
        x = twin.activation_backward(dgrad(g, w, plan.dtype, plan.how), h, plan.kind)
        self.record(self.inner, x, found[0])
        return found
