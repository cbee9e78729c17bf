"""`twin::multi_transpose` on the GPU: kernels/casts/multi_transpose.cu, one launch for all matrices.
Semantics: `reference.ops.casts.multi_transpose`.
"""

import numpy as np
import torch

from optimized.cuda import launch
from reference.ops.casts.multi_transpose import OP, outputs
from reference.ops.library import on_cuda

_THREADS = 128
_ROWS, _COLS = 256, 128  # of a tile
# Matrices of one launch, a layer's: their addresses are in the kernel's argument. A longer list takes more launches.
_CAPACITY = 16
_MATRIX = np.dtype(
    [*((name, "u8") for name in ("q", "q_t")), *((name, "i4") for name in ("rows", "cols", "first_tile", "unused"))]
)
_kernel = launch.function("multi_transpose", "multi_transpose", {"CAPACITY": _CAPACITY})
CONFIGURATIONS = [_kernel.configuration]


@on_cuda
def multi_transpose(q: list[torch.Tensor], q_t: list[torch.Tensor]) -> None:
    """Write each `[rows, cols]` of `q` to `[cols, rows]` of `q_t`."""
    outputs(q, q_t)
    left = [(x, x_t) for x, x_t in zip(q, q_t, strict=True) if x.numel()]
    for start in range(0, len(left), _CAPACITY):
        table, first_tile = np.zeros(_CAPACITY, _MATRIX), 0
        part = left[start : start + _CAPACITY]
        for entry, (x, x_t) in enumerate(part):
            if (x.data_ptr() | x_t.data_ptr()) % 16:
                raise ValueError(f"{OP}: q and q_t must start at multiples of 16 bytes on a GPU.")
            rows, cols = x.shape
            table[entry] = (x.data_ptr(), x_t.data_ptr(), rows, cols, first_tile, 0)
            first_tile += -(-rows // _ROWS) * -(-cols // _COLS)
        args = [launch.by_value(table), np.int32(len(part))]
        launch.launch(_kernel, (first_tile,), (_THREADS,), args, device=part[0][0].device.index)
