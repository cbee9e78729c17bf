"""`twin::norm_cast_blocks_transpose` on the GPU: kernels/norms/norm_statistics.cu, then norm_cast_blocks.cu
beside it, which reads x again. Semantics: `reference.ops.norms.norm_cast_blocks`.
"""

import functools
import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts import cast_blocks
from optimized.ops.casts.amax import WIDE, aligned, pointer
from optimized.ops.casts.cast import FP8
from optimized.ops.casts.cast_transpose import tile_grid
from optimized.ops.norms.norm import KIND, ROW_WARPS, defines, normalize, row_warps
from reference.ops.casts.cast_blocks import DIALECTS, blocks_of
from reference.ops.library import on_cuda
from reference.ops.norms.norm import KINDS
from reference.ops.norms.norm_cast_blocks import Six, outputs


@functools.cache
def _statistics(x: torch.dtype, kind: str, warps: int) -> launch.Kernel:
    return launch.function("norm_statistics", "norm_statistics", {**defines(x, kind, warps, 0), "WHOLE": 0})


_kernels = {
    (x, kind, q): launch.function(
        "norm_cast_blocks", "norm_cast_blocks", {"WIDE": WIDE[x], "KIND": KIND[kind], "FP8": FP8[q]}
    )
    for x, kind, q in itertools.product(WIDE, KINDS, FP8)
}
CONFIGURATIONS = [
    *(_statistics(*case).configuration for case in itertools.product(WIDE, KINDS, ROW_WARPS)),
    *(one.configuration for one in _kernels.values()),
]


@on_cuda
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
    """`x` `[rows, hidden]` -> (q, q_t `[hidden, ceil16(rows)]` of `dtype`, scale_inv, scale_inv_t, mean, rstd fp32)."""
    out = outputs(x, weight, bias, eps, zero_centered, kind, dtype, dialect, epsilon)
    q, q_t, scale_inv, scale_inv_t, mean, rstd = out
    (rows, hidden), index = x.shape, x.device.index
    if rows == 0:
        return out
    warps = row_warps(hidden)
    if warps is None:  # too long for registers: y goes through memory
        y = torch.empty_like(x)
        normalize((y, mean, rstd), x, weight, bias, eps, zero_centered, kind)
        cast_blocks.run(y, (q, scale_inv), (q_t, scale_inv_t), dtype, False, dialect, epsilon)
        return out
    x, weight, bias = aligned(x), aligned(weight), aligned(bias)
    affine = rstd.new_empty((2 if kind == "layernorm" else 1, hidden))
    statistics = (mean.data_ptr(), rstd.data_ptr(), affine.data_ptr())
    sizes = (np.int32(rows), np.int32(hidden))
    options = (np.float32(eps), np.int32(zero_centered), np.int32(WIDE[weight.dtype]))
    kernel = _statistics(x.dtype, kind, warps)
    in_block, at_once = int(kernel.defines["ROWS"]), int(kernel.defines["BLOCKS"]) * launch.processors(index)
    args = (x.data_ptr(), weight.data_ptr(), pointer(bias), *statistics, *sizes, *options)
    launch.launch(kernel, (min(-(-rows // in_block), at_once),), (32 * warps * in_block,), args, device=index)
    results = (q.data_ptr(), q_t.data_ptr(), scale_inv.data_ptr(), scale_inv_t.data_ptr())
    how = (np.float32(epsilon), np.int32(DIALECTS.index(dialect)))
    grid = tile_grid(blocks_of(hidden), blocks_of(rows))
    tiles, threads = _kernels[x.dtype, kind, dtype], (cast_blocks.THREADS[x.dtype],)
    launch.launch(tiles, grid, threads, (x.data_ptr(), *statistics, *results, *how, *sizes), device=index, early=True)
    return out
