"""`twin::dequantize` on the GPU: kernels/casts/dequantize.cu. Semantics: `reference.ops.casts.dequantize`."""

import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, aligned
from optimized.ops.casts.cast import FP8
from reference.ops.casts.dequantize import outputs
from reference.ops.library import on_cuda

_THREADS = 256
_CODES = 16  # of a thread
ONE, BLOCKS, SQUARES, ROWS = range(4)  # what a scale_inv is of
_kernels = {
    (q, wide): launch.function("dequantize", "dequantize", {"FP8": FP8[q], "WIDE": WIDE[wide]})
    for q, wide in itertools.product(FP8, WIDE)
}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]


@on_cuda
def dequantize(q: torch.Tensor, scale_inv: torch.Tensor, square: bool, dtype: torch.dtype) -> torch.Tensor:
    """q `[rows, cols]` of FP8, scale_inv fp32 `[1]`, `[rows]` or of blocks -> `[rows, cols]` of `dtype`: fp32, bf16 or
    fp16.
    """
    out = outputs(q, scale_inv, square, dtype)
    if not q.numel():
        return out
    q = aligned(q)
    if scale_inv.dim() == 1:
        layout = ONE if len(scale_inv) == 1 else ROWS
    else:
        layout = SQUARES if square else BLOCKS
    rows, cols = q.shape
    args = (q.data_ptr(), scale_inv.data_ptr(), out.data_ptr(), np.int32(layout), np.int32(rows), np.int32(cols))
    grid = (-(-q.numel() // (_CODES * _THREADS)),)
    launch.launch(_kernels[q.dtype, dtype], grid, (_THREADS,), args, device=q.device.index)
    return out
