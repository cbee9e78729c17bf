"""`twin::amax` on the GPU: kernels/amax.cu. Semantics: `reference.ops.amax`."""

from typing import Any

import numpy as np
import torch

from optimized import launch
from reference.ops.amax import outputs
from reference.ops.library import on_cuda

# The macro WIDE of kernels/wide.cuh.
WIDE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CONFIGURATIONS: list[tuple[str, dict[str, int | str]]] = [("amax", {"WIDE": wide}) for wide in WIDE.values()]

_THREADS = 256
_BYTES_PER_BLOCK = _THREADS * 4 * 16  # what the threads of a block have in flight
_BLOCKS_PER_PROCESSOR = 16
_kernels = {dtype: launch.function("amax", "amax", {"WIDE": wide}) for dtype, wide in WIDE.items()}


def aligned(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy where a view starts off the 16-byte boundary that the kernels' loads need."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def amax_pointer(amax_history: torch.Tensor | None, column: int) -> int:
    """Address of the staging entry `amax_history[0, column]`; 0 without a history."""
    if amax_history is None:
        return 0
    return amax_history.data_ptr() + 4 * column * amax_history.stride(1)


@on_cuda
def amax(x: torch.Tensor, amax_history: torch.Tensor, column: int) -> None:
    """`x` `[rows, cols]`; `amax_history` fp32 `[length, columns]`, `[0, column]` of it updated in place."""
    outputs(x, amax_history, column)
    x = aligned(x)
    args: list[Any] = [x.data_ptr(), amax_pointer(amax_history, column), np.int64(x.numel())]
    blocks = -(-x.numel() * x.element_size() // _BYTES_PER_BLOCK)
    grid = (max(1, min(blocks, _BLOCKS_PER_PROCESSOR * launch.processors(x.device.index))),)
    launch.launch(_kernels[x.dtype], grid, (_THREADS,), args, device=x.device.index)
