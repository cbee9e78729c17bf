"""Quantizers of a layer's roles (`reference.recipes.roles`): a GEMM's input, its weight, the gradient of its output.

A layer is written once over quantizers; a recipe (`reference.recipes`) chooses one for each role. A quantizer can also
be the end of the op before it (a norm, a GEMM with activation, a join of gradients). The base class runs that op and
then quantizes, through the activation dtype T; a recipe with fused kernels overrides it.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from reference.ops.attentions.attention_packed import alone_rows
from reference.ops.casts.cat_cast_transpose import side_by_side
from reference.ops.library import twin
from reference.recipes.quantized import Accumulation, Operand, Quantized, as_dtype, dequantize, dgrad, fprop


class NormPlan(NamedTuple):
    """A norm: eps, whether γ is kept as γ − 1, and "layernorm" or "rmsnorm"."""

    eps: float
    zero_centered: bool
    kind: str


class ActivationPlan(NamedTuple):
    """An activation between GEMMs: its kind, T, and how those GEMMs accumulate."""

    kind: str
    dtype: torch.dtype
    how: Accumulation


Produced = tuple[Quantized, torch.Tensor | None]  # a gradient, and its column sums or None


class Quantizer:
    """The quantizer of one tensor role.

    Attributes:
        key: hashable; everything but tensors that its launches depend on.
        dtype: of the codes.
        dtype_t: of the transposed codes, which backward reads; None where it is `dtype`.
        fp8: whether the codes are FP8.
        layout: that of `quantize(x).row`, where `quantized_model_init` may keep a weight in it (`KEEPING`); else None.
        reads_amax: whether it reads a tensor for its amax, so that who makes the tensor had better give it (`knowing`).
    """

    key: Hashable
    dtype: torch.dtype
    dtype_t: torch.dtype | None = None
    fp8 = False
    layout: str | None = None
    reads_amax = False

    @property
    def kept_key(self) -> Hashable:
        """`key` without what may change between microbatches: a cast that is kept serves those with the same."""
        return self.key

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that it reads besides its arguments."""
        return ()

    def changes(self) -> tuple[torch.Tensor, ...]:
        """The tensors among them that it changes."""
        return ()

    def knowing(self, amax: torch.Tensor | None) -> "Quantizer":
        """This quantizer for a tensor, or parts of one, whose amax is known, fp32 `[1, 1]`; None is unknown."""
        return self

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        """x `[rows, cols]` quantized, with its transpose if a backward will read it."""
        raise NotImplementedError

    def quantize_packed(
        self, x: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, transpose: bool
    ) -> Quantized:
        """`quantize` of packed sequences' tokens x `[tokens, cols]`, of which those in no sequence count as zeros.

        lengths, starts: int32 `[b]` and `[b + 1]`, as in `reference.ops.attentions.attention_packed`.
        """
        return self.quantize(x.masked_fill(alone_rows(lengths, starts, x.shape[0])[:, None], 0.0), transpose)

    def scale(self, x: torch.Tensor) -> torch.Tensor | None:
        """The scale, fp32 `[1]`, by which `quantize(x)` multiplies; None where there is not one for all of x."""
        return None

    def scales(self, xs: list[torch.Tensor]) -> torch.Tensor | None:
        """`scale` of each of several matrices of one dtype, fp32 `[len(xs)]`."""
        found = [scale for x in xs if (scale := self.scale(x)) is not None]
        return torch.cat(found) if len(found) == len(xs) else None

    def scale_of_activation(self, h: torch.Tensor, kind: str, y: torch.Tensor) -> torch.Tensor | None:
        """The same of `activated(h, kind)`, whose result in T is y."""
        return self.scale(y)

    def of_backward(self, x: torch.Tensor, row: Operand) -> Operand:
        """What a backward reads of x in `dtype_t`, along its columns; `row` is x quantized."""
        raise NotImplementedError

    def quantize_together(self, others: "Sequence[Quantizer]", xs: list[torch.Tensor]) -> list[Quantized]:
        """Several matrices of one dtype, with transposes: the first by this quantizer, the next by `others`."""
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
        """The normalised x, quantized, and the rows' mean and rstd."""
        y, mean, rstd = twin.norm(x, gamma, beta, *plan, dtype)
        return self.quantize(y, transpose), mean, rstd

    def begin_norm(self, *given: Any) -> Callable[[], tuple[Quantized, torch.Tensor, torch.Tensor]]:
        """`norm` of these; what comes from other ranks is under way until the result is called, once."""
        found = self.norm(*given)
        return lambda: found

    def activation(
        self, x: Quantized, w: Quantized, bias: torch.Tensor | None, plan: ActivationPlan, transpose: bool
    ) -> tuple[torch.Tensor, Quantized]:
        """The pre-activation h = x·wᵀ + bias `[tokens, out]` in T, and its activation, quantized."""
        h = fprop(x, w, bias, plan.dtype, plan.how)
        return h, self.activated(h, plan.kind, transpose)[1]

    def activated(self, h: torch.Tensor, kind: str, transpose: bool) -> tuple[torch.Tensor, Quantized]:
        """The activation of h in T, and quantized; what `activation` makes where it is not fused with the GEMM."""
        y = twin.activation(h, kind)
        return y, self.quantize(y, transpose)

    def grad(self, g: torch.Tensor, transpose: bool, dbias: bool) -> Produced:
        """A gradient, quantized, and its column sums."""
        return self.quantize(g, transpose), twin.dbias(g) if dbias else None

    def joined_grad(self, parts: list[torch.Tensor], groups: int, transpose: bool, dbias: bool) -> Produced:
        """`grad` of several matrices side by side, in each of `groups` groups of columns."""
        return self.grad(side_by_side(parts, groups), transpose, dbias)

    def activation_grad(
        self, g: Quantized, w: Operand, h: torch.Tensor, plan: ActivationPlan, transpose: bool, dbias: bool
    ) -> Produced:
        """The gradient of the pre-activation h from g·w, that of the activation."""
        return self.grad(twin.activation_backward(dgrad(g, w, plan.dtype, plan.how), h, plan.kind), transpose, dbias)


class HighPrecision(Quantizer):
    """x rounded to `dtype`, 16 bits or fp32 (whose GEMMs are PyTorch's own)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.key = dtype

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        x = as_dtype(x, self.dtype)
        return Quantized(Operand(x), Operand(x.t()) if transpose else None)

    def grad(self, g: torch.Tensor, transpose: bool, dbias: bool) -> Produced:
        return super().grad(as_dtype(g, self.dtype), transpose, dbias)


class Around(Quantizer):
    """A quantizer around another one, `inner`, whose tensors and scale are its own."""

    inner: Quantizer

    @property
    def kept_key(self) -> Hashable:
        return self.inner.kept_key

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.inner.tensors()

    def changes(self) -> tuple[torch.Tensor, ...]:
        return self.inner.changes()

    def scale(self, x: torch.Tensor) -> torch.Tensor | None:
        return self.inner.scale(x)

    def scale_of_activation(self, h: torch.Tensor, kind: str, y: torch.Tensor) -> torch.Tensor | None:
        return self.inner.scale_of_activation(h, kind, y)

    def of_backward(self, x: torch.Tensor, row: Operand) -> Operand:
        return self.inner.of_backward(x, row)


def innermost(quantizer: Quantizer) -> Quantizer:
    """The quantizer that others are around."""
    while isinstance(quantizer, Around):
        quantizer = quantizer.inner
    return quantizer


class ForwardOnly(Around):
    """FP8 by `inner` for the forward; what a backward reads is in `dtype_t`, 16 bits or fp32, as of `HighPrecision`.

    Nothing is fused with the op before it: its result in the activation dtype is what backward reads.
    """

    fp8 = True

    def __init__(self, inner: Quantizer, dtype_t: torch.dtype) -> None:
        self.inner, self.dtype, self.dtype_t = inner, inner.dtype, dtype_t
        self.key = (type(self).__name__, inner.key, dtype_t)

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        return self._keeping(x, self.inner.quantize(x, False), transpose)

    def activated(self, h: torch.Tensor, kind: str, transpose: bool) -> tuple[torch.Tensor, Quantized]:
        y, found = self.inner.activated(h, kind, False)
        return y, self._keeping(y, found, transpose)

    def of_backward(self, x: torch.Tensor, row: Operand) -> Operand:
        assert self.dtype_t is not None
        return Operand(as_dtype(x, self.dtype_t).t())

    def _keeping(self, x: torch.Tensor, found: Quantized, transpose: bool) -> Quantized:
        return found._replace(column=self.of_backward(x, found.row)) if transpose else found


class Dequantized(ForwardOnly):
    """FP8 by `inner` for the forward; a backward reads what the forward's codes stand for, in `dtype_t`."""

    def of_backward(self, x: torch.Tensor, row: Operand) -> Operand:
        assert self.dtype_t is not None
        return Operand(dequantize(row, x.shape[1], self.dtype_t).t())


class Calibrating(HighPrecision):
    """16 bits; records the amax of what FP8 would cast, for a weight before it is rounded, in a column of a history."""

    def __init__(self, dtype: torch.dtype, meta: Any, column: int, is_weight: bool = False) -> None:
        super().__init__(dtype)
        self.key = ("calibrating", dtype, column)
        self.meta, self.column, self.is_weight = meta, column, is_weight

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.meta.amax_history,)

    changes = tensors

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        found = super().quantize(x, transpose)
        cast = x if self.is_weight else found.row.codes
        twin.amax(cast.detach().contiguous(), self.meta.amax_history, self.column)
        return found


class Gemm(NamedTuple):
    """The quantizers of a linear map's tensors, how its GEMMs accumulate, and the name of its weight's parameter."""

    input: Quantizer
    weight: Quantizer
    grad: Quantizer
    how: Accumulation
    parameter: str
