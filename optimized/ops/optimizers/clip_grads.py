"""`twin::clip_grads` on the GPU: kernels/optimizers/clip_grads.cu, a launch a dtype. Semantics:
`reference.ops.optimizers.clip_grads`."""

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE
from optimized.ops.multi_tensor import ELEMENTS_PER_BLOCK, THREADS, Tensor, entries, kernels, tables
from reference.ops.library import on_cuda
from reference.ops.optimizers.clip_grads import outputs

CAPACITIES = (64, 512)
_ROW = entries(("x",))
_kernels = kernels("clip_grads", "clip_grads", {dtype: {"WIDE": wide} for dtype, wide in WIDE.items()}, CAPACITIES)
CONFIGURATIONS = [one.configuration for one in _kernels.values()]


@on_cuda
def clip_grads(grads: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale `grads` in place."""
    outputs(grads, norm, max_norm)
    found: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            found.setdefault(grad.dtype, []).append(((grad.data_ptr(),), grad.numel(), ()))
    for dtype, rows in found.items():
        for capacity, blocks, args in tables(_ROW, rows, CAPACITIES, ELEMENTS_PER_BLOCK):
            more = [norm.data_ptr(), np.float32(max_norm)]
            launch.launch(_kernels[dtype, capacity], (blocks,), (THREADS,), [*args, *more], device=norm.device.index)
