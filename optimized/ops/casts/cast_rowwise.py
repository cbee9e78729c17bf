"""`twin::cast_rowwise` and `twin::cast_rowwise_transpose` on the GPU: kernels/casts/cast_rowwise.cu. Semantics:
`reference.ops.casts.cast_rowwise`.
"""

import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, aligned
from optimized.ops.casts.cast import FP8
from optimized.ops.casts.cast_transpose import tile_grid
from reference.ops.casts.cast_rowwise import Four, Two, outputs, transpose_outputs
from reference.ops.casts.current_scale import Scale
from reference.ops.library import on_cuda

_ROW_THREADS, _THREADS = 128, 256
_TILE_ROWS = 128
_LARGEST_BYTES, _CAST_BYTES = 512, 128  # of a row of a tile, where the largest are found, and where they are cast
_MACROS = {(x, q): {"WIDE": WIDE[x], "FP8": FP8[q]} for x, q in itertools.product(WIDE, FP8)}
_cast, _largest, _scales, _cast_transpose = (
    {key: launch.function("cast_rowwise", name, macros) for key, macros in _MACROS.items()}
    for name in ("cast_rowwise", "largest", "scales", "cast_rowwise_transpose")
)
CONFIGURATIONS = [one.configuration for one in _cast.values()]


def _tiles(x: torch.Tensor, row_bytes: int) -> tuple[int, int]:
    """How many tiles lie side by side, and one below the other."""
    rows, cols = x.shape
    return -(-cols * x.element_size() // row_bytes), -(-rows // _TILE_ROWS)


@on_cuda
def cast_rowwise(x: torch.Tensor, *scale: *Scale) -> Two:
    """x `[rows, cols]`, fp32, bf16 or fp16 -> (q `[rows, cols]` of `dtype`, scale_inv fp32 `[rows]`)."""
    q, scale_inv = out = outputs(x, *scale)
    (rows, cols), (dtype, power_of_two, epsilon) = x.shape, scale
    if rows == 0:
        return out
    x = aligned(x)
    pointers = (x.data_ptr(), q.data_ptr(), scale_inv.data_ptr())
    args = (*pointers, np.float32(epsilon), np.int32(power_of_two), np.int32(cols))
    launch.launch(_cast[x.dtype, dtype], (rows,), (_ROW_THREADS,), args, device=x.device.index)
    return out


@on_cuda
def cast_rowwise_transpose(x: torch.Tensor, *scale: *Scale) -> Four:
    """x `[rows, cols]` -> (q, q_t `[cols, ceil16(rows)]`, scale_inv fp32 `[rows]`, scale_inv_t fp32 `[cols]`)."""
    q, q_t, scale_inv, scale_inv_t = out = transpose_outputs(x, *scale)
    (rows, cols), (dtype, power_of_two, epsilon) = x.shape, scale
    if rows + cols == 0:
        return out
    x = aligned(x)
    kernel, index, threads, filled = (x.dtype, dtype), x.device.index, (_THREADS,), x.numel() > 0
    sizes = (np.int32(rows), np.int32(cols))
    across, down = _tiles(x, _LARGEST_BYTES) if filled else (0, 0)
    of_rows, of_columns = scale_inv.new_empty(across * rows), scale_inv.new_empty(down * cols)
    partial, found = (of_rows.data_ptr(), of_columns.data_ptr()), scale_inv.new_empty(rows + cols)
    if filled:
        tiles = tile_grid(across, down)
        launch.launch(_largest[kernel], tiles, threads, (x.data_ptr(), *partial, *sizes), device=index)
    results = (found.data_ptr(), scale_inv.data_ptr(), scale_inv_t.data_ptr())
    how = (np.float32(epsilon), np.int32(power_of_two), *sizes, np.int32(across), np.int32(down))
    grid = (-(-(rows + cols) // _THREADS),)
    launch.launch(_scales[kernel], grid, threads, (*partial, *results, *how), device=index)
    if filled:
        tiles = tile_grid(*_tiles(x, _CAST_BYTES))
        args = (x.data_ptr(), found.data_ptr(), q.data_ptr(), q_t.data_ptr(), *sizes)
        launch.launch(_cast_transpose[kernel], tiles, threads, args, device=index)
    return out
