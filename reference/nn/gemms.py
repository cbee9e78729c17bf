"""The three products of a linear layer as pure functions, in FP8 and in 16 bits: every layer is made of them.

Shapes: x `[tokens, in]`, w `[out, in]`, g = dL/dy `[tokens, out]`; y = x·wᵀ + b, dx = g·w, dw = gᵀ·x. Arithmetic and
rounding points stand in `reference.nn.linear`, the ops' own in `reference.ops`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

twin = torch.ops.twin


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`[..., features]` as contiguous `[tokens, features]`."""
    return x.reshape(-1, x.shape[-1]).contiguous()


class Quantized(NamedTuple):
    """An FP8 tensor: codes, their transposed copy (or None), and 1/scale."""

    q: torch.Tensor
    q_t: torch.Tensor | None
    scale_inv: torch.Tensor


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
    transpose: bool,
) -> Quantized:
    """Cast `x [rows, cols]` to FP8 by `scale[column]`, with the transposed copy where a backward will read it."""
    if transpose:
        return Quantized(*twin.cast_transpose(x, scale, amax_history, column, dtype))
    q, scale_inv = twin.cast(x, scale, amax_history, column, dtype)
    return Quantized(q, None, scale_inv)


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
