"""`twin::cat_cast_transpose_dbias` on the GPU: kernels/casts/cat_cast_transpose.cu, and the kernel `total` of
kernels/casts/dbias.cu. Semantics: `reference.ops.casts.cat_cast_transpose`.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, aligned
from optimized.ops.casts.cast import FP8, scaling_pointers
from optimized.ops.casts.cast_transpose import THREADS, tile_grid, tiles
from optimized.ops.casts.dbias import add_blocks, new_partial
from reference.ops.casts.cast_transpose import Four
from reference.ops.casts.cat_cast_transpose import PARTS, outputs
from reference.ops.library import on_cuda

_BEYOND = np.iinfo(np.int32).max  # the first column of a part that is not given
_PARTS = np.dtype([("part", [("x", "u8"), ("first", "i4"), ("width", "i4")], PARTS), ("groups", "i4"), ("width", "i4")])
_kernels = {
    (x, q): launch.function("cat_cast_transpose", "cat_cast_transpose", {"WIDE": WIDE[x], "FP8": FP8[q]})
    for x, q in itertools.product(WIDE, FP8)
}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]


def parts(xs: Sequence[torch.Tensor], groups: int) -> launch.ByValue:
    """`xs`, each `[rows, groups * width]`, as casts/side_by_side.cuh reads them; to be kept until the launch."""
    widths = [x.shape[1] // groups for x in xs]
    found = np.zeros((), _PARTS)
    found["part"]["first"] = _BEYOND
    for i, x in enumerate(xs):
        found["part"][i] = (x.data_ptr(), sum(widths[:i]), widths[i])
    found["groups"], found["width"] = groups, sum(widths)
    return launch.by_value(found)


@on_cuda
def cat_cast_transpose_dbias(
    xs: list[torch.Tensor],
    groups: int,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
) -> Four:
    """xs -> (q `[rows, cols]`, q_t `[cols, ceil16(rows)]`, scale_inv fp32 `[1]`, dbias `[cols]` of xs's dtype)."""
    q, q_t, scale_inv, dbias = outputs(xs, groups, scale, amax_history, column, dtype)
    read = [aligned(x) for x in xs]  # kept until the launch
    x = read[0]
    partial = new_partial(q)
    inputs = (parts(read, groups), *scaling_pointers(scale, amax_history, column))
    results = (q.data_ptr(), q_t.data_ptr(), scale_inv.data_ptr(), partial.data_ptr())
    args = (*inputs, *results, np.int32(q.shape[0]), np.int32(q.shape[1]))
    grid = tile_grid(*tiles(x, q.shape[1]))
    launch.launch(_kernels[x.dtype, dtype], grid, (THREADS,), args, device=x.device.index)
    add_blocks(partial, dbias)
    return q, q_t, scale_inv, dbias
