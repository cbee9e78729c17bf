"""`twin::cast_blocks` and `twin::cast_blocks_transpose` on the GPU: kernels/casts/cast_blocks.cu. Semantics:
`reference.ops.casts.cast_blocks`.
"""

import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, aligned, pointer
from optimized.ops.casts.cast import FP8
from optimized.ops.casts.cast_transpose import tile_grid
from reference.ops.casts.cast_blocks import BLOCK, DIALECTS, Blocks, Four, Two, blocks_of, outputs, transpose_outputs
from reference.ops.library import on_cuda

_kernels = {
    (x, q, square, transpose): launch.function(
        "cast_blocks",
        "cast_blocks",
        {"WIDE": WIDE[x], "FP8": FP8[q], "SQUARE": int(square), "TRANSPOSE": int(transpose)},
    )
    for x, q, square, transpose in itertools.product(WIDE, FP8, (False, True), (False, True))
}
THREADS = {x: BLOCK // 8 * BLOCK * x.itemsize // 16 for x in WIDE}  # of a tile
CONFIGURATIONS = [one.configuration for one in _kernels.values()]


def run(x: torch.Tensor, out: Two, out_t: Two | None, *blocks: *Blocks) -> None:
    """Launch the kernel on checked arguments."""
    (rows, cols), (dtype, square, dialect, epsilon) = x.shape, blocks
    if rows == 0 or cols == 0:  # no result has an element
        return
    x = aligned(x)
    (q, scale_inv), (q_t, scale_inv_t) = out, out_t or (None, None)
    pointers = (x.data_ptr(), q.data_ptr(), pointer(q_t), scale_inv.data_ptr(), pointer(scale_inv_t))
    args = (*pointers, np.float32(epsilon), np.int32(DIALECTS.index(dialect)), np.int32(rows), np.int32(cols))
    kernel = _kernels[x.dtype, dtype, square, out_t is not None]
    grid = tile_grid(blocks_of(cols), blocks_of(rows))
    launch.launch(kernel, grid, (THREADS[x.dtype],), args, device=x.device.index)


@on_cuda
def cast_blocks(x: torch.Tensor, *blocks: *Blocks) -> Two:
    """x `[rows, cols]`, fp32, bf16 or fp16 -> (q `[rows, cols]` of `dtype`, scale_inv fp32)."""
    out = outputs(x, *blocks)
    run(x, out, None, *blocks)
    return out


@on_cuda
def cast_blocks_transpose(x: torch.Tensor, *blocks: *Blocks) -> Four:
    """x `[rows, cols]` -> (q, q_t `[cols, ceil16(rows)]`, scale_inv, scale_inv_t); zero codes fill q_t up."""
    q, q_t, scale_inv, scale_inv_t = out = transpose_outputs(x, *blocks)
    run(x, (q, scale_inv), (q_t, scale_inv_t), *blocks)
    return out
