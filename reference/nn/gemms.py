"""The three products of a linear layer as pure functions, in FP8 and in 16 bits: every layer is made of them.

Shapes: x `[tokens, in]`, w `[out, in]`, g = dL/dy `[tokens, out]`; y = x·wᵀ + b, dx = g·w, dw = gᵀ·x. Arithmetic and
rounding points stand in `reference.nn.linear`, the ops' own in `reference.ops`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from reference.recipe import DelayedScaling
from reference.scaling import FP8TensorMeta

twin = torch.ops.twin


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`[..., features]` as contiguous `[tokens, features]`."""
    return x.reshape(-1, x.shape[-1]).contiguous()


class Quantized(NamedTuple):
    """An FP8 tensor: codes, their transposed copy (or None), and 1/scale."""

    q: torch.Tensor
    q_t: torch.Tensor | None
    scale_inv: torch.Tensor


class FP8Call(NamedTuple):
    """What one FP8 forward of a layer goes by.

    `scale` is `scaling_fwd.scale`, or in a checkpoint's recomputation that of the first run; `amax_history` is None
    where no amax may be taken (again). Columns are those of `scaling_fwd`: 3·gemm + (input 0, weight 1).
    `grad_enabled` is the grad mode outside the autograd.Function, inside which it is always off.
    """

    recipe: DelayedScaling
    activation_dtype: torch.dtype
    is_first_microbatch: bool | None
    scale: torch.Tensor
    amax_history: torch.Tensor | None
    grad_enabled: bool

    @property
    def dtype(self) -> torch.dtype:
        """The forward format."""
        return self.recipe.fp8_format.dtype(True)

    def needs(self, *requires_grad: bool) -> tuple[bool, ...]:
        """Which gradients a backward will be asked for: none under torch.no_grad()."""
        return tuple(flag and self.grad_enabled for flag in requires_grad)

    def cast(self, x: torch.Tensor, column: int, transpose: bool) -> Quantized:
        """`x [rows, cols]` in FP8, with the transposed copy where a backward will read it."""
        return quantize(x, self.scale, self.amax_history, column, self.dtype, transpose)

    def cast_bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The bias as the FP8 GEMM takes it: in the activation dtype, bf16 where that is fp32."""
        if bias is None:
            return None
        return bias.to(torch.bfloat16 if self.activation_dtype == torch.float32 else self.activation_dtype)


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
    transpose: bool,
) -> Quantized:
    """Cast `x [rows, cols]` to FP8 by `scale[column]`."""
    if transpose:
        return Quantized(*twin.cast_transpose(x, scale, amax_history, column, dtype))
    q, scale_inv = twin.cast(x, scale, amax_history, column, dtype)
    return Quantized(q, None, scale_inv)


def quantize_grad(
    grad: torch.Tensor, meta: FP8TensorMeta, column: int, call: FP8Call, transpose: bool, dbias: bool
) -> tuple[Quantized, torch.Tensor | None]:
    """g `[tokens, out]` in the backward format, and its column sums where the bias wants them."""
    dtype = call.recipe.fp8_format.dtype(False)
    if dbias:
        *cast, db = twin.cast_transpose_dbias(grad, meta.scale, meta.amax_history, column, dtype)
        return Quantized(*cast), db
    return quantize(grad, meta.scale, meta.amax_history, column, dtype, transpose), None


def fp8_forward(x: Quantized, w: Quantized, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """y `[tokens, out]` of the quantized operands."""
    return twin.gemm_fp8(x.q, w.q, x.scale_inv, w.scale_inv, bias, out_dtype, "fast")


def fp8_dgrad(g: Quantized, w_t: torch.Tensor, w_inv: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """dx `[tokens, in]`; `w_t [in, out]` is the weight's transposed copy."""
    return twin.gemm_fp8(g.q, w_t, g.scale_inv, w_inv, None, out_dtype, "split")


def fp8_wgrad(g: Quantized, x_t: torch.Tensor, x_inv: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """dw `[out, in]` of the transposed copies `[out, tokens]` and `[in, tokens]` (tokens padded with zeros)."""
    return twin.gemm_fp8(g.q_t, x_t, g.scale_inv, x_inv, None, out_dtype, "split")


def weight_gradient(
    product: Callable[[torch.dtype], torch.Tensor],
    out_dtype: torch.dtype,
    main_grad: torch.Tensor | None,
) -> torch.Tensor | None:
    """dw in `out_dtype`; or, with `main_grad`, None after adding: main_grad = round(fp32(main_grad) + fp32 dw)."""
    if main_grad is None:
        return product(out_dtype)
    main_grad.copy_(main_grad.float() + product(torch.float32))
    return None


def linear16_forward(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """y `[tokens, out]` of 16-bit operands."""
    return twin.gemm(x, w, None if bias is None else bias.to(dtype), dtype)


def dgrad16(g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """dx `[tokens, in]` in g's dtype; w is read through a transposed view, without a copy."""
    return twin.gemm(g, w.t(), None, g.dtype)


def wgrad16(g: torch.Tensor, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """dw `[out, in]`; both operands are read through transposed views."""
    return twin.gemm(g.t(), x.t(), None, out_dtype)
