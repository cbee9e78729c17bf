"""`twin::norm_cast_blocks_transpose`: a norm, rounded, and cast in blocks of a row.

    y, mean, rstd                      `twin::norm` of x `[rows, hidden]`, y in x's dtype
    q, q_t, scale_inv, scale_inv_t     `twin::cast_blocks_transpose` of y

each bit for bit, with blocks of 128 columns of a row. The rounding to x's dtype comes before a block's amax. Only here
y is never in memory.
"""

import torch

from reference.ops.casts.cast_blocks import cast_blocks_transpose, check_cast_blocks, new_four
from reference.ops.library import define
from reference.ops.norms.norm import check_norm, new_statistics, norm

OP = "twin::norm_cast_blocks_transpose"

Six = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def outputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    dtype: torch.dtype,
    dialect: str,
    epsilon: float,
) -> Six:
    check_norm(OP, x, weight, bias, eps, kind)
    check_cast_blocks(OP, x.shape[1], dtype, dialect, epsilon)
    return *new_four(x, x.shape[1], dtype, False), *new_statistics(x, kind)


@define(outputs)
def norm_cast_blocks_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    dtype: torch.dtype,
    dialect: str,
    epsilon: float,
) -> Six:
    """`x` `[rows, hidden]` -> (q, q_t `[hidden, ceil16(rows)]` of `dtype`, scale_inv, scale_inv_t, mean, rstd fp32).

    hidden is a multiple of 16; the norm's arguments as in `twin::norm`, the cast's as in `twin::cast_blocks_transpose`.
    """
    outputs(x, weight, bias, eps, zero_centered, kind, dtype, dialect, epsilon)
    y, mean, rstd = norm(x, weight, bias, eps, zero_centered, kind, x.dtype)
    return *cast_blocks_transpose(y, dtype, False, dialect, epsilon), mean, rstd
