"""`twin::cast_stats` on the GPU: kernels/casts/cast_stats.cu. Semantics: `reference.ops.casts.cast_stats`."""

import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, pointer
from reference.ops.casts.cast_stats import CHAINS, PIECE, Two, outputs
from reference.ops.library import on_cuda

_FP8 = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, None: 2}  # None: only x is read
_kernels = {
    (wide, fp8): launch.function("cast_stats", "cast_stats", {"WIDE": WIDE[wide], "FP8": _FP8[fp8]})
    for wide, fp8 in itertools.product(WIDE, _FP8)
}
CONFIGURATIONS = [one.configuration for one in _kernels.values()]
_total = launch.function("cast_stats", "total", {"WIDE": 0, "FP8": 0})


@on_cuda
def cast_stats(x: torch.Tensor, q: torch.Tensor | None, scale_inv: torch.Tensor | None) -> Two:
    """`x` and its codes `q` `[rows, cols]`, `scale_inv` fp32 `[1]` -> int64 `[4]`, float64 `[3]`."""
    counts, sums = outputs(x, q, scale_inv)
    pieces, device = -(-x.numel() // PIECE), x.device.index
    piece_counts, piece_sums = (like.new_empty((pieces, len(like))) for like in (counts, sums))
    partial = [piece_counts.data_ptr(), piece_sums.data_ptr()]
    if pieces:
        args = [x.data_ptr(), pointer(q), pointer(scale_inv), *partial, np.int64(x.numel())]
        kernel = _kernels[x.dtype, None if q is None else q.dtype]
        launch.launch(kernel, (pieces,), (CHAINS,), args, device=device)
    args = [*partial, counts.data_ptr(), sums.data_ptr(), np.int64(pieces)]
    launch.launch(_total, (1,), (CHAINS,), args, device=device)
    return counts, sums
