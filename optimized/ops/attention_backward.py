"""`twin::attention_backward` on the GPU: kernels/attention_backward.cu.

Semantics: `reference.ops.attention_backward`.
"""

import functools
import itertools

import torch

from optimized import launch
from optimized.ops.attention import (
    FORMATS,
    THREADS,
    arguments,
    check_grid,
    loadable,
    shape_defines,
    tensor_map,
)
from reference.ops.attention import BLOCK, Options
from reference.ops.attention_backward import outputs
from reference.ops.dropout import threshold
from reference.ops.library import on_cuda

_STREAM_ROWS = 64  # kStreamRows of the kernel
_DOT_ROWS = 8  # queries of a block of `dots`


def defines(dtype: torch.dtype, d: int, dropout: bool, dq: bool) -> dict[str, int | str]:
    """The macros of one configuration of kernels/attention_backward.cu."""
    return {"FORMAT": FORMATS[dtype], "DROPOUT": int(dropout), "DQ": int(dq), **shape_defines(d)}


CONFIGURATIONS: list[tuple[str, dict[str, int | str]]] = [
    ("attention_backward", defines(*case))
    for case in itertools.product(FORMATS, (64, 128, 256), (False, True), (False, True))
]


@functools.cache
def _kernel(dtype: torch.dtype, capacity: int, dropout: bool, dq: bool) -> launch.Kernel:
    macros = defines(dtype, capacity, dropout, dq)
    chunks, stages = int(macros["D_CHUNKS"]), int(macros["STAGES"])
    shared = 2 * chunks * BLOCK * 128 + stages * 2 * chunks * _STREAM_ROWS * 128 + 8 + 16 * stages
    return launch.function("attention_backward", "attention_backward", macros, shared)


@functools.cache
def _dots(dtype: torch.dtype) -> launch.Kernel:
    return launch.function("attention_backward", "dots", defines(dtype, 64, False, True))


@on_cuda
def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    *options: *Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> (dq like q, dk like k, dv like v); arguments as in `reference.ops.attention_backward`."""
    dq, dk, dv = outputs(grad, q, k, v, out, m, inv, *options)
    check_grid("twin::attention_backward", q)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    b, h, sq, d = q.shape
    heads, skv = k.shape[1:3]
    grad, q, k, v, out = (loadable(x) for x in (grad, q, k, v, out))
    padded = -(-sq // BLOCK) * BLOCK
    softmax = torch.empty((b * h, padded, 2), dtype=torch.float32, device=q.device)
    dots = torch.empty((b * h, padded), dtype=torch.float32, device=q.device)
    device = q.device.index

    def of(written: torch.Tensor) -> object:
        return launch.by_value(arguments(q, k, written, *options))

    args = [
        of(out),
        grad.data_ptr(),
        out.data_ptr(),
        *grad.stride()[:3],
        m.data_ptr(),
        inv.data_ptr(),
        softmax.data_ptr(),
        dots.data_ptr(),
    ]
    launch.launch(_dots(q.dtype), (padded // _DOT_ROWS, b * h), (32 * _DOT_ROWS,), args, device=device)

    capacity = 64 if d <= 64 else 128 if d <= 128 else 256
    columns = -(-d // (64 if d <= 64 else 128))
    fixed = {name: tensor_map(x, BLOCK).argument for name, x in (("q", q), ("grad", grad), ("k", k), ("v", v))}
    streamed = {
        name: tensor_map(x, _STREAM_ROWS).argument for name, x in (("q", q), ("grad", grad), ("k", k), ("v", v))
    }
    # One stride serves both results of a launch.
    dv_written = dv if dv.stride() == dk.stride() else torch.empty_like(dk)
    for is_dq, x, y, written, rows, count in (
        (False, "kv", ("q", "grad"), (dv_written, dk), skv, heads),
        (True, ("q", "grad"), "kv", (dq, dq), sq, h),
    ):
        kernel = _kernel(q.dtype, capacity, threshold(options[3]) > 0, is_dq)
        args = [fixed[x[0]], fixed[x[1]], streamed[y[0]], streamed[y[1]], of(written[1])]
        args += [tensor.data_ptr() for tensor in (softmax, dots, *written)]
        grid = (-(-rows // BLOCK), b * count, columns)
        launch.launch(kernel, grid, (THREADS,), args, kernel.max_dynamic_smem, device=device)
    if dv_written is not dv:
        dv.copy_(dv_written)
    return dq, dk, dv
