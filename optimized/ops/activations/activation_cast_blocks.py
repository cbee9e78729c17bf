"""`twin::activation_cast_blocks_transpose` and its backward on the GPU: kernels/activations/activation_cast_blocks.cu,
and the kernel `total` of kernels/casts/dbias.cu. Semantics: `reference.ops.activations.activation_cast_blocks`.
"""

import itertools
from functools import cache

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.activations.activation import CHOICES, activation_backward, macros
from optimized.ops.casts.amax import WIDE, aligned, pointer
from optimized.ops.casts.cast import FP8
from optimized.ops.casts.cast_blocks import THREADS
from optimized.ops.casts.cast_transpose import tile_grid
from optimized.ops.casts.dbias import add_blocks, dbias, new_partial
from reference.ops.activations.activation import width
from reference.ops.activations.activation_cast_blocks import backward_outputs, forward_outputs
from reference.ops.casts.cast_blocks import DIALECTS, Five, Four, blocks_of
from reference.ops.library import on_cuda


@cache
def _kernel(kind: str, x: torch.dtype, q: torch.dtype, backward: bool) -> launch.Kernel:
    name = "activation_cast_blocks"
    return launch.function(name, name, {**macros(kind), "WIDE": WIDE[x], "FP8": FP8[q], "BACKWARD": int(backward)})


CONFIGURATIONS = [_kernel(*x, *cast).configuration for x in CHOICES for cast in itertools.product(FP8, (False, True))]


def _run(
    out: Four,
    kind: str,
    grad: torch.Tensor | None,
    x: torch.Tensor,
    partial: torch.Tensor | None,
    dialect: str,
    epsilon: float,
) -> None:
    """Launch the kernel on checked arguments; it writes sums over rows to `partial`."""
    (rows, cols), m = out[0].shape, width(kind, x.shape[1])
    if rows == 0 or cols == 0:
        return
    x, grad = aligned(x), aligned(grad)
    pointers = (pointer(grad), x.data_ptr(), *(one.data_ptr() for one in out), pointer(partial))
    args = (*pointers, np.float32(epsilon), np.int32(DIALECTS.index(dialect)), np.int32(rows), np.int32(m))
    kernel = _kernel(kind, x.dtype, out[0].dtype, grad is not None)
    grid = tile_grid(blocks_of(cols), blocks_of(rows))
    launch.launch(kernel, grid, (THREADS[x.dtype],), args, device=x.device.index)


@on_cuda
def activation_cast_blocks_transpose(
    x: torch.Tensor, kind: str, dtype: torch.dtype, dialect: str, epsilon: float
) -> Four:
    """`x` `[rows, n]` -> (q `[rows, m]`, q_t `[m, ceil16(rows)]` of `dtype`, scale_inv, scale_inv_t fp32)."""
    out = forward_outputs(x, kind, dtype, dialect, epsilon)
    _run(out, kind, None, x, None, dialect, epsilon)
    return out


@on_cuda
def activation_backward_cast_blocks_transpose_dbias(
    grad: torch.Tensor, x: torch.Tensor, kind: str, dtype: torch.dtype, dialect: str, epsilon: float
) -> Five:
    """`grad` `[rows, m]`, `x` `[rows, n]` -> (q `[rows, n]`, q_t `[n, ceil16(rows)]`, scale_inv, scale_inv_t, dbias
    `[n]`).
    """
    q, q_t, scale_inv, scale_inv_t, db = found = backward_outputs(grad, x, kind, dtype, dialect, epsilon)
    partial = None if x.dtype == torch.float32 else new_partial(x)
    _run((q, q_t, scale_inv, scale_inv_t), kind, grad, x, partial, dialect, epsilon)
    if partial is None:  # the kernel sums 16-bit numbers
        db.copy_(dbias(activation_backward(grad, x, kind)))
    else:
        add_blocks(partial, db)
    return found
