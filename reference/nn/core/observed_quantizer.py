"""A quantizer that shows what it is given and what it makes of it."""

from collections.abc import Callable, Sequence

import torch

from reference.ops.casts.cat_cast_transpose import side_by_side
from reference.ops.library import twin
from reference.recipes.quantized import Operand, Quantized, dgrad
from reference.recipes.quantizer import ActivationPlan, Around, NormPlan, Produced, Quantizer

Record = Callable[[Quantizer, torch.Tensor, Quantized, torch.Tensor | None], None]


class Observed(Around):
    """Runs `inner`, fused kernels included, then calls `record(inner, x, quantized, scale)`.

    x is the tensor that a GEMM in 16 bits would read, scale what it was multiplied by, None for plain numbers. What a
    fused kernel casts without writing it is computed once more, in the activation dtype.
    """

    def __init__(self, inner: Quantizer, record: Record) -> None:
        self.inner, self._record = inner, record
        self.key, self.dtype, self.dtype_t, self.fp8 = inner.key, inner.dtype, inner.dtype_t, inner.fp8

    def record(self, x: torch.Tensor, found: Quantized) -> None:
        """Call `record` with what became of x."""
        x = x.detach().contiguous()
        self._record(self.inner, x, found, self.inner.scale(x))

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        found = self.inner.quantize(x, transpose)
        self.record(x, found)
        return found

    def quantize_together(self, others: Sequence[Quantizer], xs: list[torch.Tensor]) -> list[Quantized]:
        every = (self, *others)
        plain = [one.inner if isinstance(one, Observed) else one for one in every]
        found = plain[0].quantize_together(plain[1:], xs)
        for one, x, quantized in zip(every, xs, found, strict=True):
            if isinstance(one, Observed):
                one.record(x, quantized)
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
        self.record(twin.norm(x, gamma, beta, *plan, dtype)[0], found[0])
        return found

    def activation(
        self, x: Quantized, w: Quantized, bias: torch.Tensor | None, plan: ActivationPlan, transpose: bool
    ) -> tuple[torch.Tensor, Quantized]:
        h, found = self.inner.activation(x, w, bias, plan, transpose)
        y = twin.activation(h, plan.kind)
        self._record(self.inner, y, found, self.inner.scale_of_activation(h, plan.kind, y))
        return h, found

    def grad(self, g: torch.Tensor, transpose: bool, dbias: bool) -> Produced:
        found = self.inner.grad(g, transpose, dbias)
        self.record(g, found[0])
        return found

    def joined_grad(self, parts: list[torch.Tensor], groups: int, transpose: bool, dbias: bool) -> Produced:
        found = self.inner.joined_grad(parts, groups, transpose, dbias)
        self.record(side_by_side(parts, groups), found[0])
        return found

    def activation_grad(
        self, g: Quantized, w: Operand, h: torch.Tensor, plan: ActivationPlan, transpose: bool, dbias: bool
    ) -> Produced:
        found = self.inner.activation_grad(g, w, h, plan, transpose, dbias)
        x = twin.activation_backward(dgrad(g, w, plan.dtype, plan.how), h, plan.kind)
        self.record(x, found[0])
        return found
