"""`twin::attention_backward` on the GPU: kernels/attention_backward.cu, and attention_backward_wide.cu for wide heads.

Semantics: `reference.ops.attention_backward`.
"""

import functools
import itertools

import numpy as np
import torch

from optimized import launch
from optimized.ops.attention import (
    FORMATS,
    L2,
    SLACK,
    THREADS,
    arguments,
    capacity,
    check_grid,
    loadable,
    shape_defines,
    tensor_map,
)
from reference.ops.attention import BLOCK, Options
from reference.ops.attention_backward import outputs
from reference.ops.dropout import threshold
from reference.ops.library import on_cuda

NARROW = 128  # channels that one kernel takes whole
_STREAM_ROWS = 64  # kStreamRows of the wide kernel
_DOT_ROWS = 8  # queries of a block of `dots`

# struct Scratch of kernels/attention_backward.cu.
SCRATCH = np.dtype([(name, "u8") for name in ("base", "inv", "dots", "dq", "turns", "ticket")])


def defines(dtype: torch.dtype, d: int, dropout: bool) -> dict[str, int | str]:
    """The macros of one configuration of kernels/attention_backward.cu; d is 64 or 128."""
    wide = d > 64
    return {
        "FORMAT": FORMATS[dtype],
        "DROPOUT": int(dropout),
        **shape_defines(d),
        "QUERIES": 64 if wide else 128,
    }


def wide_defines(dtype: torch.dtype, dropout: bool, dq: bool) -> dict[str, int | str]:
    """The macros of one configuration of kernels/attention_backward_wide.cu."""
    return {"FORMAT": FORMATS[dtype], "DROPOUT": int(dropout), "DQ": int(dq), **shape_defines(256)}


CONFIGURATIONS: list[tuple[str, dict[str, int | str]]] = [
    *(("attention_backward", defines(*case)) for case in itertools.product(FORMATS, (64, 128), (False, True))),
    *(
        ("attention_backward_wide", wide_defines(*case))
        for case in itertools.product(FORMATS, (False, True), (False, True))
    ),
]


@functools.cache
def _kernel(dtype: torch.dtype, size: int, dropout: bool, entry: str) -> launch.Kernel:
    macros = defines(dtype, size, dropout)
    chunks, queries, stages = (int(macros[name]) for name in ("D_CHUNKS", "QUERIES", "STAGES"))
    keys, streamed = 2 * chunks * BLOCK * 128, stages * 2 * (chunks * queries * 128 + 6 * queries)
    ds, dq = 2 * queries * BLOCK * 2, (2 if queries == 64 else 1) * queries * size * 4
    shared = keys + streamed + ds + dq + SLACK
    return launch.function("attention_backward", entry, macros, shared if entry == "attention_backward" else 0)


@functools.cache
def _wide_kernel(dtype: torch.dtype, dropout: bool, dq: bool) -> launch.Kernel:
    macros = wide_defines(dtype, dropout, dq)
    chunks, stages = int(macros["D_CHUNKS"]), int(macros["STAGES"])
    shared = 2 * chunks * BLOCK * 128 + stages * 2 * chunks * _STREAM_ROWS * 128 + 8 + 16 * stages
    return launch.function("attention_backward_wide", "attention_backward", macros, shared)


@functools.cache
def _wide_dots(dtype: torch.dtype) -> launch.Kernel:
    return launch.function("attention_backward_wide", "dots", wide_defines(dtype, False, True))


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
    inputs = tuple(loadable(x) for x in (grad, q, k, v, out))
    # One stride serves both dk and dv.
    dv_written = dv if dv.stride() == dk.stride() else torch.empty_like(dk)
    run = _narrow if q.shape[3] <= NARROW else _wide
    run(inputs, m, inv, (dq, dk, dv_written), options)
    if dv_written is not dv:
        dv.copy_(dv_written)
    return dq, dk, dv


Inputs = tuple[torch.Tensor, ...]  # grad, q, k, v, out


def _narrow(inputs: Inputs, m: torch.Tensor, inv: torch.Tensor, results: Inputs, options: Options) -> None:
    grad, q, k, v, out = inputs
    dq, dk, dv = results
    (b, h, sq, d), (_, heads, skv, _) = q.shape, k.shape
    device, dropout = q.device.index, threshold(options[3]) > 0
    size = capacity(d)
    queries = int(defines(q.dtype, size, False)["QUERIES"])
    padded = -(-sq // BLOCK) * BLOCK
    tiles = padded // queries
    stats = torch.empty((3, b * h, padded), dtype=torch.float32, device=q.device)
    sums = torch.empty(b * h * padded * size, dtype=torch.float32, device=q.device)
    turns = torch.empty(b * h * tiles + 1, dtype=torch.int32, device=q.device)
    scratch = np.zeros((), SCRATCH)
    for place, name in enumerate(("base", "inv", "dots")):
        scratch[name] = stats[place].data_ptr()
    scratch["dq"], scratch["turns"], scratch["ticket"] = sums.data_ptr(), turns.data_ptr(), turns[-1:].data_ptr()
    together = max(1, L2 // (12 * padded * size * (h // heads)))  # heads whose q, grad, dq, k and v fit

    def of(written: torch.Tensor) -> launch.ByValue:
        a = arguments(q, k, written, *options)
        a["together"] = together
        return launch.by_value(a)

    space = launch.by_value(scratch)
    args = [of(out), grad.data_ptr(), out.data_ptr(), *grad.stride()[:3], m.data_ptr(), inv.data_ptr(), space]
    kernel = _kernel(q.dtype, size, False, "dots")
    launch.launch(kernel, (b * h, -(-padded // (8192 // size))), (256,), args, device=device)

    maps = [tensor_map(x, rows).argument for x, rows in ((q, queries), (k, BLOCK), (v, BLOCK), (grad, queries))]
    kernel = _kernel(q.dtype, size, dropout, "attention_backward")
    args = [*maps, of(dk), space, dk.data_ptr(), dv.data_ptr()]
    grid = (-(-skv // BLOCK) * b * heads,)
    launch.launch(kernel, grid, (THREADS,), args, kernel.max_dynamic_smem, device=device, early=True)

    kernel = _kernel(q.dtype, size, False, "finish")
    launch.launch(kernel, (tiles, b * h), (256,), [of(dq), space, dq.data_ptr()], device=device, early=True)


def _wide(inputs: Inputs, m: torch.Tensor, inv: torch.Tensor, results: Inputs, options: Options) -> None:
    grad, q, k, v, out = inputs
    dq, dk, dv = results
    (b, h, sq, d), (_, heads, skv, _) = q.shape, k.shape
    device, dropout = q.device.index, threshold(options[3]) > 0
    padded = -(-sq // BLOCK) * BLOCK
    softmax = torch.empty((b * h, padded, 2), dtype=torch.float32, device=q.device)
    dots = torch.empty((b * h, padded), dtype=torch.float32, device=q.device)

    def of(written: torch.Tensor) -> launch.ByValue:
        return launch.by_value(arguments(q, k, written, *options))

    stats = [softmax.data_ptr(), dots.data_ptr()]
    args = [of(out), grad.data_ptr(), out.data_ptr(), *grad.stride()[:3], m.data_ptr(), inv.data_ptr(), *stats]
    launch.launch(_wide_dots(q.dtype), (padded // _DOT_ROWS, b * h), (32 * _DOT_ROWS,), args, device=device)

    columns = -(-d // 128)
    fixed = {name: tensor_map(x, BLOCK).argument for name, x in (("q", q), ("grad", grad), ("k", k), ("v", v))}
    streamed = {
        name: tensor_map(x, _STREAM_ROWS).argument for name, x in (("q", q), ("grad", grad), ("k", k), ("v", v))
    }
    for is_dq, x, y, written, rows, count in (
        (False, "kv", ("q", "grad"), (dv, dk), skv, heads),
        (True, ("q", "grad"), "kv", (dq, dq), sq, h),
    ):
        kernel = _wide_kernel(q.dtype, dropout, is_dq)
        args = [fixed[x[0]], fixed[x[1]], streamed[y[0]], streamed[y[1]], of(written[1])]
        args += [*stats, *(tensor.data_ptr() for tensor in written)]
        grid = (-(-rows // BLOCK), b * count, columns)
        launch.launch(kernel, grid, (THREADS,), args, kernel.max_dynamic_smem, device=device)
