"""Activations: y = T(act(x)), or T(act(x1) · x2) of x's halves (`reference.ops.activations.activation`)."""

from typing import NamedTuple

import torch

from reference.arguments import check_arguments
from reference.nn.core.autograd import differentiable, wanted
from reference.nn.core.checks import activation_dtype, check_tensor
from reference.nn.core.context import BlockContext
from reference.ops.activations.activation import Clamp, is_gated
from reference.ops.library import twin
from reference.recipes.quantized import as_dtype, rows_of
from reference.support.nested import Tensors
from reference.support.transforms import Unscripted


class Plan(NamedTuple):
    """T, whether dx is wanted, and the activation."""

    dtype: torch.dtype
    needs: tuple[bool, ...]
    kind: str


class Saved(NamedTuple):
    """What backward reads: x in T."""

    x: torch.Tensor


def forward(plan: Plan, context: BlockContext, x: torch.Tensor) -> tuple[torch.Tensor, Saved]:
    """y of x `[rows, n]`."""
    x = as_dtype(x, plan.dtype)
    return twin.activation(x, plan.kind), Saved(x)


def backward(plan: Plan, context: BlockContext, saved: Saved, grad: torch.Tensor) -> Tensors:
    """dx of dL/dy."""
    return (twin.activation_backward(grad.contiguous(), saved.x, plan.kind),)


class _Activation(Unscripted, torch.nn.Module):
    """`twin::activation` of one kind; a gated kind activates the first half of the last dimension.

    Args:
        cache_quantized_input: only False is offered.
    """

    kind: str
    interleave: int | None = None  # channels of x1 that are followed by as many of x2; None: x1 comes first

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__.lower()

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        check_arguments(f"ops.{type(self).__name__}", locals())
        super().__init__()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        name, gated = type(self).__name__, is_gated(self.kind)
        check_tensor(f"ops.{name}", "input", input)
        multiple = 2 * (self.interleave or 1)
        if input.dim() == 0 or (gated and input.shape[-1] % multiple):
            accepted = "an even number" if multiple == 2 else f"a multiple of {multiple}"
            accepted = f"[..., {accepted if gated else 'features'}]"
            raise ValueError(f"ops.{name}: input has shape {list(input.shape)}; {accepted} is accepted.")
        x = rows_of(input)
        if self.interleave is not None:
            x = x.view(len(x), -1, 2, self.interleave).transpose(1, 2).reshape(x.shape)
        y = differentiable(forward, backward, Plan(activation_dtype(input), wanted(x), self.kind), BlockContext(), x)
        return y.view(*input.shape[:-1], input.shape[-1] // 2 if gated else input.shape[-1])


class GELU(_Activation):
    """gelu in its tanh form."""


class GEGLU(_Activation):
    """gelu(x1) · x2."""


class GLU(_Activation):
    """sigmoid(x1) · x2."""


class QGELU(_Activation):
    """x · sigmoid(1.702 x)."""


class QGEGLU(_Activation):
    """qgelu(x1) · x2."""


class ReLU(_Activation):
    """max(x, 0)."""


class ReGLU(_Activation):
    """relu(x1) · x2."""


class SReLU(_Activation):
    """relu(x)²."""


class SReGLU(_Activation):
    """relu(x1)² · x2."""


class SiLU(_Activation):
    """x · sigmoid(x)."""


class SwiGLU(_Activation):
    """silu(x1) · x2.

    Args:
        glu_interleave_size: n, where n channels of x1 are followed by n of x2; None is half of the channels.
    """

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        check_arguments("ops.SwiGLU", locals())
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.interleave = None if glu_interleave_size is None else int(glu_interleave_size)


class ClampedSwiGLU(_Activation):
    """c1 · sigmoid(alpha c1) · (c2 + offset) of x's halves limited to c1 <= limit, |c2| <= limit, as in GPT-OSS.

    Args:
        limit, alpha, glu_linear_offset: as in `reference.ops.activations.activation`'s clamped_swiglu.
        glu_interleave_size: as in `SwiGLU`.
    """

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        check_arguments("ops.ClampedSwiGLU", locals())
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.kind = Clamp(float(limit), float(alpha), float(glu_linear_offset)).kind
        self.interleave = None if glu_interleave_size is None else int(glu_interleave_size)

    def extra_repr(self) -> str:
        return self.kind
