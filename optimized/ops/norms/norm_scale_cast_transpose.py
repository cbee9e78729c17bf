"""`twin::norm_scale_cast_transpose` on the GPU: x is read twice, and y is never written.

    kernels/norms/norm.cu                  the amax, and the rows' statistics (AMAX_ALONE)
    `total` of casts/current_scale.cu      the scale
    kernels/norms/norm_cast_transpose.cu   the codes of the rounded y (ROUND)

That is 6 bytes an element in 16 bits. With a y between norm and cast it is 8. Rows that are too long for registers, and
fp32, go through y.

Semantics: `reference.ops.norms.norm_scale_cast_transpose`.
"""

import itertools

import torch

from optimized.ops.casts import cast_transpose, current_scale
from optimized.ops.casts.cast import FP8
from optimized.ops.norms import norm, norm_cast_transpose
from optimized.ops.norms.norm import ROW_WARPS, row_warps, rows_kernel
from optimized.ops.norms.norm_cast_transpose import SHAPES, tile_shape
from reference.ops.casts.current_scale import Scale
from reference.ops.library import on_cuda
from reference.ops.norms.norm import KINDS, Five
from reference.ops.norms.norm_scale_cast_transpose import outputs

_HALVES = (torch.bfloat16, torch.float16)
CONFIGURATIONS = [
    rows_kernel(x, kind, warps, 1024 * warps - short, True, True).configuration
    for x, kind, warps, short in itertools.product(_HALVES, KINDS, ROW_WARPS, (0, 8))
]
CONFIGURATIONS += [
    ("norm_cast_transpose", norm_cast_transpose.defines(x, kind, q, shape, hidden) | {"ROUND": 1})
    for x, kind, q, (stripes, cluster), short in itertools.product(_HALVES, KINDS, FP8, SHAPES, (0, 16))
    for hidden in [512 * stripes * cluster - short]
    if (shape := tile_shape(x, kind, hidden)) is not None
]


@on_cuda
def norm_scale_cast_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    *how: *Scale,
) -> Five:
    """`x` `[rows, hidden]` -> (q, q_t `[hidden, ceil16(rows)]` of `dtype`, scale_inv fp32 `[1]`, mean, rstd)."""
    out = outputs(x, weight, bias, eps, zero_centered, kind, *how)
    q, q_t, scale_inv, mean, rstd = out
    given = (weight, bias, eps, zero_centered, kind)
    hidden, shape = x.shape[1], tile_shape(x.dtype, kind, x.shape[1])
    if shape is None or row_warps(hidden) is None or x.dtype not in _HALVES or not len(x):
        y, *statistics, scale = norm.norm_scale(x, *given, x.dtype, *how)
        cast_transpose.run((q, q_t, scale_inv), y, None, scale, None, 0, how[0])
        return q, q_t, scale_inv, statistics[0], statistics[1]
    scale = rstd.new_empty(1)
    partial = norm.normalize((None, mean, rstd), x, *given, amax=True)
    assert partial is not None
    current_scale.total(partial, scale, *how)
    norm_cast_transpose.run(out, shape, x, *given, scale, None, 0, how[0], rounds=True)
    return out
