"""`twin::norm_backward` on the GPU, LayerNorm and RMSNorm: kernels/norms/norm_backward.cu for dx and for sums
over blocks of rows; then kernels/norms/norm_total.cu, which adds up those sums. And both by themselves:
`twin::norm_backward_part`, `twin::norm_total`.
Semantics, and the order of the sums: `reference.ops.norms.norm`, `reference.ops.norms.norm_backward_part`.
"""

import functools
import itertools
from typing import Any

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.casts.amax import WIDE, aligned, pointer
from optimized.ops.norms.norm import KIND, Defines, whole
from reference.ops.library import on_cuda
from reference.ops.norms.norm import KINDS, block_rows, chains, norm_backward_outputs
from reference.ops.norms.norm_backward_part import outputs, total_outputs

_SHARED = {False: 200 * 1024, True: 224 * 1024}  # bytes at most, by `is_long`
_ANY_THREADS = 256
_TOTAL_COLUMNS = 32
_TOTAL_THREADS = 512

# ROW_WARPS and VECTORS, which hold 256 * ROW_WARPS * VECTORS elements of a row.
SHAPES = ((4, 1), (8, 1), (12, 1), (16, 1), (10, 2), (12, 2), (16, 2), (12, 4), (16, 4))


def backward_shape(x: torch.dtype, hidden: int) -> tuple[int, int] | None:
    """The first of `SHAPES` that holds such a row; None if only the kernel for any row takes it."""
    # Longer rows of fp32 do not fit in shared memory.
    if hidden % 8 or (x == torch.float32 and hidden > 8192):
        return None
    return next(((warps, vectors) for warps, vectors in SHAPES if hidden <= 256 * warps * vectors), None)


def is_long(x: torch.dtype, kind: str, shape: tuple[int, int]) -> bool:
    """Whether rows are read twice from shared memory: those too long for registers, and some that are faster so
    (docs/log/norm.md).
    """
    _, vectors = shape
    return vectors == 4 or (shape == (10, 2) and kind == "layernorm" and x != torch.float32)


def defines(x: torch.dtype, kind: str, shape: tuple[int, int], hidden: int) -> Defines:
    """Macros of the kernel for rows of `hidden` elements."""
    warps, vectors = shape
    width = 256 * warps * vectors
    macros: Defines = {"WIDE": WIDE[x], "KIND": KIND[kind], "CHAINS": chains(width)}
    macros |= {"ROW_WARPS": warps, "VECTORS": vectors, "WHOLE": whole(x, width, hidden)}
    if is_long(x, kind, shape):
        return {**macros, "STAGES": 3, "BLOCKS": 2 if vectors == 2 else 1, "KEPT": int(warps < 16)}
    deep = kind == "layernorm" and shape == (12, 2) and x != torch.float32
    two = vectors == 1 or (shape == (10, 2) and macros["WHOLE"])
    return {**macros, "STAGES": 3 if deep else 2, "BLOCKS": 2 if two else 1, "KEPT": 2}


@functools.cache
def kernel(x: torch.dtype, kind: str, shape: tuple[int, int], hidden: int) -> tuple[launch.Kernel, int, int]:
    """The kernel for rows of that shape, with the macros of `defines`; its threads and bytes of shared memory."""
    long, macros = is_long(x, kind, shape), defines(x, kind, shape, hidden)
    warps, vectors = shape
    threads, stages = 32 * warps * int(macros["CHAINS"]), int(macros["STAGES"])
    # Each stage holds rows of the gradient, x and the residual; of long rows there is one row of the residual.
    rows = 2 * stages + 1 if long else 3 * stages
    shared = rows * threads * vectors * 8 * x.itemsize
    return launch.function("norm_backward", "norm_backward", macros, _SHARED[long]), threads, shared


@functools.cache
def _any_kernel(x: torch.dtype, kind: str, name: str) -> launch.Kernel:
    return launch.function("norm_backward", name, {"WIDE": WIDE[x], "KIND": KIND[kind]})


_total = {x: launch.function("norm_total", "norm_total", {"WIDE": WIDE[x]}) for x in WIDE}
# The sums may be read again.
_total_of_parts = {x: launch.function("norm_total", "norm_total", {"WIDE": WIDE[x], "KEEPS": 1}) for x in WIDE}
CONFIGURATIONS = [
    *(one.configuration for one in (*_total.values(), *_total_of_parts.values())),
    *(_any_kernel(*case, "rows").configuration for case in itertools.product(WIDE, KINDS)),
    *(
        kernel(x, kind, shape, 256 * shape[0] * shape[1] - short)[0].configuration
        for x, kind, shape, short in itertools.product(WIDE, KINDS, SHAPES, (0, 8))
        if backward_shape(x, 256 * shape[0] * shape[1]) and (short or x != torch.float32)
    ),
]


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
    rows, hidden = x.shape
    sums, count = 2 if kind == "layernorm" else 1, block_rows(rows)
    blocks = -(-rows // count)
    partial = torch.empty((sums, blocks, hidden), dtype=torch.float32, device=x.device)
    _launch_blocks(dx, partial, grad, x, weight, mean, rstd, zero_centered, kind, residual_grad, count)
    total = (partial.data_ptr(), dweight.data_ptr(), dbias.data_ptr(), np.int32(blocks), np.int32(hidden))
    grid = (-(-hidden // _TOTAL_COLUMNS), sums)
    launch.launch(_total[weight.dtype], grid, (_TOTAL_THREADS,), total, device=x.device.index, early=True)
    return dx, dweight, dbias


@on_cuda
def norm_backward_part(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool,
    kind: str,
    residual_grad: torch.Tensor | None,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as of `norm_backward` -> (dx, fp32 sums `[1 or 2, blocks, hidden]` of blocks of `count` rows)."""
    given = (grad, x, weight, mean, rstd, zero_centered, kind, residual_grad)
    dx, partial = outputs(*given, count)
    _launch_blocks(dx, partial, *given, count)
    return dx, partial


@on_cuda
def norm_total(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sums of at most 256 blocks, fp32 `[blocks, hidden]` -> their sum `[hidden]` of a dtype."""
    out = total_outputs(blocks, dtype)
    if out.numel():
        args = (blocks.data_ptr(), out.data_ptr(), 0, np.int32(len(blocks)), np.int32(len(out)))
        grid = (-(-len(out) // _TOTAL_COLUMNS), 1)
        launch.launch(_total_of_parts[dtype], grid, (_TOTAL_THREADS,), args, device=out.device.index, early=True)
    return out


def _launch_blocks(
    dx: torch.Tensor,
    partial: torch.Tensor,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool,
    kind: str,
    residual_grad: torch.Tensor | None,
    count: int,
) -> None:
    """Write dx, and to `partial` the sums of blocks of `count` rows."""
    grad, x, weight, residual_grad = aligned(grad), aligned(x), aligned(weight), aligned(residual_grad)
    (rows, hidden), blocks = x.shape, partial.shape[1]
    both, statistics = (grad.data_ptr(), x.data_ptr()), (mean.data_ptr(), rstd.data_ptr())
    by_row = (*both, weight.data_ptr(), *statistics, pointer(residual_grad), dx.data_ptr())
    sizes = (np.int32(rows), np.int32(hidden), np.int32(count))
    options = (np.int32(zero_centered), np.int32(WIDE[weight.dtype]))
    index = x.device.index
    shape = backward_shape(x.dtype, hidden)
    if rows and shape is not None:
        configured, threads, shared = kernel(x.dtype, kind, shape, hidden)
        args: tuple[Any, ...] = (*by_row, partial.data_ptr(), *sizes, *options)
        launch.launch(configured, (blocks,), (threads,), args, smem=shared, device=index)
    elif rows:
        args = (*by_row, np.int32(hidden), *options)
        launch.launch(_any_kernel(x.dtype, kind, "rows"), (rows,), (_ANY_THREADS,), args, device=index)
        args = (*both, *statistics, partial.data_ptr(), *sizes, np.int32(chains(hidden)))
        columns = (blocks * -(-hidden // _ANY_THREADS),)
        launch.launch(_any_kernel(x.dtype, kind, "columns"), columns, (_ANY_THREADS,), args, device=index)
