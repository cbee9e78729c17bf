"""`twin::multi_cast_transpose` on the GPU: kernels/casts/multi_cast_transpose.cu, one launch for all matrices.
Semantics: `reference.ops.casts.multi_cast_transpose`.
"""

import itertools
import math

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, aligned
from optimized.ops.casts.cast import FP8, scaling_pointers
from optimized.ops.casts.cast_transpose import THREADS, tiles
from reference.ops.casts.multi_cast_transpose import OP, outputs
from reference.ops.library import on_cuda

# Matrices of one launch, a module's or a model's: their addresses are in the kernel's argument (64 bytes for each, of
# 32764). A longer list takes more launches.
CAPACITIES = (4, 256)
_MATRIX = np.dtype(
    [
        *((name, "u8") for name in ("x", "scale", "amax", "q", "q_t", "scale_inv")),
        *((name, "i4") for name in ("rows", "cols", "first_tile", "unused")),
    ]
)
_kernels = {
    (x, q, capacity): launch.function(
        "multi_cast_transpose", "multi_cast_transpose", {"WIDE": WIDE[x], "FP8": FP8[q], "CAPACITY": capacity}
    )
    for x, q, capacity in itertools.product(WIDE, FP8, CAPACITIES)
}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]


@on_cuda
def multi_cast_transpose(
    xs: list[torch.Tensor],
    scales: list[torch.Tensor],
    amax_histories: list[torch.Tensor],
    columns: list[int],
    q: list[torch.Tensor],
    q_t: list[torch.Tensor],
    scale_inv: list[torch.Tensor],
) -> None:
    """Cast every matrix `[rows, cols]` of `xs` into q, q_t and scale_inv."""
    outputs(xs, scales, amax_histories, columns, q, q_t, scale_inv)
    for start in range(0, len(xs), CAPACITIES[-1]):
        part = range(start, min(start + CAPACITIES[-1], len(xs)))
        capacity = next(c for c in CAPACITIES if len(part) <= c)
        table = np.zeros(capacity, _MATRIX)
        read = [aligned(xs[i]) for i in part]  # kept until the launch
        first_tile = 0
        for entry, (i, x) in enumerate(zip(part, read, strict=True)):
            if (q[i].data_ptr() | q_t[i].data_ptr()) % 16:
                raise ValueError(f"{OP}: q[{i}] and q_t[{i}] must start at multiples of 16 bytes on a GPU.")
            scaling = scaling_pointers(scales[i], amax_histories[i] if amax_histories else None, columns[i])
            results = (q[i].data_ptr(), q_t[i].data_ptr(), scale_inv[i].data_ptr())
            table[entry] = (x.data_ptr(), *scaling, *results, *x.shape, first_tile, 0)
            first_tile += max(1, math.prod(tiles(x, x.shape[1])))  # at least the block that writes scale_inv
        kernel = _kernels[xs[0].dtype, q[0].dtype, capacity]
        args = [launch.by_value(table), np.int32(len(part))]
        launch.launch(kernel, (first_tile,), (THREADS,), args, device=xs[0].device.index)
