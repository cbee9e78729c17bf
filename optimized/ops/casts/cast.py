"""`twin::cast` on the GPU: kernels/casts/cast.cu. Semantics: `reference.ops.casts.cast`."""

import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, aligned, amax_pointer
from reference.ops.casts.cast import Scaling, outputs
from reference.ops.library import on_cuda

FP8 = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}  # the macro of kernels/common/quantize.cuh

_THREADS = 512
_BYTES_PER_BLOCK = _THREADS * 2 * 16
_kernels = {
    (x, q): launch.function("cast", "cast", {"WIDE": WIDE[x], "FP8": FP8[q]}) for x, q in itertools.product(WIDE, FP8)
}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]
CONFIGURATIONS += [launch.leads(one).configuration for one in _kernels.values()]


def scaling_pointers(scale: torch.Tensor, amax_history: torch.Tensor | None, column: int) -> tuple[int, int]:
    """Addresses of `scale[column]` and of the staging entry `amax_history[0, column]`; 0 without a history."""
    return scale.data_ptr() + 4 * column * scale.stride(0), amax_pointer(amax_history, column)


def run(out: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, *scaling: *Scaling) -> None:
    """Launch the kernel on checked arguments: it writes q and scale_inv to `out`."""
    q, scale_inv = out
    scale, amax_history, column, dtype = scaling
    x = aligned(x)
    pointers = (x.data_ptr(), *scaling_pointers(scale, amax_history, column), q.data_ptr(), scale_inv.data_ptr())
    # At least one block: it writes scale_inv.
    grid = (max(1, -(-x.numel() * x.element_size() // _BYTES_PER_BLOCK)),)
    args = (*pointers, np.int64(x.numel()))
    launch.launch(launch.leading(_kernels[x.dtype, dtype]), grid, (_THREADS,), args, device=x.device.index)


@on_cuda
def cast(x: torch.Tensor, *scaling: *Scaling) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[rows, cols]`, `scale` fp32 `[columns]` -> (q `[rows, cols]` of `dtype`, scale_inv fp32 `[1]`)."""
    out = outputs(x, *scaling)
    run(out, x, *scaling)
    return out
