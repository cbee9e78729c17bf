"""`twin::cat_cast_blocks_transpose_dbias` on the GPU: kernels/casts/cat_cast_blocks.cu, and the kernel `total` of
kernels/casts/dbias.cu. Semantics: `reference.ops.casts.cat_cast_blocks`.
"""

import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, aligned, pointer
from optimized.ops.casts.cast import FP8
from optimized.ops.casts.cast_blocks import THREADS
from optimized.ops.casts.cast_transpose import tile_grid
from optimized.ops.casts.cat_cast_transpose import parts
from optimized.ops.casts.dbias import add_blocks, dbias, new_partial
from reference.ops.casts.cast_blocks import DIALECTS, Five, blocks_of
from reference.ops.casts.cat_cast_blocks import outputs
from reference.ops.casts.cat_cast_transpose import side_by_side
from reference.ops.library import on_cuda

_kernels = {
    (x, q): launch.function("cat_cast_blocks", "cat_cast_blocks", {"WIDE": WIDE[x], "FP8": FP8[q]})
    for x, q in itertools.product(WIDE, FP8)
}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]


@on_cuda
def cat_cast_blocks_transpose_dbias(
    xs: list[torch.Tensor], groups: int, dtype: torch.dtype, dialect: str, epsilon: float
) -> Five:
    """xs -> (q `[rows, cols]`, q_t `[cols, ceil16(rows)]`, scale_inv, scale_inv_t, dbias `[cols]` of xs's dtype)."""
    out = outputs(xs, groups, dtype, dialect, epsilon)
    q, q_t, scale_inv, scale_inv_t, db = out
    (rows, cols), wide = q.shape, xs[0].dtype
    read = [aligned(x) for x in xs]  # kept until the launch
    partial = None if wide == torch.float32 else new_partial(q)
    if rows and cols:
        pointers = (q.data_ptr(), q_t.data_ptr(), scale_inv.data_ptr(), scale_inv_t.data_ptr(), pointer(partial))
        numbers = (np.float32(epsilon), np.int32(DIALECTS.index(dialect)), np.int32(rows), np.int32(cols))
        grid = tile_grid(blocks_of(cols), blocks_of(rows))
        args = (parts(read, groups), *pointers, *numbers)
        launch.launch(_kernels[wide, dtype], grid, (THREADS[wide],), args, device=q.device.index)
    if partial is None:  # the kernel sums 16-bit numbers
        db.copy_(dbias(side_by_side(xs, groups)))
    else:
        add_blocks(partial, db)
    return out
