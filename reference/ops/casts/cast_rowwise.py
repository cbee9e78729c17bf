"""`twin::cast_rowwise` and `twin::cast_rowwise_transpose`: the FP8 cast with a scale for each row.

Of each row

    scale     = that of its own amax, as `twin::current_scale` makes it       448 or 57,344 / max(amax, epsilon)
    q         = satfinite_rne(fp32(x) · scale)                                as in `twin::cast`; infinite x: NaN
    scale_inv = 1 / scale                                                     IEEE division

The transpose is x cast anew, with a scale for each of its own rows, which are x's columns: a code of q_t is another
than that of q. Zero codes fill it up to ceil16(rows) columns.

With `power_of_two` and epsilon 1e-12 this is torchao's row-wise cast (`torchao/float8/float8_utils.py`, 36027d8), which
divides 448 by the clamped amax in fp64, rounds the quotient to fp32, and that down to a power of two. Of each amax of
bf16 or fp16 the scale is the same. Its rounding down is 2^floor(log2(quotient)) in fp32, and the logarithm of a number
that lies a few words below a power of two may be that of the power: there an fp32 amax has twice the scale, and the
largest numbers of its row saturate. Here a mantissa is cleared. Of a row with NaN or an infinity the scale there is NaN
or 0, and each product with the row is NaN, as here.
"""

import torch

from reference.numbers import formats
from reference.ops.casts.cast_transpose import ceil16, transpose_codes
from reference.ops.casts.current_scale import Scale, check_scale, scale_of
from reference.ops.checks import check_columns, check_input
from reference.ops.library import define

Two = tuple[torch.Tensor, torch.Tensor]
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def check_rows(op: str, x: torch.Tensor, *scale: *Scale) -> None:
    """Refuse what the row-wise casts do not accept; `op` names the caller in the error."""
    check_input(op, "x", x)
    check_columns(op, "x", x.shape[1], f" (shape {tuple(x.shape)})")
    check_scale(op, *scale)


def outputs(x: torch.Tensor, *scale: *Scale) -> Two:
    check_rows("twin::cast_rowwise", x, *scale)
    return x.new_empty(x.shape, dtype=scale[0]), x.new_empty(x.shape[0], dtype=torch.float32)


def transpose_outputs(x: torch.Tensor, *scale: *Scale) -> Four:
    check_rows("twin::cast_rowwise_transpose", x, *scale)
    (rows, cols), dtype = x.shape, scale[0]
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty((cols, ceil16(rows)), dtype=dtype),
        x.new_empty(rows, dtype=torch.float32),
        x.new_empty(cols, dtype=torch.float32),
    )


def _cast(x: torch.Tensor, q: torch.Tensor, scale_inv: torch.Tensor, *how: *Scale) -> None:
    """x `[rows, cols]` into q and scale_inv, both without checks."""
    wide = formats.widen(x)
    amax = wide.new_zeros(len(x)) if x.shape[1] == 0 else torch.where(wide.isnan(), 0, wide).abs().amax(1)
    scale = scale_of(amax, *how)
    scale_inv.copy_(1 / scale)
    if x.numel():
        formats.cast_into(q, x, scale[:, None].expand(x.shape))


@define(outputs)
def cast_rowwise(x: torch.Tensor, dtype: torch.dtype, power_of_two: bool, epsilon: float) -> Two:
    """x `[rows, cols]`, fp32, bf16 or fp16, cols a multiple of 16 -> (q `[rows, cols]` of `dtype`, scale_inv fp32
    `[rows]`).
    """
    q, scale_inv = outputs(x, dtype, power_of_two, epsilon)
    _cast(x, q, scale_inv, dtype, power_of_two, epsilon)
    return q, scale_inv


@define(transpose_outputs)
def cast_rowwise_transpose(x: torch.Tensor, dtype: torch.dtype, power_of_two: bool, epsilon: float) -> Four:
    """x `[rows, cols]` -> (q, q_t `[cols, ceil16(rows)]`, scale_inv fp32 `[rows]`, scale_inv_t fp32 `[cols]`)."""
    how = (dtype, power_of_two, epsilon)
    q, q_t, scale_inv, scale_inv_t = transpose_outputs(x, *how)
    _cast(x, q, scale_inv, *how)
    codes = torch.empty((x.shape[1], x.shape[0]), dtype=dtype, device="cpu")
    _cast(x.t().contiguous(), codes, scale_inv_t, *how)
    transpose_codes(codes.t(), q_t)
    return q, q_t, scale_inv, scale_inv_t
