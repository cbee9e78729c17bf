"""`twin::cast_transpose` and `twin::cast_transpose_dbias` on the GPU: kernels/casts/cast_transpose.cu, and the kernel
`total` of kernels/casts/dbias.cu. Semantics: `reference.ops.casts.cast_transpose`.
"""

import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, aligned, pointer
from optimized.ops.casts.cast import FP8, packed_macro, scaling_pointers, sequence_arguments
from optimized.ops.casts.dbias import add_blocks, new_partial
from reference.ops.casts.cast import Scaling
from reference.ops.casts.cast_transpose import Four, Three, cast_transpose_dbias_outputs, cast_transpose_outputs
from reference.ops.library import on_cuda

THREADS = 128
_TILE_ROWS = 128
_TILE_COL_BYTES = 256
_DOWN = 65535  # blocks that a grid can have in y
_kernels = {
    (x, q, dbias, packed): launch.function(
        "cast_transpose",
        "cast_transpose",
        {"WIDE": WIDE[x], "FP8": FP8[q], "DBIAS": int(dbias)} | packed_macro(packed),
    )
    for packed in (False, True)
    for x, q, dbias in itertools.product(WIDE, FP8, (False,) if packed else (False, True))
}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]


def tiles(x: torch.Tensor, cols: int) -> tuple[int, int]:
    """How many tiles of x's dtype cover `[rows of x, cols]`: side by side, and one below the other."""
    return -(-cols // (_TILE_COL_BYTES // x.element_size())), -(-x.shape[0] // _TILE_ROWS)


def tile_grid(across: int, down: int) -> tuple[int, int, int]:
    """The grid with a block for each tile, and at least one, which writes scale_inv. `down` is spread over y and z."""
    return max(1, across), min(max(1, down), _DOWN), max(1, -(-down // _DOWN))


def run(
    out: Three,
    x: torch.Tensor,
    partial: torch.Tensor | None,
    *scaling: *Scaling,
    places: tuple[torch.Tensor | None, ...] = (None, None),
) -> None:
    """Launch the kernel on checked arguments: it writes q, q_t and scale_inv to `out`, sums over rows to `partial`.

    `places`: lengths and starts of packed sequences.
    """
    x = aligned(x)
    scale, amax_history, column, dtype = scaling
    inputs = (x.data_ptr(), *scaling_pointers(scale, amax_history, column))
    results = (out[0].data_ptr(), out[1].data_ptr(), out[2].data_ptr(), pointer(partial))
    where = sequence_arguments(*places)
    args = (*inputs, *results, np.int32(x.shape[0]), np.int32(x.shape[1]), *where)
    kernel = _kernels[x.dtype, dtype, partial is not None, bool(where)]
    launch.launch(kernel, tile_grid(*tiles(x, x.shape[1])), (THREADS,), args, device=x.device.index)


@on_cuda
def cast_transpose(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> Three:
    """`x` `[rows, cols]` -> (q `[rows, cols]`, q_t `[cols, ceil16(rows)]`, scale_inv fp32 `[1]`)."""
    out = cast_transpose_outputs(x, scale, amax_history, column, dtype, lengths, starts)
    run(out, x, None, scale, amax_history, column, dtype, places=(lengths, starts))
    return out


@on_cuda
def cast_transpose_dbias(x: torch.Tensor, *scaling: *Scaling) -> Four:
    """`x` `[rows, cols]` -> (q, q_t, scale_inv as in `cast_transpose`, dbias `[cols]` of x's dtype)."""
    q, q_t, scale_inv, dbias = out = cast_transpose_dbias_outputs(x, *scaling)
    partial = new_partial(x)
    run((q, q_t, scale_inv), x, partial, *scaling)
    add_blocks(partial, dbias)
    return out
