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
from optimized.ops.norm import KIND, ROW_WARPS, Defines, normalize, parameters, pointer, row_warps, statistics
from reference.ops.cast import check_cast
from reference.ops.cast_transpose import cast_outputs
from reference.ops.library import LIBRARY
from reference.ops.norm import KINDS, check_norm

_SHARED = 225 * 1024  # bytes, at most

# ROW_WARPS, TILE_WARPS, BLOCKS (on a multiprocessor), TILE_ROWS, STAGED.
Shape = tuple[int, int, int, int, int]


def shared(hidden: int, tile_rows: int, staged: int) -> int:
    """Bytes of shared memory: gamma, beta, and the codes of a tile."""
    return 8 * hidden + staged * (tile_rows * hidden + 128)


def defines(x: torch.dtype, kind: str, q: torch.dtype, shape: Shape) -> Defines:
    """Macros of norm_cast_transpose.cu."""
    names = ("ROW_WARPS", "TILE_WARPS", "BLOCKS", "TILE_ROWS", "STAGED")
    return {"WIDE": WIDE[x], "KIND": KIND[kind], "FP8": FP8[q], **dict(zip(names, shape, strict=True))}


# By ROW_WARPS, the fastest measured at 8192 rows (docs/norm.md) among those that keep everything in registers.
SHAPES = {
    1: (16, 1, 64, 1),
    2: (24, 1, 64, 1),
    3: (18, 1, 32, 1),
    4: (24, 1, 32, 1),
    5: (20, 1, 32, 0),
    6: (18, 1, 32, 0),
    8: (24, 1, 32, 0),
    12: (24, 1, 32, 0),
    16: (16, 1, 32, 0),
}
# fp32 rows take twice the registers on their way.
FP32_WARPS = {1: 16, 2: 16, 3: 15, 4: 16, 5: 15, 6: 12, 8: 16, 12: 12, 16: 16}
_TALL = 6144  # rows from which tiles of 64 still give most multiprocessors one


def tile_shape(x: torch.dtype, rows: int, hidden: int) -> Shape | None:
    """The shape for x `[rows, hidden]` of that dtype; None if the row is too long."""
    warps = row_warps(hidden)
    if warps is None:
        return None
    if x == torch.float32:
        return warps, FP32_WARPS[warps], 1, 32, 0
    tile_warps, blocks, tile_rows, staged = SHAPES[warps]
    return warps, tile_warps, blocks, tile_rows if rows >= _TALL else 32, staged


def _shapes(x: torch.dtype) -> list[Shape]:
    found = (tile_shape(x, rows, 1024 * warps) for rows, warps in itertools.product((1, _TALL), ROW_WARPS))
    return [*dict.fromkeys(shape for shape in found if shape is not None)]


CONFIGURATIONS: list[tuple[str, Defines]] = [
    ("norm_cast_transpose", defines(x, kind, q, shape))
    for x, kind, q in itertools.product(WIDE, KINDS, FP8)
    for shape in _shapes(x)
]


@functools.cache
def kernel(x: torch.dtype, kind: str, q: torch.dtype, shape: Shape) -> launch.Kernel:
    """norm_cast_transpose.cu with the macros of `defines`."""
    return launch.function("norm_cast_transpose", "norm_cast_transpose", defines(x, kind, q, shape), _SHARED)


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
    # Persistent blocks, as many as run at once. At least one: it writes scale_inv.
    at_once = shape[2] * launch.processors(x.device.index)
    blocks = max(1, min(-(-rows // shape[3]), at_once))
    threads = 32 * shape[1]
    launch.launch(
        kernel(x.dtype, kind, dtype, shape),
        (blocks,),
        (threads,),
        args,
        smem=shared(hidden, *shape[3:]),
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
    shape = tile_shape(x.dtype, *x.shape)
    if shape is not None:
        return run(shape, x, weight, bias, eps, zero_centered, kind, scale, amax_history, column, dtype)
    # Rows too long for registers: fp32 y goes through memory. The same bits, three times the traffic.
    y, mean, rstd = normalize(x, weight, bias, eps, zero_centered, kind, torch.float32)
    cast = cast_transpose.cast_transpose(y, scale, amax_history, column, dtype)
    return (*cast, mean, rstd)


LIBRARY.impl("norm_cast_transpose", norm_cast_transpose, "CUDA")
