"""LayerNorm and RMSNorm on the GPU: `twin::norm`, `twin::norm_cast_transpose`, `twin::norm_backward`.

Kernels: norm.cu and norm_any.cu; norm_cast_transpose.cu; norm_backward.cu, norm_backward_any.cu and norm_total.cu.
Semantics, and the order of the sums: `reference.ops.norm`.
"""

import functools
import itertools

import numpy as np
import torch

from optimized import launch
from optimized.ops import cast_transpose
from optimized.ops.amax import WIDE, aligned, amax_pointer
from optimized.ops.cast import FP8, scale_pointer
from reference.ops.cast import check_cast
from reference.ops.cast_transpose import ceil16
from reference.ops.library import LIBRARY
from reference.ops.norm import KINDS, block_rows, chains, check_backward, check_norm, check_out_dtype

Defines = dict[str, int | str]

_KIND = {kind: number for number, kind in enumerate(KINDS)}
_WARP_ELEMENTS = 1024  # of a row
_TILE_SHARED = 225 * 1024  # bytes, at most
_ROWS_SHARED = 8 * 16 * _WARP_ELEMENTS
_ANY_THREADS = 256
_SKEW = 64
_BACKWARD_THREADS = 512
_BACKWARD_SHARED = 200 * 1024  # bytes, at most
_TOTAL_COLUMNS = 32
_TOTAL_THREADS = 512


def row_warps(hidden: int) -> int | None:
    """How many warps hold such a row in norm.cu; None if it is too long, or not whole vectors of 8."""
    return None if hidden % 8 else next((n for n in (1, 2, 4, 8, 16) if hidden <= n * _WARP_ELEMENTS), None)


def rows_defines(x: torch.dtype, kind: str, warps: int, blocks: int | None = None) -> Defines:
    """Macros of norm.cu; `blocks` is what tuning varied."""
    if blocks is None:
        # Of 4096 elements six would fit, but their parameters would leave L1 no room for the loads in flight.
        blocks = {1: 6, 2: 6, 4: 4, 8: 2, 16: 1}[warps]
        if x == torch.float32:
            blocks = min(blocks, 4)
    return {"WIDE": WIDE[x], "KIND": _KIND[kind], "ROW_WARPS": warps, "BLOCKS": blocks}


def _tile_shared(tile_rows: int, hidden: int) -> int:
    """Bytes of shared memory of norm_cast_transpose.cu: codes, gamma and beta."""
    return tile_rows * hidden + _SKEW + 8 * hidden


def tile_shape(hidden: int) -> tuple[int, int] | None:
    """(ROW_WARPS, TILE_ROWS) of norm_cast_transpose.cu for such rows; None if shared memory does not hold 16."""
    warps = row_warps(hidden)
    for rows in (32, 16):
        if warps is not None and _tile_shared(rows, hidden) <= _TILE_SHARED:
            return warps, rows
    return None


def tile_defines(
    x: torch.dtype,
    kind: str,
    q: torch.dtype,
    shape: tuple[int, int],
    warps: int | None = None,
    blocks: int | None = None,
) -> Defines:
    """Macros of norm_cast_transpose.cu for a `tile_shape`; `warps` and `blocks` are what tuning varied."""
    return {
        "WIDE": WIDE[x],
        "KIND": _KIND[kind],
        "FP8": FP8[q],
        "ROW_WARPS": shape[0],
        "TILE_ROWS": shape[1],
        "TILE_WARPS": warps or (8 if shape[0] <= 2 else 16),
        "BLOCKS": blocks or (2 if shape[0] <= 2 else 1),
    }


def backward_shape(hidden: int) -> tuple[int, int] | None:
    """(ROW_WARPS, VECTORS) of norm_backward.cu for such rows; None if it does not take them."""
    if hidden % 8 or hidden > 8192:
        return None
    if hidden > 4096:
        return 16, 2
    return 16 // chains(hidden), 1


def backward_defines(x: torch.dtype, kind: str, row_warps: int, vectors: int, stages: int = 2) -> Defines:
    """Macros of norm_backward.cu; `stages` is what tuning varied."""
    return {
        "WIDE": WIDE[x],
        "KIND": _KIND[kind],
        "ROW_WARPS": row_warps,
        "VECTORS": vectors,
        "STAGES": stages,
        "BLOCKS": 2 if vectors == 1 else 1,
    }


def _configurations() -> list[tuple[str, Defines]]:
    found: list[tuple[str, Defines]] = [("norm_total", {"WIDE": wide}) for wide in WIDE.values()]
    for x, kind in itertools.product(WIDE, KINDS):
        base: Defines = {"WIDE": WIDE[x], "KIND": _KIND[kind]}
        found.append(("norm_backward_any", base))
        found += [("norm_any", {**base, "VECTOR": vector}) for vector in (0, 1)]
        found += [
            ("norm_backward", backward_defines(x, kind, warps, vectors))
            for warps, vectors in ((4, 1), (8, 1), (16, 1), (16, 2))
        ]
        found += [("norm", rows_defines(x, kind, warps)) for warps in (1, 2, 4, 8, 16)]
        shapes = ((1, 32), (2, 32), (4, 32), (8, 32), (8, 16), (16, 16))
        found += [("norm_cast_transpose", tile_defines(x, kind, q, shape)) for q in FP8 for shape in shapes]
    return found


CONFIGURATIONS: list[tuple[str, Defines]] = _configurations()


_total = {dtype: launch.function("norm_total", "norm_total", {"WIDE": wide}) for dtype, wide in WIDE.items()}


@functools.cache
def rows_kernel(x: torch.dtype, kind: str, warps: int, blocks: int | None = None) -> launch.Kernel:
    """norm.cu with the macros of `rows_defines`."""
    return launch.function("norm", "norm_rows", rows_defines(x, kind, warps, blocks), _ROWS_SHARED)


@functools.cache
def _any_kernel(x: torch.dtype, kind: str, vector: int) -> launch.Kernel:
    return launch.function("norm_any", "norm_any", {"WIDE": WIDE[x], "KIND": _KIND[kind], "VECTOR": vector})


@functools.cache
def tile_kernel(
    x: torch.dtype,
    kind: str,
    q: torch.dtype,
    shape: tuple[int, int],
    warps: int | None = None,
    blocks: int | None = None,
) -> launch.Kernel:
    """norm_cast_transpose.cu with the macros of `tile_defines`."""
    macros = tile_defines(x, kind, q, shape, warps, blocks)
    return launch.function("norm_cast_transpose", "norm_cast_transpose", macros, _TILE_SHARED)


@functools.cache
def backward_kernel(x: torch.dtype, kind: str, row_warps: int, vectors: int, stages: int = 2) -> launch.Kernel:
    """norm_backward.cu with the macros of `backward_defines`."""
    macros = backward_defines(x, kind, row_warps, vectors, stages)
    return launch.function("norm_backward", "norm_backward", macros, _BACKWARD_SHARED)


@functools.cache
def _backward_any_kernel(x: torch.dtype, kind: str, name: str) -> launch.Kernel:
    return launch.function("norm_backward_any", name, {"WIDE": WIDE[x], "KIND": _KIND[kind]})


def _statistics(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0]
    mean = torch.empty(rows if kind == "layernorm" else 0, dtype=torch.float32, device=x.device)
    return mean, torch.empty(rows, dtype=torch.float32, device=x.device)


def _parameters(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    return aligned(weight), None if bias is None else aligned(bias)


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _normalize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = aligned(x)
    weight, bias = _parameters(weight, bias)
    rows, hidden = x.shape
    y = torch.empty((rows, hidden), dtype=out_dtype, device=x.device)
    mean, rstd = _statistics(x, kind)
    if rows == 0:
        return y, mean, rstd
    args = [
        x.data_ptr(),
        weight.data_ptr(),
        _pointer(bias),
        y.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        np.int32(rows),
        np.int32(hidden),
        np.float32(eps),
        np.int32(zero_centered),
        np.int32(WIDE[weight.dtype]),
        np.int32(WIDE[out_dtype]),
    ]
    warps = row_warps(hidden)
    if warps is not None:
        kernel = rows_kernel(x.dtype, kind, warps)
        in_block = max(1, 4 // warps)  # rows of a block of norm.cu
        # Persistent blocks, as many as run at once.
        at_once = int(kernel.defines["BLOCKS"]) * launch.processors(x.device.index)
        grid, threads = min(-(-rows // in_block), at_once), 32 * warps * in_block
        launch.launch(kernel, (grid,), (threads,), args, smem=8 * hidden, device=x.device.index)
    else:
        kernel = _any_kernel(x.dtype, kind, int(hidden % 8 == 0))
        launch.launch(kernel, (rows,), (_ANY_THREADS,), args, device=x.device.index)
    return y, mean, rstd


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`x` `[rows, hidden]` -> (y of `out_dtype`, mean fp32 `[rows]` (rmsnorm: `[0]`), rstd fp32 `[rows]`)."""
    check_norm("twin::norm", x, weight, bias, eps, kind)
    check_out_dtype("twin::norm", out_dtype)
    return _normalize(x, weight, bias, eps, zero_centered, kind, out_dtype)


def run_tile(
    kernel: launch.Kernel,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch one configuration of norm_cast_transpose.cu on checked arguments."""
    x = aligned(x)
    weight, bias = _parameters(weight, bias)
    rows, hidden = x.shape
    q = torch.empty((rows, hidden), dtype=dtype, device=x.device)
    q_t = torch.empty((hidden, ceil16(rows)), dtype=dtype, device=x.device)
    scale_inv = torch.empty(1, dtype=torch.float32, device=x.device)
    mean, rstd = _statistics(x, kind)
    args = [
        x.data_ptr(),
        weight.data_ptr(),
        _pointer(bias),
        scale_pointer(scale, column),
        amax_pointer(amax_history, column),
        q.data_ptr(),
        q_t.data_ptr(),
        scale_inv.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        np.int32(rows),
        np.int32(hidden),
        np.float32(eps),
        np.int32(zero_centered),
        np.int32(WIDE[weight.dtype]),
    ]
    tile_rows = int(kernel.defines["TILE_ROWS"])
    shared = _tile_shared(tile_rows, hidden)
    # Persistent blocks, as many as run at once. At least one: it writes scale_inv.
    at_once = int(kernel.defines["BLOCKS"]) * launch.processors(x.device.index)
    blocks = max(1, min(-(-rows // tile_rows), at_once))
    threads = 32 * int(kernel.defines["TILE_WARPS"])
    launch.launch(kernel, (blocks,), (threads,), args, smem=shared, device=x.device.index)
    return q, q_t, scale_inv, mean, rstd


def norm_cast_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`x` `[rows, hidden]` -> (q, q_t `[hidden, ceil16(rows)]`, scale_inv fp32 `[1]`, mean, rstd)."""
    check_norm("twin::norm_cast_transpose", x, weight, bias, eps, kind)
    check_cast("twin::norm_cast_transpose", x, scale, amax_history, column, dtype)
    shape = tile_shape(x.shape[1])
    if shape is not None:
        kernel = tile_kernel(x.dtype, kind, dtype, shape)
        return run_tile(kernel, x, weight, bias, eps, zero_centered, kind, scale, amax_history, column, dtype)
    # Rows that do not fit: fp32 y goes through memory. The same bits, three times the traffic.
    y, mean, rstd = _normalize(x, weight, bias, eps, zero_centered, kind, torch.float32)
    cast = cast_transpose.cast_transpose(y, scale, amax_history, column, dtype)
    return (*cast, mean, rstd)


def _backward_rows(
    kernel: launch.Kernel,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    statistics: tuple[torch.Tensor, torch.Tensor],
    zero_centered: bool,
    residual_grad: torch.Tensor | None,
    dx: torch.Tensor,
    partial: torch.Tensor,
) -> None:
    """Launch norm_backward.cu: dx, and the columns' sums over blocks of rows."""
    rows, hidden = x.shape
    args = [
        grad.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        statistics[0].data_ptr(),
        statistics[1].data_ptr(),
        _pointer(residual_grad),
        dx.data_ptr(),
        partial.data_ptr(),
        np.int32(rows),
        np.int32(hidden),
        np.int32(block_rows(rows)),
        np.int32(zero_centered),
        np.int32(WIDE[weight.dtype]),
    ]
    stage = _BACKWARD_THREADS * 3 * int(kernel.defines["VECTORS"]) * 8 * x.element_size()
    shared = int(kernel.defines["STAGES"]) * stage
    launch.launch(kernel, (partial.shape[1],), (_BACKWARD_THREADS,), args, smem=shared, device=x.device.index)


def _backward_any(
    kind: str,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    statistics: tuple[torch.Tensor, torch.Tensor],
    zero_centered: bool,
    residual_grad: torch.Tensor | None,
    dx: torch.Tensor,
    partial: torch.Tensor,
) -> None:
    """Launch norm_backward_any.cu: the same, for any hidden."""
    rows, hidden = x.shape
    mean, rstd = statistics
    by_row, by_column = (_backward_any_kernel(x.dtype, kind, name) for name in ("rows", "columns"))
    args = [
        grad.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        _pointer(residual_grad),
        dx.data_ptr(),
        np.int32(hidden),
        np.int32(zero_centered),
        np.int32(WIDE[weight.dtype]),
    ]
    launch.launch(by_row, (rows,), (_ANY_THREADS,), args, device=x.device.index)
    args = [
        grad.data_ptr(),
        x.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        partial.data_ptr(),
        np.int32(rows),
        np.int32(hidden),
        np.int32(block_rows(rows)),
        np.int32(chains(hidden)),
    ]
    grid = (partial.shape[1] * -(-hidden // _ANY_THREADS),)
    launch.launch(by_column, grid, (_ANY_THREADS,), args, device=x.device.index)


def norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool,
    kind: str,
    residual_grad: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`grad`, `x` `[rows, hidden]` of one dtype -> (dx of it, dweight, dbias `[hidden]` (rmsnorm: `[0]`))."""
    check_backward("twin::norm_backward", grad, x, weight, mean, rstd, kind, residual_grad)
    grad, x, weight = aligned(grad), aligned(x), aligned(weight)
    residual_grad = None if residual_grad is None else aligned(residual_grad)
    rows, hidden = x.shape
    dx = torch.empty_like(x)
    sums = 2 if kind == "layernorm" else 1
    blocks = -(-rows // block_rows(rows))
    partial = torch.empty((sums, blocks, hidden), dtype=torch.float32, device=x.device)
    shape = backward_shape(hidden)
    if rows and shape is not None:
        _backward_rows(
            backward_kernel(x.dtype, kind, *shape),
            grad,
            x,
            weight,
            (mean, rstd),
            zero_centered,
            residual_grad,
            dx,
            partial,
        )
    elif rows:
        _backward_any(kind, grad, x, weight, (mean, rstd), zero_centered, residual_grad, dx, partial)
    dweight = torch.empty_like(weight)
    dbias = torch.empty(hidden if kind == "layernorm" else 0, dtype=weight.dtype, device=x.device)
    args = [partial.data_ptr(), dweight.data_ptr(), dbias.data_ptr(), np.int32(blocks), np.int32(hidden)]
    grid = (-(-hidden // _TOTAL_COLUMNS), sums)
    launch.launch(_total[weight.dtype], grid, (_TOTAL_THREADS,), args, device=x.device.index)
    return dx, dweight, dbias


LIBRARY.impl("norm", norm, "CUDA")
LIBRARY.impl("norm_cast_transpose", norm_cast_transpose, "CUDA")
LIBRARY.impl("norm_backward", norm_backward, "CUDA")
