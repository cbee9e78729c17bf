"""`twin::cast` on the GPU: kernels/cast.cu. Semantics: `reference.ops.cast`."""

import itertools

import numpy as np
import torch

from optimized import launch
from optimized.ops.amax import WIDE, aligned, amax_pointer
from reference.ops.cast import outputs
from reference.ops.library import on_cuda

# The macro FP8 of kernels/quantize.cuh.
FP8 = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}
CONFIGURATIONS: list[tuple[str, dict[str, int | str]]] = [
    ("cast", {"WIDE": wide, "FP8": fp8}) for wide, fp8 in itertools.product(WIDE.values(), FP8.values())
]

_THREADS = 512
_BYTES_PER_BLOCK = _THREADS * 2 * 16
_kernels = {
    (x, q): launch.function("cast", "cast", {"WIDE": WIDE[x], "FP8": FP8[q]}) for x, q in itertools.product(WIDE, FP8)
}


def scale_pointer(scale: torch.Tensor, column: int) -> int:
    """Address of `scale[column]`."""
    return scale.data_ptr() + 4 * column * scale.stride(0)


@on_cuda
def cast(
    x: torch.Tensor, scale: torch.Tensor, amax_history: torch.Tensor | None, column: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[rows, cols]`, `scale` fp32 `[columns]` -> (q `[rows, cols]` of `dtype`, scale_inv fp32 `[1]`)."""
    q, scale_inv = outputs(x, scale, amax_history, column, dtype)
    x = aligned(x)
    args = [
        x.data_ptr(),
        scale_pointer(scale, column),
        amax_pointer(amax_history, column),
        q.data_ptr(),
        scale_inv.data_ptr(),
        np.int64(x.numel()),
    ]
    # At least one block: it writes scale_inv.
    grid = (max(1, -(-x.numel() * x.element_size() // _BYTES_PER_BLOCK)),)
    launch.launch(_kernels[x.dtype, dtype], grid, (_THREADS,), args, device=x.device.index)
    return q, scale_inv
