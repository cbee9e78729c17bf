"""`twin::cast_stats` and `twin::cast_stats_blocks` on the GPU: kernels/casts/cast_stats.cu and
cast_stats_blocks.cu. Semantics: `reference.ops.casts.cast_stats`.
"""

import itertools

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, pointer
from reference.ops.casts.cast_stats import CHAINS, PIECE, Two, blocks_outputs, outputs
from reference.ops.library import on_cuda

_FP8 = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, None: 2}  # None: only x is read
_kernels = {
    (wide, fp8): launch.function("cast_stats", "cast_stats", {"WIDE": WIDE[wide], "FP8": _FP8[fp8]})
    for wide, fp8 in itertools.product(WIDE, _FP8)
}
_of_blocks = {
    (wide, fp8): launch.function("cast_stats_blocks", "cast_stats_blocks", {"WIDE": WIDE[wide], "FP8": _FP8[fp8]})
    for wide, fp8 in _kernels
    if fp8 is not None
}
CONFIGURATIONS = [one.configuration for one in (*_kernels.values(), *_of_blocks.values())]
_total = launch.function("cast_stats", "total", {"WIDE": 0, "FP8": 0})


def _run(kernel: launch.Kernel, found: Two, x: torch.Tensor, given: tuple[int, ...], more: tuple[np.int32, ...]) -> Two:
    """`given`: addresses of q and scale_inv, or 0; `more`: arguments of blocks."""
    counts, sums = found
    pieces, device = -(-x.numel() // PIECE), x.device.index
    piece_counts, piece_sums = (like.new_empty((pieces, len(like))) for like in found)
    partial = [piece_counts.data_ptr(), piece_sums.data_ptr()]
    if pieces:
        args = [x.data_ptr(), *given, *partial, np.int64(x.numel()), *more]
        launch.launch(kernel, (pieces,), (CHAINS,), args, device=device)
    args = [*partial, counts.data_ptr(), sums.data_ptr(), np.int64(pieces)]
    launch.launch(_total, (1,), (CHAINS,), args, device=device)
    return found


@on_cuda
def cast_stats(x: torch.Tensor, q: torch.Tensor | None, scale_inv: torch.Tensor | None) -> Two:
    """`x` and its codes `q` `[rows, cols]`, `scale_inv` fp32 `[1]` or `[rows]` -> int64 `[4]`, float64 `[3]`."""
    found = outputs(x, q, scale_inv)
    if q is not None and scale_inv is not None and scale_inv.numel() > 1:  # of rows: blocks as wide as the matrix
        return _run_blocks(found, x, q, scale_inv, 0, False)
    kernel = _kernels[x.dtype, None if q is None else q.dtype]
    return _run(kernel, found, x, (pointer(q), pointer(scale_inv)), ())


@on_cuda
def cast_stats_blocks(x: torch.Tensor, q: torch.Tensor, scale_inv: torch.Tensor, square: bool) -> Two:
    """`cast_stats` of what `twin::cast_blocks` made."""
    found = blocks_outputs(x, q, scale_inv, square)
    return _run_blocks(found, x, q, scale_inv, scale_inv.stride(0), square)


def _run_blocks(
    found: Two, x: torch.Tensor, q: torch.Tensor, scale_inv: torch.Tensor, stride: int, square: bool
) -> Two:
    """`stride`: how far the scales of neighbouring blocks of a row are apart."""
    more = (np.int32(x.shape[1]), np.int32(stride), np.int32(square))
    return _run(_of_blocks[x.dtype, q.dtype], found, x, (q.data_ptr(), scale_inv.data_ptr()), more)
