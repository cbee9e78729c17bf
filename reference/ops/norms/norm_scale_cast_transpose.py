"""`twin::norm_scale_cast_transpose`: a norm that is cast with the scale of its own amax.

    y, mean, rstd       `twin::norm`, y rounded to x's dtype
    q, q_t, scale_inv   `twin::cast_transpose` of that y, with its `twin::current_scale`

It is `twin::norm_scale` and `twin::cast_transpose`, without y.
"""

import torch

from reference.ops.casts.cast import cast_rows
from reference.ops.casts.cast_transpose import cast_outputs, transpose_codes
from reference.ops.casts.current_scale import Scale, check_scale
from reference.ops.checks import check_columns
from reference.ops.library import define
from reference.ops.norms.norm import Five, check_norm, new_statistics, norm_scale

OP = "twin::norm_scale_cast_transpose"


def outputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    *scale: *Scale,
) -> Five:
    check_norm(OP, x, weight, bias, eps, kind)
    check_columns(OP, "x", x.shape[1])
    check_scale(OP, *scale)
    return *cast_outputs(x, x.shape[1], scale[0]), *new_statistics(x, kind)


@define(outputs)
def norm_scale_cast_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    dtype: torch.dtype,
    power_of_two: bool,
    epsilon: float,
) -> Five:
    """`x` `[rows, hidden]` -> (q, q_t `[hidden, ceil16(rows)]` of `dtype`, scale_inv fp32 `[1]`, mean, rstd).

    hidden is a multiple of 16; power_of_two and epsilon as in `twin::current_scale`.
    """
    out = outputs(x, weight, bias, eps, zero_centered, kind, dtype, power_of_two, epsilon)
    q, q_t, scale_inv, *statistics = out
    y, *found, scale = norm_scale(x, weight, bias, eps, zero_centered, kind, x.dtype, dtype, power_of_two, epsilon)
    cast_rows(y, scale, None, 0, q, scale_inv)
    transpose_codes(q, q_t)
    for to, one in zip(statistics, found, strict=True):
        to.copy_(one)
    return out
