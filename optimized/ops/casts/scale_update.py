"""`twin::scale_update` on the GPU: kernels/casts/scale_update.cu, launched once for all modules of a device.
Semantics: `reference.ops.casts.scale_update`.
"""

import functools
import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.tapes import relaunch
from reference.ops.casts.scale_update import ALGORITHMS, outputs
from reference.ops.library import on_cuda

# Modules of one launch: their addresses are in the kernel's argument (24 bytes for each, of 32764). A model with more
# takes more launches; a small one need not pay for a large argument.
CAPACITIES = (64, 1024)
_THREADS = 256
_MODULE = np.dtype([("scale", "u8"), ("history", "u8"), ("length", "i4"), ("columns", "i4")])
_kernels = {
    (capacity, algorithm): launch.function(
        "scale_update", "scale_update", {"CAPACITY": capacity, "MOST_RECENT": int(algorithm == "most_recent")}
    )
    for capacity, algorithm in itertools.product(CAPACITIES, ALGORITHMS)
}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]


@on_cuda
def scale_update(
    scales: list[torch.Tensor], amax_histories: list[torch.Tensor], fp8_max: float, margin: int, algorithm: str
) -> None:
    """Update every module's `scale` `[n]` and `amax_history` `[L, n]`, fp32, in place."""
    tensors = (*scales, *amax_histories)
    if len({x.device for x in tensors}) == 1 and tensors[0].is_cuda:
        # A training loop makes the same two updates in each step.
        run = functools.partial(_update, scales, amax_histories, fp8_max, margin, algorithm)
        relaunch((_update, fp8_max, margin, algorithm, len(scales)), tensors, run)
        return
    outputs(scales, amax_histories, fp8_max, margin, algorithm)
    for scale, history in zip(scales, amax_histories, strict=True):
        if scale.device.type != "cuda" or history.device != scale.device:
            raise ValueError(
                f"twin::scale_update: a scale is on {scale.device} and its amax_history on {history.device}; "
                f"one CUDA device for both is accepted."
            )
    for device in {scale.device for scale in scales}:
        here = [i for i, scale in enumerate(scales) if scale.device == device]
        scale_update([scales[i] for i in here], [amax_histories[i] for i in here], fp8_max, margin, algorithm)


def _update(
    scales: list[torch.Tensor], amax_histories: list[torch.Tensor], fp8_max: float, margin: int, algorithm: str
) -> None:
    """Update the modules of one device."""
    outputs(scales, amax_histories, fp8_max, margin, algorithm)
    modules = [
        (scale.data_ptr(), history.data_ptr(), *history.shape)
        for scale, history in zip(scales, amax_histories, strict=True)
    ]
    for start in range(0, len(modules), CAPACITIES[-1]):
        part = modules[start : start + CAPACITIES[-1]]
        columns = max(module[3] for module in part)
        if columns:
            capacity = next(c for c in CAPACITIES if len(part) <= c)
            table = np.zeros(capacity, _MODULE)
            table[: len(part)] = part
            args = [launch.by_value(table), np.float32(fp8_max * 2.0**-margin)]
            device: int = scales[0].device.index
            launch.launch(_kernels[capacity, algorithm], (len(part), columns), (_THREADS,), args, device=device)
