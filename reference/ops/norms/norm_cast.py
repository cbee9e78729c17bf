"""`twin::norm_cast`: LayerNorm or RMSNorm straight to FP8, where nobody reads the transpose.

Formula, orders and rounding points are those of `twin::norm_cast_transpose` (`reference.ops.norms.norm`), without q_t:
y in fp32, not rounded to x's dtype, is scaled and cast, and its amax noted. A forward without gradients calls it.
"""

import torch

from reference.ops.casts.cast import Scaling, cast_rows, check_cast
from reference.ops.library import define
from reference.ops.norms.norm import check_norm, new_statistics, normalize

OP = "twin::norm_cast"
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def outputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    *scaling: *Scaling,
) -> Found:
    check_norm(OP, x, weight, bias, eps, kind)
    check_cast(OP, x, *scaling)
    return torch.empty_like(x, dtype=scaling[3]), x.new_empty(1, dtype=torch.float32), *new_statistics(x, kind)


@define(outputs, mutates=("amax_history",))
def norm_cast(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
) -> Found:
    """`x` `[rows, hidden]` -> (q `[rows, hidden]` of `dtype`, scale_inv fp32 `[1]`, mean, rstd).

    hidden is a multiple of 16; scale, amax_history, column and dtype as in `twin::cast`.
    """
    out = outputs(x, weight, bias, eps, zero_centered, kind, scale, amax_history, column, dtype)
    q, scale_inv, mean, rstd = out
    y = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    normalize((y, mean, rstd), x, weight, bias, eps, zero_centered, kind)
    cast_rows(y, scale, amax_history, column, q, scale_inv)
    return out
