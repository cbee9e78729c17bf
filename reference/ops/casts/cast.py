"""`twin::cast`: the cast to FP8, which also records the amax.

    q[r, c]   = satfinite_rne(fp32(x[r, c]) · scale[column])    one fp32 rounding, then one to FP8; infinite x: NaN
    scale_inv = 1 / scale[column]                               IEEE division
    amax_history[0, column] = max(itself, max |x| over the x that are not NaN), x not scaled

NaN and infinities become 0x7F, a product beyond the format ±largest (`reference.numbers.formats`). `scale_inv` turns
this q back into numbers; the cast computes it because `scale` has changed by the time of the backward pass.
"""

import torch

from reference.numbers import formats
from reference.ops.casts.amax import record_amax
from reference.ops.checks import check_column, check_columns, check_fp8, check_history, check_input
from reference.ops.library import define

Scaling = tuple[torch.Tensor, torch.Tensor | None, int, torch.dtype]
"""The last arguments of every op that casts: scale, amax_history, column, dtype."""


def check_cast(op: str, x: torch.Tensor, *scaling: *Scaling) -> None:
    """Refuse what the FP8 casts do not accept; `op` names the caller in the error."""
    check_input(op, "x", x)
    check_columns(op, "x", x.shape[1], f" (shape {tuple(x.shape)})")
    check_scaling(op, x, *scaling)


def check_scaling(
    op: str, x: torch.Tensor, scale: torch.Tensor, amax_history: torch.Tensor | None, column: int, dtype: torch.dtype
) -> None:
    """`check_cast` of everything but x itself."""
    check_fp8(op, "dtype", dtype)
    if scale.dim() != 1:
        raise ValueError(f"{op}: scale must be 1-D, [columns]; got shape {tuple(scale.shape)}.")
    if scale.dtype != torch.float32:
        raise ValueError(f"{op}: scale must be torch.float32; got {scale.dtype}.")
    if scale.device != x.device:
        raise ValueError(f"{op}: scale is on {scale.device}, the data on {x.device}.")
    check_column(op, "scale", scale.shape[0], column)
    if amax_history is not None:
        check_history(op, x, amax_history, column)


def cast_rows(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    q: torch.Tensor,
    scale_inv: torch.Tensor,
) -> None:
    """The cast, without checks, into q `[rows, cols]` and scale_inv fp32 `[1]`."""
    factor = scale[column]
    formats.cast_into(q, x, factor)
    if amax_history is not None:
        record_amax(x, amax_history, column)
    # A division: a reciprocal instruction is an approximation on some machines.
    scale_inv.fill_(1.0).div_(factor)


def outputs(x: torch.Tensor, *scaling: *Scaling) -> tuple[torch.Tensor, torch.Tensor]:
    check_cast("twin::cast", x, *scaling)
    return x.new_empty(x.shape, dtype=scaling[3]), x.new_empty(1, dtype=torch.float32)


@define(outputs, mutates=("amax_history",))
def cast(
    x: torch.Tensor, scale: torch.Tensor, amax_history: torch.Tensor | None, column: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[rows, cols]`, `scale` fp32 `[columns]` -> (q `[rows, cols]` of `dtype`, scale_inv fp32 `[1]`)."""
    q, scale_inv = outputs(x, scale, amax_history, column, dtype)
    cast_rows(x, scale, amax_history, column, q, scale_inv)
    return q, scale_inv
