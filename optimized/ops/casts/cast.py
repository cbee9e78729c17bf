"""`twin::cast` on the GPU: kernels/casts/cast.cu. Semantics: `reference.ops.casts.cast`."""

import itertools
from typing import Any

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, aligned, amax_pointer
from reference.ops.casts.cast import Scaling, outputs
from reference.ops.library import on_cuda

FP8 = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}  # the macro of kernels/common/quantize.cuh


def packed_macro(packed: bool) -> dict[str, int]:
    """The macro of kernels that cast packed sequences."""
    return {"PACKED": 1} if packed else {}


_THREADS = 512
_BYTES_PER_BLOCK = _THREADS * 2 * 16
_kernels = {
    (x, q, packed): launch.function("cast", "cast", {"WIDE": WIDE[x], "FP8": FP8[q]} | packed_macro(packed))
    for packed, x, q in itertools.product((False, True), WIDE, FP8)
}
_leading = [launch.leads(one) for (_, _, packed), one in _kernels.items() if not packed]
CONFIGURATIONS = [one.configuration for one in (*list(_kernels.values())[: len(_leading)], *_leading)]
CONFIGURATIONS += [one.configuration for (_, _, packed), one in _kernels.items() if packed]


def scaling_pointers(scale: torch.Tensor, amax_history: torch.Tensor | None, column: int) -> tuple[int, int]:
    """Addresses of `scale[column]` and of the staging entry `amax_history[0, column]`; 0 without a history."""
    return scale.data_ptr() + 4 * column * scale.stride(0), amax_pointer(amax_history, column)


def run(
    out: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    *scaling: *Scaling,
    places: tuple[torch.Tensor | None, ...] = (None, None),
) -> None:
    """Launch the kernel on checked arguments: it writes q and scale_inv to `out`.

    `places`: lengths and starts of packed sequences.
    """
    q, scale_inv = out
    scale, amax_history, column, dtype = scaling
    x = aligned(x)
    pointers = (x.data_ptr(), *scaling_pointers(scale, amax_history, column), q.data_ptr(), scale_inv.data_ptr())
    # At least one block: it writes scale_inv.
    grid = (max(1, -(-x.numel() * x.element_size() // _BYTES_PER_BLOCK)),)
    where = sequence_arguments(*places)
    sizes = (np.int32(x.shape[0]), np.int32(x.shape[1])) if where else ()
    args = (*pointers, np.int64(x.numel()), *where, *sizes)
    kernel = _kernels[x.dtype, dtype, bool(where)]
    launch.launch(kernel if where else launch.leading(kernel), grid, (_THREADS,), args, device=x.device.index)


def sequence_arguments(lengths: torch.Tensor | None, starts: torch.Tensor | None) -> tuple[Any, ...]:
    """The last arguments of kernels that cast packed sequences: where they lie, and how many there are."""
    if lengths is None or starts is None:
        return ()
    return lengths.data_ptr(), starts.data_ptr(), np.int32(lengths.shape[0])


@on_cuda
def cast(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[rows, cols]`, `scale` fp32 `[columns]` -> (q `[rows, cols]` of `dtype`, scale_inv fp32 `[1]`)."""
    out = outputs(x, scale, amax_history, column, dtype, lengths, starts)
    run(out, x, scale, amax_history, column, dtype, places=(lengths, starts))
    return out
