"""The backward of LayerNorm and RMSNorm on the GPU: `twin::norm_backward`.

Kernels: norm_backward.cu, norm_backward_long.cu or norm_backward_any.cu, then norm_total.cu. Semantics, and the order
of the sums: `reference.ops.norm`.
"""

import functools
import itertools

import numpy as np
import torch

from optimized import launch
from optimized.ops.amax import WIDE, aligned
from optimized.ops.norm import KIND, Defines, pointer, whole
from reference.ops.library import on_cuda
from reference.ops.norm import KINDS, block_rows, chains, norm_backward_outputs

_SHARED = {"norm_backward": 200 * 1024, "norm_backward_long": 224 * 1024}  # bytes, at most
_ANY_THREADS = 256
_TOTAL_COLUMNS = 32
_TOTAL_THREADS = 512

# (ROW_WARPS, VECTORS): 256 * ROW_WARPS * VECTORS elements of a row.
SHAPES = ((4, 1), (8, 1), (12, 1), (16, 1), (10, 2), (12, 2), (16, 2), (12, 4), (16, 4))


def backward_shape(x: torch.dtype, hidden: int) -> tuple[int, int] | None:
    """The first of `SHAPES` that holds such a row; None if only norm_backward_any.cu takes it."""
    # The rows of more fp32 elements do not fit in shared memory.
    if hidden % 8 or (x == torch.float32 and hidden > 8192):
        return None
    return next(((warps, vectors) for warps, vectors in SHAPES if hidden <= 256 * warps * vectors), None)


def source(x: torch.dtype, kind: str, shape: tuple[int, int]) -> str:
    """Which of the two kernels takes rows of that shape: the faster one, where both could (docs/log/norm.md)."""
    _, vectors = shape
    long = vectors == 4 or (shape == (10, 2) and kind == "layernorm" and x != torch.float32)
    return "norm_backward_long" if long else "norm_backward"


def defines(x: torch.dtype, kind: str, shape: tuple[int, int], hidden: int) -> Defines:
    """Macros of either kernel for rows of `hidden` elements."""
    warps, vectors = shape
    width = 256 * warps * vectors
    macros: Defines = {
        "WIDE": WIDE[x],
        "KIND": KIND[kind],
        "CHAINS": chains(width),
        "ROW_WARPS": warps,
        "VECTORS": vectors,
        "WHOLE": whole(x, width, hidden),
    }
    if source(x, kind, shape) == "norm_backward_long":
        return {**macros, "STAGES": 3, "BLOCKS": 2 if vectors == 2 else 1, "KEPT": int(warps < 16)}
    deep = kind == "layernorm" and shape == (12, 2) and x != torch.float32
    two = vectors == 1 or (shape == (10, 2) and macros["WHOLE"])
    return {**macros, "STAGES": 3 if deep else 2, "BLOCKS": 2 if two else 1}


def _any_defines(x: torch.dtype, kind: str) -> Defines:
    return {"WIDE": WIDE[x], "KIND": KIND[kind]}


def _total_defines(x: torch.dtype) -> Defines:
    return {"WIDE": WIDE[x]}


CONFIGURATIONS: list[tuple[str, Defines]] = [
    *(("norm_total", _total_defines(x)) for x in WIDE),
    *(("norm_backward_any", _any_defines(*choice)) for choice in itertools.product(WIDE, KINDS)),
    *(
        (source(x, kind, shape), defines(x, kind, shape, 256 * shape[0] * shape[1] - short))
        for x, kind, shape, short in itertools.product(WIDE, KINDS, SHAPES, (0, 8))
        if backward_shape(x, 256 * shape[0] * shape[1]) and (short or x != torch.float32)
    ),
]
_total = {x: launch.function("norm_total", "norm_total", _total_defines(x)) for x in WIDE}


@functools.cache
def kernel(x: torch.dtype, kind: str, shape: tuple[int, int], hidden: int) -> launch.Kernel:
    """norm_backward.cu or norm_backward_long.cu, with the macros of `defines`."""
    file = source(x, kind, shape)
    return launch.function(file, "norm_backward", defines(x, kind, shape, hidden), _SHARED[file])


@functools.cache
def _any_kernel(x: torch.dtype, kind: str, name: str) -> launch.Kernel:
    return launch.function("norm_backward_any", name, _any_defines(x, kind))


def _backward_rows(
    configured: launch.Kernel,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    statistics: tuple[torch.Tensor, torch.Tensor],
    zero_centered: bool,
    residual_grad: torch.Tensor | None,
    dx: torch.Tensor,
    partial: torch.Tensor,
) -> None:
    """Launch what `kernel` gave: dx, and the columns' sums over blocks of rows."""
    rows, hidden = x.shape
    args = [
        grad.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        statistics[0].data_ptr(),
        statistics[1].data_ptr(),
        pointer(residual_grad),
        dx.data_ptr(),
        partial.data_ptr(),
        np.int32(rows),
        np.int32(hidden),
        np.int32(block_rows(rows)),
        np.int32(zero_centered),
        np.int32(WIDE[weight.dtype]),
    ]
    chained, warps, vectors, stages = (
        int(configured.defines[name]) for name in ("CHAINS", "ROW_WARPS", "VECTORS", "STAGES")
    )
    threads = 32 * warps * chained
    # Rows of gradient, x and residual at every stage; norm_backward_long.cu has one of the residual.
    tensors = 2 * stages + 1 if configured.kernel == "norm_backward_long" else 3 * stages
    shared = tensors * threads * vectors * 8 * x.element_size()
    launch.launch(configured, (partial.shape[1],), (threads,), args, smem=shared, device=x.device.index)


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
    by_row, by_column = (_any_kernel(x.dtype, kind, name) for name in ("rows", "columns"))
    args = [
        grad.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        pointer(residual_grad),
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


@on_cuda
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
    dx, dweight, dbias = norm_backward_outputs(grad, x, weight, mean, rstd, zero_centered, kind, residual_grad)
    grad, x, weight = aligned(grad), aligned(x), aligned(weight)
    residual_grad = None if residual_grad is None else aligned(residual_grad)
    rows, hidden = x.shape
    sums = 2 if kind == "layernorm" else 1
    blocks = -(-rows // block_rows(rows))
    partial = torch.empty((sums, blocks, hidden), dtype=torch.float32, device=x.device)
    shape = backward_shape(x.dtype, hidden)
    if rows and shape is not None:
        _backward_rows(
            kernel(x.dtype, kind, shape, hidden),
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
    args = [partial.data_ptr(), dweight.data_ptr(), dbias.data_ptr(), np.int32(blocks), np.int32(hidden)]
    grid = (-(-hidden // _TOTAL_COLUMNS), sums)
    launch.launch(_total[weight.dtype], grid, (_TOTAL_THREADS,), args, device=x.device.index, early=True)
    return dx, dweight, dbias
