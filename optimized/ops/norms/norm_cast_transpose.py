"""`twin::norm_cast_transpose` on the GPU: LayerNorm and RMSNorm straight to FP8, by
kernels/norms/norm_cast_transpose.cu, which has one form for rows of up to 1024 elements and one for longer ones.
Semantics, and the order of the sums: `reference.ops.norms.norm`.
"""

import functools
import itertools
from typing import NamedTuple

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts import cast_transpose
from optimized.ops.casts.amax import WIDE, aligned, pointer
from optimized.ops.casts.cast import FP8, scaling_pointers
from optimized.ops.norms.norm import KIND, Defines, normalize, whole
from reference.ops.casts.cast import Scaling
from reference.ops.library import on_cuda
from reference.ops.norms.norm import KINDS, Five, norm_cast_transpose_outputs

_SHARED = 232448 - 7 * 1024  # bytes at most, without those that the kernels declare themselves


class Shape(NamedTuple):
    """How rows are distributed: a block has `stripes` of 512 columns, a cluster `cluster` blocks, a tile `rows`."""

    stripes: int
    cluster: int
    warps: int
    rows: int

    @property
    def width(self) -> int:
        """The longest row."""
        return 512 * self.stripes * self.cluster

    @property
    def long(self) -> bool:
        """Whether a warp of each block has its part of a row; otherwise a warp has a row."""
        return self.width > 1024

    @property
    def share(self) -> int:
        """The fewest rows that a cluster is launched for: a tile of 64, or half a tile of long rows."""
        return 32 if self.long else 64

    def codes(self, kind: str) -> int:
        """Bytes of shared memory for a block's parameters and the codes of a tile."""
        return 512 * self.stripes * ((8 if kind == "layernorm" else 4) + self.rows) + 128

    def ring(self, x: torch.dtype, kind: str) -> int:
        """Rows that each warp has of long rows under way: as many as there is room for, up to 4."""
        row = 512 * self.stripes * x.itemsize
        return min(4, (_SHARED - self.codes(kind)) // (self.warps * row)) if self.long else 0

    def shared(self, x: torch.dtype, kind: str) -> int:
        """Bytes of shared memory."""
        return self.codes(kind) + self.ring(x, kind) * self.warps * 512 * self.stripes * x.itemsize


# Stripes and cluster; the first pair that holds a row is taken.
SHAPES = ((2, 1), (4, 1), (3, 2), (4, 2), (5, 2), (3, 4), (4, 4), (3, 8), (4, 8))


@functools.cache
def tile_shape(x: torch.dtype, kind: str, hidden: int) -> Shape | None:
    """The shape for rows of `hidden` elements of that dtype; None if they are too long."""
    for stripes, cluster in SHAPES:
        width = 512 * stripes * cluster
        if hidden <= width:
            rows = 32 if stripes == 5 else 64  # 64 would leave room for the rows of only 8 warps
            # More warps where their registers allow it, and where they gain (docs/log/norm.md).
            many = {2: 24, 3: 22 if kind == "layernorm" else 16}.get(stripes, 16) if whole(x, width, hidden) else 16
            shapes = (Shape(stripes, cluster, warps, rows) for warps in (many, 8))
            return next(shape for shape in shapes if width <= 1024 or shape.ring(x, "layernorm"))
    return None


def defines(x: torch.dtype, kind: str, q: torch.dtype, shape: Shape, hidden: int) -> Defines:
    """Macros of either kernel for rows of `hidden` elements."""
    macros: Defines = {"WIDE": WIDE[x], "KIND": KIND[kind], "FP8": FP8[q], "TILE_WARPS": shape.warps}
    macros["WHOLE"] = whole(x, shape.width, hidden)
    if not shape.long:
        return {**macros, "ROW_WARPS": 1}
    ring = {"TILE_ROWS": shape.rows, "RING": shape.ring(x, kind)}
    return {**macros, "STRIPES": shape.stripes, "CLUSTER": shape.cluster, **ring}


CONFIGURATIONS: list[tuple[str, Defines]] = [
    ("norm_cast_transpose", defines(x, kind, q, shape, hidden))
    for x, kind, q, (stripes, cluster), short in itertools.product(WIDE, KINDS, FP8, SHAPES, (0, 16))
    for hidden in [512 * stripes * cluster - short]
    if (short or x != torch.float32) and (shape := tile_shape(x, kind, hidden)) is not None
]


@functools.cache
def configured(
    x: torch.dtype, kind: str, q: torch.dtype, shape: Shape, hidden: int, device: int, rounds: bool = False
) -> tuple[launch.Kernel, int, int, int]:
    """The kernel with the macros of `defines`, its threads, its shared memory, and how many clusters run at once."""
    macros = defines(x, kind, q, shape, hidden) | ({"ROUND": 1} if rounds else {})
    kernel = launch.function("norm_cast_transpose", "norm_cast_transpose", macros, _SHARED)
    threads, smem = 32 * shape.warps, shape.shared(x, kind)
    if not shape.long:  # no clusters
        return kernel, threads, smem, launch.processors(device)
    return kernel, threads, smem, launch.clusters_at_once(kernel, shape.cluster, threads, smem, device)


@on_cuda
def norm_cast_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    *scaling: *Scaling,
) -> Five:
    """`x` `[rows, hidden]` -> (q, q_t `[hidden, ceil16(rows)]`, scale_inv fp32 `[1]`, mean, rstd)."""
    out = norm_cast_transpose_outputs(x, weight, bias, eps, zero_centered, kind, *scaling)
    shape = tile_shape(x.dtype, kind, x.shape[1])
    if shape is None:
        # The rows are too long for registers: y goes through memory in fp32. The bits are the same, the traffic is
        # three times as much.
        y = x.new_empty(x.shape, dtype=torch.float32)
        q, q_t, scale_inv, mean, rstd = out
        normalize((y, mean, rstd), x, weight, bias, eps, zero_centered, kind)
        cast_transpose.run((q, q_t, scale_inv), y, None, *scaling)
    else:
        run(out, shape, x, weight, bias, eps, zero_centered, kind, *scaling)
    return out


def run(
    out: Five,
    shape: Shape,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    *scaling: *Scaling,
    rounds: bool = False,
) -> None:
    """Launch the kernel on checked arguments, into `out`.

    `rounds`: y is rounded to x's dtype first, and has no amax.
    """
    rows, hidden = x.shape
    x, weight, bias = aligned(x), aligned(weight), aligned(bias)
    scale, amax_history, column, dtype = scaling
    inputs = (x.data_ptr(), weight.data_ptr(), pointer(bias), *scaling_pointers(scale, amax_history, column))
    options = (np.float32(eps), np.int32(zero_centered), np.int32(WIDE[weight.dtype]))
    args = (*inputs, *(tensor.data_ptr() for tensor in out), np.int32(rows), np.int32(hidden), *options)
    index = x.device.index
    kernel, threads, smem, at_once = configured(x.dtype, kind, dtype, shape, hidden, index, rounds)
    # The blocks are persistent: as many as run at once, and at least one cluster, which writes scale_inv.
    clusters = max(1, min(-(-rows // shape.share), at_once))
    launch.launch(kernel, (clusters * shape.cluster,), (threads,), args, smem=smem, device=index)
