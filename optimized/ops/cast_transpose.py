"""`twin::cast_transpose` and `twin::cast_transpose_dbias` on the GPU: kernels/cast_transpose.cu, and the kernel
`total` of kernels/dbias.cu. Semantics: `reference.ops.cast_transpose`.
"""

import itertools

import numpy as np
import torch

from optimized import launch
from optimized.ops.amax import WIDE, aligned, amax_pointer
from optimized.ops.cast import FP8, scale_pointer
from optimized.ops.dbias import add_blocks, new_partial
from reference.ops.cast import Scaling
from reference.ops.cast_transpose import Four, Three, cast_transpose_dbias_outputs, cast_transpose_outputs
from reference.ops.library import on_cuda

THREADS = 128
_TILE_ROWS = 128
_TILE_COL_BYTES = 256
_DOWN = 65535  # blocks that a grid can have in y


def defines(x: torch.dtype, q: torch.dtype, dbias: bool) -> dict[str, int | str]:
    """The macros of one configuration."""
    return {"WIDE": WIDE[x], "FP8": FP8[q], "DBIAS": int(dbias)}


CONFIGURATIONS: list[tuple[str, dict[str, int | str]]] = [
    ("cast_transpose", defines(x, q, dbias)) for x, q, dbias in itertools.product(WIDE, FP8, (False, True))
]
_kernels = {
    (x, q, dbias): launch.function("cast_transpose", "cast_transpose", defines(x, q, dbias))
    for x, q, dbias in itertools.product(WIDE, FP8, (False, True))
}


def tiles(x: torch.Tensor, cols: int) -> tuple[int, int]:
    """Tiles of `[rows of x, cols]` of x's dtype, side by side and one below the other."""
    return -(-cols // (_TILE_COL_BYTES // x.element_size())), -(-x.shape[0] // _TILE_ROWS)


def tile_grid(across: int, down: int) -> tuple[int, int, int]:
    """Blocks that take a tile each, at least one, which writes scale_inv. Those below each other are z times y."""
    return max(1, across), min(max(1, down), _DOWN), max(1, -(-down // _DOWN))


def run(out: Three, x: torch.Tensor, partial: torch.Tensor | None, *scaling: *Scaling) -> None:
    """Launch one configuration on checked arguments: q, q_t and scale_inv into `out`, sums over rows into `partial`."""
    x = aligned(x)
    rows, cols = x.shape
    scale, amax_history, column, dtype = scaling
    args = [
        x.data_ptr(),
        scale_pointer(scale, column),
        amax_pointer(amax_history, column),
        out[0].data_ptr(),
        out[1].data_ptr(),
        out[2].data_ptr(),
        0 if partial is None else partial.data_ptr(),
        np.int32(rows),
        np.int32(cols),
    ]
    kernel = _kernels[x.dtype, dtype, partial is not None]
    launch.launch(kernel, tile_grid(*tiles(x, cols)), (THREADS,), args, device=x.device.index)


@on_cuda
def cast_transpose(x: torch.Tensor, *scaling: *Scaling) -> Three:
    """`x` `[rows, cols]` -> (q `[rows, cols]`, q_t `[cols, ceil16(rows)]`, scale_inv fp32 `[1]`)."""
    out = cast_transpose_outputs(x, *scaling)
    run(out, x, None, *scaling)
    return out


@on_cuda
def cast_transpose_dbias(x: torch.Tensor, *scaling: *Scaling) -> Four:
    """`x` `[rows, cols]` -> (q, q_t, scale_inv as in `cast_transpose`, dbias `[cols]` of x's dtype)."""
    q, q_t, scale_inv, dbias = out = cast_transpose_dbias_outputs(x, *scaling)
    partial = new_partial(x)
    run((q, q_t, scale_inv), x, partial, *scaling)
    add_blocks(partial, dbias)
    return out
