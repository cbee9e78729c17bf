"""`twin::amax` on the GPU: kernels/casts/amax.cu. Semantics: `reference.ops.casts.amax`."""

from typing import TypeVar

import numpy as np
import torch

from optimized.cuda import launch
from reference.ops.casts.amax import outputs
from reference.ops.library import on_cuda

WIDE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the macro of kernels/common/wide.cuh

_THREADS = 256
_BYTES_PER_BLOCK = _THREADS * 4 * 16  # what the threads of a block have in flight
_BLOCKS_PER_PROCESSOR = 16
_kernels = {dtype: launch.function("amax", "amax", {"WIDE": wide}) for dtype, wide in WIDE.items()}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]
_Optional = TypeVar("_Optional", torch.Tensor, torch.Tensor | None)


def aligned(x: _Optional) -> _Optional:
    """`x`, or a copy where a view starts off the 16-byte boundary that the kernels' loads need."""
    return x if x is None or x.data_ptr() % 16 == 0 else x.clone()


def pointer(x: torch.Tensor | None) -> int:
    """The address of a tensor; 0 for none."""
    return 0 if x is None else x.data_ptr()


def amax_pointer(amax_history: torch.Tensor | None, column: int) -> int:
    """Address of the staging entry `amax_history[0, column]`; 0 without a history."""
    return 0 if amax_history is None else amax_history.data_ptr() + 4 * column * amax_history.stride(1)


@on_cuda
def amax(x: torch.Tensor, amax_history: torch.Tensor, column: int) -> None:
    """`x` `[rows, cols]`; `amax_history` fp32 `[length, columns]`, `[0, column]` of it updated in place."""
    outputs(x, amax_history, column)
    x = aligned(x)
    args = [x.data_ptr(), amax_pointer(amax_history, column), np.int64(x.numel())]
    blocks = -(-x.numel() * x.element_size() // _BYTES_PER_BLOCK)
    grid = (max(1, min(blocks, _BLOCKS_PER_PROCESSOR * launch.processors(x.device.index))),)
    launch.launch(_kernels[x.dtype], grid, (_THREADS,), args, device=x.device.index)
