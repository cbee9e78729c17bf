"""`twin::current_scale` on the GPU: kernels/casts/current_scale.cu. Semantics: `reference.ops.casts.current_scale`."""

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, aligned
from reference.numbers import formats
from reference.ops.casts.current_scale import Scale, outputs
from reference.ops.library import on_cuda

THREADS = 256
_BYTES_PER_BLOCK = THREADS * 4 * 16  # what the threads of a block have in flight
_BLOCKS_PER_PROCESSOR = 8
_TOTAL_THREADS = 512
_kernels = {dtype: launch.function("current_scale", "current_scale", {"WIDE": wide}) for dtype, wide in WIDE.items()}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]
_total = launch.function("current_scale", "total", {"WIDE": WIDE[torch.bfloat16]})


def amax_blocks(x: torch.Tensor, matrices: int = 1) -> int:
    """How many blocks look for x's amax in a launch for so many `matrices`; at least one."""
    blocks = -(-x.numel() * x.element_size() // _BYTES_PER_BLOCK)
    return max(1, min(blocks, _BLOCKS_PER_PROCESSOR * launch.processors(x.device.index) // matrices))


def total(partial: torch.Tensor, scale: torch.Tensor, *how: *Scale) -> None:
    """Write the scales of matrices to `scale` `[n]`; each has its share of `partial`, fp32, the amaxes of its parts."""
    dtype, power_of_two, epsilon = how
    numbers = (np.float32(formats.format_of(dtype).largest), np.float32(epsilon), np.int32(power_of_two))
    args = (partial.data_ptr(), scale.data_ptr(), np.int32(partial.numel() // scale.numel()), *numbers)
    launch.launch(_total, (scale.numel(),), (_TOTAL_THREADS,), args, device=scale.device.index, early=True)


@on_cuda
def current_scale(x: torch.Tensor, *how: *Scale) -> torch.Tensor:
    """x `[rows, cols]`, fp32, bf16 or fp16 -> the scale for a cast to `dtype`, fp32 `[1]`."""
    scale = outputs(x, *how)
    run(scale, x, *how)
    return scale


def run(scale: torch.Tensor, x: torch.Tensor, *how: *Scale) -> None:
    """`current_scale` on checked arguments, into `scale` `[1]`."""
    if x.dtype == torch.float32 and x.numel() == 1:  # an amax that was found in passing
        return total(x, scale, *how)
    x = aligned(x)
    blocks = amax_blocks(x)
    partial = scale.new_empty(blocks)
    args = (x.data_ptr(), partial.data_ptr(), np.int64(x.numel()))
    launch.launch(_kernels[x.dtype], (blocks,), (THREADS,), args, device=x.device.index)
    total(partial, scale, *how)
