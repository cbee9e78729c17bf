"""`twin::norm_cast` on the GPU: kernels/norms/norm_cast.cu; rows that are too long for registers go through memory in
fp32. Semantics: `reference.ops.norms.norm_cast`.
"""

import functools
import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, aligned, pointer
from optimized.ops.casts.cast import FP8, scaling_pointers
from optimized.ops.casts.cast import run as run_cast
from optimized.ops.norms.norm import ROW_WARPS, SHARED, Defines, blocks_of, defines, normalize, row_warps
from reference.ops.casts.cast import Scaling
from reference.ops.library import on_cuda
from reference.ops.norms.norm import KINDS
from reference.ops.norms.norm_cast import Found, outputs

# By warps: fewer threads at a time than `norm` has, since the scale and the amax take registers.
_SHAPES = {1: {"BLOCKS": 5}, 2: {"ROWS": 5}}


@functools.cache
def _kernel(x: torch.dtype, kind: str, q: torch.dtype, warps: int, hidden: int) -> launch.Kernel:
    macros: Defines = {**defines(x, kind, warps, hidden), "FP8": FP8[q]}
    macros |= {name: min(most, int(macros[name])) for name, most in _SHAPES.get(warps, {}).items()}
    return launch.function("norm_cast", "norm_cast", macros, SHARED)


CONFIGURATIONS = [
    _kernel(x, kind, q, warps, 1024 * warps - short).configuration
    for x, kind, q, warps, short in itertools.product(WIDE, KINDS, FP8, ROW_WARPS, (0, 16))
    if short or x != torch.float32
]
CONFIGURATIONS.append(launch.leads(_kernel(torch.bfloat16, KINDS[-1], torch.float8_e4m3fn, 4, 4096)).configuration)


@on_cuda
def norm_cast(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    *scaling: *Scaling,
) -> Found:
    """`x` `[rows, hidden]` -> (q `[rows, hidden]`, scale_inv fp32 `[1]`, mean, rstd)."""
    out = outputs(x, weight, bias, eps, zero_centered, kind, *scaling)
    q, scale_inv, mean, rstd = out
    (rows, hidden), (scale, amax_history, column, dtype) = x.shape, scaling
    warps = row_warps(hidden)
    if warps is None:
        y = x.new_empty(x.shape, dtype=torch.float32)
        normalize((y, mean, rstd), x, weight, bias, eps, zero_centered, kind)
        run_cast((q, scale_inv), y, *scaling)
        return out
    x, weight, bias = aligned(x), aligned(weight), aligned(bias)
    inputs = (x.data_ptr(), weight.data_ptr(), pointer(bias), *scaling_pointers(scale, amax_history, column))
    options = (np.float32(eps), np.int32(zero_centered), np.int32(WIDE[weight.dtype]))
    args = (*inputs, *(one.data_ptr() for one in out), np.int32(rows), np.int32(hidden), *options)
    kernel = _kernel(x.dtype, kind, dtype, warps, hidden)
    # At least one block: it writes scale_inv.
    grid, threads = max(1, blocks_of(kernel, rows, x.device.index)), 32 * warps * int(kernel.defines["ROWS"])
    launch.launch(launch.leading(kernel), (grid,), (threads,), args, smem=8 * hidden, device=x.device.index)
    return out
