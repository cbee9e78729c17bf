"""`twin::normal` on the GPU: kernels/random/normal.cu. Semantics: `reference.ops.random.normal`."""

import numpy as np
import torch

from optimized.cuda import launch
from reference.ops.library import on_cuda
from reference.ops.random.normal import outputs

_THREADS = 256
_ELEMENTS = 8  # that a thread computes
_kernel = launch.function("normal", "normal")
CONFIGURATIONS = [_kernel.configuration]


def _word(x: float) -> np.int64:
    """The 64 bits of a float64, as a kernel's integer."""
    return np.float64(x).view(np.int64)


@on_cuda
def normal(values: torch.Tensor, mean: float, std: float, seed: int) -> None:
    """Fill `values`, fp32 and contiguous, of any shape."""
    outputs(values, mean, std, seed)
    if values.numel():
        grid = (-(-values.numel() // (_THREADS * _ELEMENTS)),)
        args = [values.data_ptr(), np.int64(values.numel()), np.uint64(seed), _word(mean), _word(std)]
        launch.launch(_kernel, grid, (_THREADS,), args, device=values.device.index)
