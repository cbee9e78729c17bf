"""`twin::multi_current_scale` on the GPU: kernels/casts/multi_current_scale.cu, and the kernel `total` of
kernels/casts/current_scale.cu. Semantics: `reference.ops.casts.multi_current_scale`.
"""

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, aligned
from optimized.ops.casts.current_scale import THREADS, amax_blocks, total
from reference.ops.casts.current_scale import Scale
from reference.ops.casts.multi_current_scale import outputs
from reference.ops.library import on_cuda

# Matrices of one launch, a layer's weights or parts of a gradient. A longer list takes more launches.
CAPACITY = 4
_MATRIX = np.dtype([("x", "u8"), ("count", "i8")])
_kernels = {
    dtype: launch.function("multi_current_scale", "multi_current_scale", {"WIDE": wide, "CAPACITY": CAPACITY})
    for dtype, wide in WIDE.items()
}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]


@on_cuda
def multi_current_scale(xs: list[torch.Tensor], joined: bool, *how: *Scale) -> torch.Tensor:
    """xs `[rows, cols]` each, of one dtype -> the scales for casts to `dtype`, fp32 `[len(xs)]`; joined: `[1]`."""
    scale = outputs(xs, joined, *how)
    read = [aligned(x) for x in xs]  # kept until the launches
    # As many blocks for each, so that the place of an amax says whose it is; `total` reads four at a time.
    blocks = -(-amax_blocks(max(read, key=torch.Tensor.numel), min(len(read), CAPACITY)) // 4) * 4
    partial = scale.new_empty(len(read), blocks)
    for start in range(0, len(read), CAPACITY):
        part = read[start : start + CAPACITY]
        table = np.zeros(CAPACITY, _MATRIX)
        for entry, x in enumerate(part):
            table[entry] = (x.data_ptr(), x.numel())
        args = (launch.by_value(table), partial[start].data_ptr())
        launch.launch(_kernels[xs[0].dtype], (blocks, len(part)), (THREADS,), args, device=scale.device.index)
    total(partial, scale, *how)
    return scale
