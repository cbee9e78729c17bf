"""LayerNorm and RMSNorm straight to FP8, on the GPU: `twin::norm_cast_transpose`.

Kernel: norm_cast_transpose.cu. Semantics, and the order of the sums: `reference.ops.norm`.
"""

import functools
import itertools

import numpy as np
import torch

from optimized import launch
from optimized.ops import cast_transpose
from optimized.ops.amax import WIDE, aligned, amax_pointer
from optimized.ops.cast import FP8, scale_pointer
from optimized.ops.norm import KIND, ROW_WARPS, Defines, normalize, parameters, pointer, row_warps, statistics, whole
from reference.ops.cast import check_cast
from reference.ops.cast_transpose import cast_outputs
from reference.ops.library import LIBRARY
from reference.ops.norm import KINDS, check_norm

_SHARED = 225 * 1024  # bytes, at most

# ROW_WARPS, TILE_WARPS, TILE_ROWS, CLUSTER, STAGED.
Shape = tuple[int, int, int, int, int]


def shared(kind: str, hidden: int, shape: Shape) -> int:
    """Bytes of shared memory: gamma, beta, and a block's share of the codes of a tile."""
    _, _, tile_rows, cluster, staged = shape
    share = -(-hidden // (256 * cluster)) * 256
    # Without staged codes a beta of rmsnorm, too: the less L1 keeps then, the faster (an observation).
    parameters = 4 if kind == "rmsnorm" and staged else 8
    return parameters * hidden + staged * (tile_rows * share + 128)


def defines(x: torch.dtype, kind: str, q: torch.dtype, shape: Shape, hidden: int) -> Defines:
    """Macros of norm_cast_transpose.cu for rows of `hidden` elements."""
    names = ("ROW_WARPS", "TILE_WARPS", "TILE_ROWS", "CLUSTER", "STAGED")
    return {
        "WIDE": WIDE[x],
        "KIND": KIND[kind],
        "FP8": FP8[q],
        **dict(zip(names, shape, strict=True)),
        "WHOLE": whole(x, shape[0], hidden),
    }


# The rest of a shape by ROW_WARPS, the fastest measured at 8192 rows (docs/norm.md), and where rmsnorm differs.
SHAPES = {
    1: (24, 64, 1, 1),
    2: (24, 64, 1, 1),
    3: (18, 64, 2, 1),
    4: (24, 64, 2, 1),
    5: (20, 32, 2, 1),
    6: (18, 32, 2, 1),
    8: (24, 32, 2, 1),
    12: (24, 32, 1, 0),
    16: (16, 32, 1, 0),
}
RMSNORM_SHAPES = {4: (16, 64, 2, 1), 5: (20, 64, 2, 1), 8: (16, 32, 2, 1)}
# TILE_WARPS where a thread needs more registers: of fp32 rows, and of those that do not fill their warps.
_FEWER_WARPS = {1: 16, 2: 16, 3: 15, 4: 16, 5: 15, 6: 12, 8: 16, 12: 12, 16: 16}


def tile_shape(x: torch.dtype, kind: str, hidden: int) -> Shape | None:
    """The shape for rows of `hidden` elements of that dtype; None if they are too long."""
    warps = row_warps(hidden)
    if warps is None:
        return None
    shapes = {**SHAPES, **RMSNORM_SHAPES} if kind == "rmsnorm" else SHAPES
    tile_warps, tile_rows, cluster, staged = shapes[warps]
    if not whole(x, warps, hidden):
        tile_warps = _FEWER_WARPS[warps]
    return warps, tile_warps, tile_rows, cluster, staged


CONFIGURATIONS: list[tuple[str, Defines]] = [
    ("norm_cast_transpose", defines(x, kind, q, shape, hidden))
    for x, kind, q, warps, short in itertools.product(WIDE, KINDS, FP8, ROW_WARPS, (0, 16))
    for hidden in [1024 * warps - short]
    if (short or x != torch.float32) and (shape := tile_shape(x, kind, hidden)) is not None
]


@functools.cache
def kernel(x: torch.dtype, kind: str, q: torch.dtype, shape: Shape, hidden: int) -> launch.Kernel:
    """norm_cast_transpose.cu with the macros of `defines`."""
    return launch.function("norm_cast_transpose", "norm_cast_transpose", defines(x, kind, q, shape, hidden), _SHARED)


def run(
    shape: Shape,
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch one configuration of norm_cast_transpose.cu on checked arguments."""
    x = aligned(x)
    weight, bias = parameters(weight, bias)
    rows, hidden = x.shape
    q, q_t, scale_inv = cast_outputs(x, hidden, dtype)
    mean, rstd = statistics(x, kind)
    args = [
        x.data_ptr(),
        weight.data_ptr(),
        pointer(bias),
        scale_pointer(scale, column),
        amax_pointer(amax_history, column),
        q.data_ptr(),
        q_t.data_ptr(),
        scale_inv.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        np.int32(rows),
        np.int32(hidden),
        np.float32(eps),
        np.int32(zero_centered),
        np.int32(WIDE[weight.dtype]),
    ]
    _, tile_warps, tile_rows, cluster, _ = shape
    # Persistent blocks, as many as run at once. At least a cluster: it writes scale_inv.
    clusters = max(1, min(-(-rows // tile_rows), launch.processors(x.device.index) // cluster))
    launch.launch(
        kernel(x.dtype, kind, dtype, shape, hidden),
        (clusters * cluster,),
        (32 * tile_warps,),
        args,
        smem=shared(kind, hidden, shape),
        device=x.device.index,
    )
    return q, q_t, scale_inv, mean, rstd


def norm_cast_transpose(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`x` `[rows, hidden]` -> (q, q_t `[hidden, ceil16(rows)]`, scale_inv fp32 `[1]`, mean, rstd)."""
    check_norm("twin::norm_cast_transpose", x, weight, bias, eps, kind)
    check_cast("twin::norm_cast_transpose", x, scale, amax_history, column, dtype)
    shape = tile_shape(x.dtype, kind, x.shape[1])
    if shape is not None:
        return run(shape, x, weight, bias, eps, zero_centered, kind, scale, amax_history, column, dtype)
    # Rows too long for registers: fp32 y goes through memory. The same bits, three times the traffic.
    y, mean, rstd = normalize(x, weight, bias, eps, zero_centered, kind, torch.float32)
    cast = cast_transpose.cast_transpose(y, scale, amax_history, column, dtype)
    return (*cast, mean, rstd)


LIBRARY.impl("norm_cast_transpose", norm_cast_transpose, "CUDA")
