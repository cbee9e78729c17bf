"""Quantizers: what becomes of each tensor role of a GEMM, its input, its weight and the gradient of its output.

A layer is written once over quantizers; a recipe (`reference.recipes`) is the choice of one for each role. Each can
quantize alone, and at the end of the op before it (a norm, a GEMM with activation, a gradient put together of parts).
The base class does that in two steps, through the activation dtype T; a recipe that has fused kernels overrides it.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from reference.ops.cat_cast_transpose import side_by_side
from reference.ops.library import twin
from reference.quantized import Accumulation, Quantized, Transposed, as_dtype, dgrad, fprop


class NormPlan(NamedTuple):
    """A norm: what is added to the variance, whether γ is kept as γ − 1, and "layernorm" or "rmsnorm"."""

    eps: float
    zero_centered: bool
    kind: str


class ActivationPlan(NamedTuple):
    """An activation between GEMMs: its kind, T, and how those GEMMs accumulate."""

    kind: str
    dtype: torch.dtype
    how: Accumulation


Produced = tuple[Quantized, torch.Tensor | None]  # a gradient, and its column sums where they are wanted


class Quantizer:
    """The quantizer of one tensor role.

    Attributes:
        kind: hashable; all that its launches depend on besides tensors.
        dtype: of the codes.
        fp8: whether it gives FP8 codes.
    """

    kind: Hashable
    dtype: torch.dtype
    fp8 = False

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What it reads besides its arguments."""
        return ()

    def changes(self) -> tuple[torch.Tensor, ...]:
        """Those of them that it changes."""
        return ()

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        """x `[rows, cols]`; with its transpose where a backward will read that."""
        raise NotImplementedError

    def quantize_together(self, others: "Sequence[Quantizer]", xs: list[torch.Tensor]) -> list[Quantized]:
        """Several matrices of one dtype, transposed, too; the first is this quantizer's, the next are `others`'."""
        return [quantizer.quantize(x, True) for quantizer, x in zip((self, *others), xs, strict=True)]

    def norm(
        self,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        plan: NormPlan,
        dtype: torch.dtype,
        transpose: bool,
    ) -> tuple[Quantized, torch.Tensor, torch.Tensor]:
        """The normalised x, and the rows' mean and rstd."""
        y, mean, rstd = twin.norm(x, gamma, beta, *plan, dtype)
        return self.quantize(y, transpose), mean, rstd

    def activation(
        self, x: Quantized, w: Quantized, bias: torch.Tensor | None, plan: ActivationPlan, transpose: bool
    ) -> tuple[torch.Tensor, Quantized]:
        """The pre-activation h = x·wᵀ + bias `[tokens, out]` in T, and its activation."""
        h = fprop(x, w, bias, plan.dtype, plan.how)
        return h, self.quantize(twin.activation(h, plan.kind), transpose)

    def grad(self, g: torch.Tensor, transpose: bool, dbias: bool) -> Produced:
        """A gradient, and its column sums."""
        return self.quantize(g, transpose), twin.dbias(g) if dbias else None

    def joined_grad(self, parts: list[torch.Tensor], groups: int, transpose: bool, dbias: bool) -> Produced:
        """`grad` of matrices side by side in each of `groups` groups of columns."""
        return self.grad(side_by_side(parts, groups), transpose, dbias)

    def activation_grad(
        self, g: Quantized, w: Transposed, h: torch.Tensor, plan: ActivationPlan, transpose: bool, dbias: bool
    ) -> Produced:
        """The gradient of the pre-activation h; g·w is that of the activation."""
        return self.grad(twin.activation_backward(dgrad(g, w, plan.dtype, plan.how), h, plan.kind), transpose, dbias)


class HighPrecision(Quantizer):
    """16 bits (or fp32, with GEMMs that are PyTorch's own): x rounded to `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.kind = dtype

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        x = as_dtype(x, self.dtype)
        return Quantized(x, x.t() if transpose else None, None, None)

    def grad(self, g: torch.Tensor, transpose: bool, dbias: bool) -> Produced:
        return super().grad(as_dtype(g, self.dtype), transpose, dbias)


class Calibrating(HighPrecision):
    """16 bits, noting in a column of an amax history the amax of what FP8 would cast."""

    def __init__(self, dtype: torch.dtype, meta: Any, column: int) -> None:
        super().__init__(dtype)
        self.kind = ("calibrating", dtype, column)
        self.meta, self.column = meta, column

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.meta.amax_history,)

    changes = tensors

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        found = super().quantize(x, transpose)
        self._note(found.codes)
        return found

    def _note(self, x: torch.Tensor) -> None:
        twin.amax(x.detach().contiguous(), self.meta.amax_history, self.column)


class CalibratingWeight(Calibrating):
    """The same of a weight, whose amax FP8 would take before it is rounded."""

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        self._note(x)
        return HighPrecision.quantize(self, x, transpose)


class Gemm(NamedTuple):
    """The quantizers of one GEMM of a layer, and how it accumulates: a linear layer has one, an MLP two."""

    input: Quantizer
    weight: Quantizer
    grad: Quantizer
    how: Accumulation = Accumulation()

    @property
    def kind(self) -> Hashable:
        """All that its launches depend on besides tensors."""
        return self.input.kind, self.weight.kind, self.grad.kind, self.how
