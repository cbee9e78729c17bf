"""`twin::norm` and `twin::norm_scale` on the GPU, LayerNorm and RMSNorm: kernels/norms/norm.cu; the kernel `total` of
kernels/casts/current_scale.cu finishes scales. Semantics, and the order of the sums: `reference.ops.norms.norm`.
kernels/norms/norm_row.cuh has a table of the norms' kernels.
"""

import functools
import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts import current_scale
from optimized.ops.casts.amax import WIDE, aligned, pointer
from reference.ops.casts.cast_transpose import Four, Three
from reference.ops.casts.current_scale import Scale
from reference.ops.library import on_cuda
from reference.ops.norms.norm import KINDS, norm_outputs, norm_scale_outputs

Defines = dict[str, int | str]

KIND = {kind: number for number, kind in enumerate(KINDS)}
# By the warps that hold a row, 1024 elements each: rows of a block, and blocks of a multiprocessor.
_SHAPES = {1: (4, 6), 2: (6, 2), 3: (3, 2), 4: (2, 2), 5: (4, 1), 6: (3, 1), 8: (2, 1), 12: (1, 1), 16: (1, 1)}
ROW_WARPS = tuple(_SHAPES)
SHARED = 8 * 16 * 1024
_ANY_THREADS = 256


def row_warps(hidden: int) -> int | None:
    """How many warps hold such a row in registers; None if it is too long, or not whole vectors of 8."""
    return None if hidden % 8 else next((n for n in ROW_WARPS if hidden <= n * 1024), None)


def whole(x: torch.dtype, held: int, hidden: int) -> int:
    """The kernels' macro WHOLE: whether a row fills the `held` elements of its warps. fp32 has no such kernels."""
    return int(hidden == held and x != torch.float32)


def defines(x: torch.dtype, kind: str, warps: int, hidden: int) -> Defines:
    """Macros of norm.cu for rows of `hidden` elements."""
    rows, blocks = _SHAPES[warps]
    if x == torch.float32:
        rows = min(rows, max(1, 16 // warps))
        blocks = min(blocks, max(1, 16 // (rows * warps)))
    macros: Defines = {"WIDE": WIDE[x], "KIND": KIND[kind], "ROW_WARPS": warps}
    return {**macros, "ROWS": rows, "BLOCKS": blocks, "WHOLE": whole(x, 1024 * warps, hidden)}


@functools.cache
def rows_kernel(
    x: torch.dtype, kind: str, warps: int, hidden: int, amax: bool = False, alone: bool = False
) -> launch.Kernel:
    macros = defines(x, kind, warps, hidden)
    if amax:
        macros["AMAX"] = 1
    if alone:
        macros["AMAX_ALONE"] = 1
    return launch.function("norm", "norm_rows", macros, SHARED)


@functools.cache
def _any_kernel(x: torch.dtype, kind: str, vector: int) -> launch.Kernel:
    return launch.function("norm", "norm_any", {"WIDE": WIDE[x], "KIND": KIND[kind], "VECTOR": vector})


CONFIGURATIONS = [
    *(
        rows_kernel(x, kind, warps, 1024 * warps - short, amax).configuration
        for amax, x, kind, warps, short in itertools.product((False, True), WIDE, KINDS, ROW_WARPS, (0, 8))
        if short or x != torch.float32
    ),
    *(_any_kernel(*case).configuration for case in itertools.product(WIDE, KINDS, (0, 1))),
    launch.leads(rows_kernel(torch.bfloat16, KINDS[-1], 4, 4096, False)).configuration,
]


def blocks_of(kernel: launch.Kernel, rows: int, device: int) -> int:
    """How many blocks have the rows. They are persistent: as many as run at once, or a few less if each then has as
    many rows.
    """
    at_once = int(kernel.defines["BLOCKS"]) * launch.processors(device)
    parts = -(-rows // int(kernel.defines["ROWS"]))
    if not parts:
        return 0
    turns = -(-parts // at_once)
    even = parts // turns
    return even if parts % turns == 0 and 16 * even >= 15 * at_once else min(parts, at_once)


def normalize(
    out: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    amax: bool = False,
) -> torch.Tensor | None:
    """Compute `norm` on checked arguments; `out` is (y, mean, rstd).

    With `amax` it returns those of y's parts, fp32, where the kernel for such rows finds them; else None. Without a y
    there are these alone, of y in x's dtype, for rows that have such a kernel (`row_warps`).
    """
    rows, hidden = x.shape
    if rows == 0:
        return None
    x, weight, bias = aligned(x), aligned(weight), aligned(bias)
    inputs = (x.data_ptr(), weight.data_ptr(), pointer(bias))
    y, alone = out[0], out[0] is None
    results = (pointer(y), out[1].data_ptr(), out[2].data_ptr())
    wide = WIDE[x.dtype if y is None else y.dtype]
    options = (np.float32(eps), np.int32(zero_centered), np.int32(WIDE[weight.dtype]), np.int32(wide))
    args = (*inputs, *results, np.int32(rows), np.int32(hidden), *options)
    warps = row_warps(hidden)
    if warps is not None:
        kernel = rows_kernel(x.dtype, kind, warps, hidden, amax, alone)
        grid = blocks_of(kernel, rows, x.device.index)
        threads = 32 * warps * int(kernel.defines["ROWS"])
        partial = out[2].new_empty(grid) if amax else None
        more = () if partial is None else (partial.data_ptr(),)
        launch.launch(
            launch.leading(kernel), (grid,), (threads,), (*args, *more), smem=8 * hidden, device=x.device.index
        )
        return partial
    kernel = _any_kernel(x.dtype, kind, int(hidden % 8 == 0))
    launch.launch(kernel, (rows,), (_ANY_THREADS,), args, device=x.device.index)
    return None


@on_cuda
def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    out_dtype: torch.dtype,
) -> Three:
    """`x` `[rows, hidden]` -> (y of `out_dtype`, mean fp32 `[rows]` (rmsnorm: `[0]`), rstd fp32 `[rows]`)."""
    out = norm_outputs(x, weight, bias, eps, zero_centered, kind, out_dtype)
    normalize(out, x, weight, bias, eps, zero_centered, kind)
    return out


@on_cuda
def norm_scale(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    out_dtype: torch.dtype,
    *how: *Scale,
) -> Four:
    """`x` `[rows, hidden]` -> (y, mean, rstd as in `norm`, the scale for a cast of y to `dtype`, fp32 `[1]`)."""
    y, mean, rstd, scale = norm_scale_outputs(x, weight, bias, eps, zero_centered, kind, out_dtype, *how)
    partial = normalize((y, mean, rstd), x, weight, bias, eps, zero_centered, kind, True)
    if partial is None:
        current_scale.run(scale, y, *how)
    else:
        current_scale.total(partial, scale, *how)
    return y, mean, rstd, scale
