"""`twin::attention_backward` on the GPU: kernels/attention_backward.cu, and attention_backward_wide.cu for wide heads.

Semantics: `reference.ops.attention_backward`.
"""

import functools
import itertools

import numpy as np
import torch

from optimized import launch
from optimized.ops import attention
from reference.ops.attention import BLOCK, Options
from reference.ops.attention_backward import outputs
from reference.ops.dropout import threshold
from reference.ops.library import on_cuda

WIDE = 256  # the head dimension that takes attention_backward_wide.cu
_STREAM_ROWS = 64  # kStreamRows of the wide kernel
_DOT_ROWS = 8  # queries of a block of its `dots`
_DOT_CHANNELS = 8192  # channels of all queries of a block of the other `dots`

# struct Scratch of kernels/attention_backward.cu.
SCRATCH = np.dtype([(name, "u8") for name in ("base", "inv", "dots", "dq", "turns", "ticket")])


def queries_of(d: int) -> int:
    """Queries of a tile, for a head dimension of 64 or 128."""
    return 8192 // d


@functools.cache
def _kernel(dtype: torch.dtype, d: int, dropout: bool, name: str = "attention_backward") -> launch.Kernel:
    queries = queries_of(d)
    macros = attention.defines(dtype, d, dropout, QUERIES=queries)
    chunks, stages = macros["D_CHUNKS"], macros["STAGES"]
    keys, streamed = 2 * chunks * BLOCK * 128, stages * 2 * (chunks * queries * 128 + 6 * queries)
    ds, dq = 2 * queries * BLOCK * 2, (2 if d == 128 else 1) * queries * d * 4
    shared = keys + streamed + ds + dq + attention.SLACK if name == "attention_backward" else 0
    return launch.function("attention_backward", name, macros, shared)


@functools.cache
def _wide_kernel(dtype: torch.dtype, dropout: bool, dq: bool, name: str = "attention_backward") -> launch.Kernel:
    macros = attention.defines(dtype, WIDE, dropout, DQ=int(dq))
    chunks, stages = macros["D_CHUNKS"], macros["STAGES"]
    shared = 2 * chunks * BLOCK * 128 + stages * 2 * chunks * _STREAM_ROWS * 128 + 8 + 16 * stages
    return launch.function("attention_backward_wide", name, macros, shared if name == "attention_backward" else 0)


_EITHER = (False, True)
CONFIGURATIONS = [
    *(_kernel(*case).configuration for case in itertools.product(attention.FORMATS, (64, 128), _EITHER)),
    *(_wide_kernel(*case).configuration for case in itertools.product(attention.FORMATS, _EITHER, _EITHER)),
]

Tensors = tuple[torch.Tensor, ...]


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
    attention.check_grid("twin::attention_backward", q)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    inputs = tuple(attention.loadable(x) for x in (grad, q, k, v, out))
    # One stride serves both dk and dv.
    dv_written = dv if dv.stride() == dk.stride() else torch.empty_like(dk)
    run = _wide if attention.capacity(q.shape[3]) == WIDE else _narrow
    run(inputs, m, inv, (dq, dk, dv_written), options)
    if dv_written is not dv:
        dv.copy_(dv_written)
    return dq, dk, dv


def _narrow(inputs: Tensors, m: torch.Tensor, inv: torch.Tensor, results: Tensors, options: Options) -> None:
    grad, q, k, v, out = inputs
    dq, dk, dv = results
    (b, h, sq, d), (_, heads, skv, _) = q.shape, k.shape
    index, capacity = q.device.index, attention.capacity(d)
    queries, padded = queries_of(capacity), -(-sq // BLOCK) * BLOCK
    tiles = padded // queries
    stats = torch.empty((3, b * h, padded), dtype=torch.float32, device=q.device)
    sums = torch.empty(b * h * padded * capacity, dtype=torch.float32, device=q.device)
    turns = torch.empty(b * h * tiles + 1, dtype=torch.int32, device=q.device)
    scratch = np.zeros((), SCRATCH)
    for name, tensor in zip(SCRATCH.names or (), (*stats, sums, turns, turns[-1:]), strict=True):
        scratch[name] = tensor.data_ptr()
    space = launch.by_value(scratch)

    def of(written: torch.Tensor) -> launch.ByValue:
        a = attention.arguments(q, k, written, *options)
        # Heads of keys whose q, grad, dq, k and v fit.
        a["together"] = max(1, attention.L2 // (12 * padded * capacity * (h // heads)))
        return launch.by_value(a)

    args = [of(out), grad.data_ptr(), out.data_ptr(), *grad.stride()[:3], m.data_ptr(), inv.data_ptr(), space]
    kernel = _kernel(q.dtype, capacity, False, "dots")
    launch.launch(kernel, (b * h, -(-padded * capacity // _DOT_CHANNELS)), (256,), args, device=index)

    maps = [attention.tensor_map(x, rows) for x, rows in ((q, queries), (k, BLOCK), (v, BLOCK), (grad, queries))]
    args = [*(one.argument for one in maps), of(dk), space, dk.data_ptr(), dv.data_ptr()]
    kernel = _kernel(q.dtype, capacity, threshold(options[5]) > 0)
    grid = (-(-skv // BLOCK) * b * heads,)
    launch.launch(kernel, grid, (attention.THREADS,), args, kernel.max_dynamic_smem, device=index, early=True)

    kernel = _kernel(q.dtype, capacity, False, "attention_dq")
    launch.launch(kernel, (tiles, b * h), (256,), [of(dq), space, dq.data_ptr()], device=index, early=True)


def _wide(inputs: Tensors, m: torch.Tensor, inv: torch.Tensor, results: Tensors, options: Options) -> None:
    grad, q, k, v, out = inputs
    dq, dk, dv = results
    (b, h, sq, d), (_, heads, skv, _) = q.shape, k.shape
    index, padded = q.device.index, -(-sq // BLOCK) * BLOCK
    softmax = torch.empty((b * h, padded, 2), dtype=torch.float32, device=q.device)
    dots = torch.empty((b * h, padded), dtype=torch.float32, device=q.device)

    def of(written: torch.Tensor) -> launch.ByValue:
        return launch.by_value(attention.arguments(q, k, written, *options))

    args = [of(out), grad.data_ptr(), out.data_ptr(), *grad.stride()[:3]]
    args += [m.data_ptr(), inv.data_ptr(), softmax.data_ptr(), dots.data_ptr()]
    kernel = _wide_kernel(q.dtype, False, True, "dots")
    launch.launch(kernel, (padded // _DOT_ROWS, b * h), (32 * _DOT_ROWS,), args, device=index)

    for is_dq, fixed, streamed, written, rows, count in (
        (False, (k, v), (q, grad), (dv, dk), skv, heads),
        (True, (q, grad), (k, v), (dq, dq), sq, h),
    ):
        kernel = _wide_kernel(q.dtype, threshold(options[5]) > 0, is_dq)
        maps = [attention.tensor_map(x, BLOCK) for x in fixed]
        maps += [attention.tensor_map(x, _STREAM_ROWS) for x in streamed]
        args = [*(one.argument for one in maps), of(written[1])]
        args += [tensor.data_ptr() for tensor in (softmax, dots, *written)]
        grid = (-(-rows // BLOCK), b * count, -(-d // 128))
        launch.launch(kernel, grid, (attention.THREADS,), args, kernel.max_dynamic_smem, device=index)
