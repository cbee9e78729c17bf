"""`twin::attention_backward` on the GPU.

Kernels: attention_backward.cu and attention_backward_ends.cu; attention_backward_wide.cu for wide heads.

Semantics: `reference.ops.attention_backward`.
"""

import functools
import itertools
from typing import Any

import numpy as np
import torch

from optimized import launch
from optimized.ops import attention
from reference.ops.attention import BLOCK, Options
from reference.ops.attention_backward import outputs
from reference.ops.dropout import threshold
from reference.ops.library import on_cuda

_THREADS = 384
WIDE = 256  # the head dimension that takes attention_backward_wide.cu
_STREAM_ROWS = 64  # kStreamRows of the wide kernel
_DOT_ROWS = 8  # queries of a block of its `dots`
_DOT_CHANNELS = 8192  # channels of all queries of a block of the other `dots`

KEEP = 256 << 20  # bytes that dropout's bits may take: as many heads as have theirs there run in one launch

# struct Scratch of kernels/attention_scratch.cuh.
POINTERS = ("base", "inv", "dots", "dq", "turns", "ticket", "keep")
SCRATCH = np.dtype([(name, "u8") for name in POINTERS] + [("first_head", "i4"), ("works", "i4")])


def queries_of(d: int) -> int:
    """Queries of a tile, for a head dimension of 64 or 128."""
    return 8192 // d


@functools.cache
def _kernel(dtype: torch.dtype, d: int, dropout: bool, biased: bool, lengths: bool) -> launch.Kernel:
    queries = queries_of(d)
    macros = attention.defines(dtype, d, dropout, QUERIES=queries, **attention.option_macros(biased, lengths))
    chunks, stages = macros["D_CHUNKS"], macros["STAGES"]
    keys, streamed = 2 * chunks * BLOCK * 128, stages * 2 * (chunks * queries * 128 + 6 * queries)
    ds, dq = 2 * queries * BLOCK * 2, (2 if d == 128 else 1) * queries * d * 4
    shared = keys + streamed + ds + dq + attention.SLACK
    return launch.function("attention_backward", "attention_backward", macros, shared)


@functools.cache
def _end_kernel(dtype: torch.dtype, d: int, lengths: bool, name: str) -> launch.Kernel:
    sizes: dict[str, int | str] = {"FORMAT": attention.FORMATS[dtype], "N_OUT": d, "QUERIES": queries_of(d)}
    return launch.function("attention_backward_ends", name, sizes | attention.option_macros(False, lengths))


@functools.cache
def _wide_kernel(
    dtype: torch.dtype, dropout: bool, biased: bool, lengths: bool, dq: bool, name: str = "attention_backward"
) -> launch.Kernel:
    macros = attention.defines(dtype, WIDE, dropout, DQ=int(dq), **attention.option_macros(biased, lengths))
    chunks, stages = macros["D_CHUNKS"], macros["STAGES"]
    shared = 2 * chunks * BLOCK * 128 + stages * 2 * chunks * _STREAM_ROWS * 128 + 8 + 16 * stages
    return launch.function("attention_backward_wide", name, macros, shared if name == "attention_backward" else 0)


_EITHER = attention.EITHER
CONFIGURATIONS = [
    *(_kernel(*case).configuration for case in itertools.product(attention.FORMATS, (64, 128), *[_EITHER] * 3)),
    *(_end_kernel(*case, "dots").configuration for case in itertools.product(attention.FORMATS, (64, 128), _EITHER)),
    *(_wide_kernel(*case).configuration for case in itertools.product(attention.FORMATS, *[_EITHER] * 4)),
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
    options = attention.readable(options)
    options = (*options[:9], None, *options[10:])  # 1 / l has what sinks take
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
    index, capacity, drops = q.device.index, attention.capacity(d), threshold(options[5]) > 0
    group, queries, blocks, padded = h // heads, queries_of(capacity), -(-skv // BLOCK), -(-sq // BLOCK) * BLOCK
    tiles = padded // queries
    # Heads of keys whose q, grad, dq, k and v fit into L2 side by side, and as many as a launch takes.
    together = max(1, attention.L2 // (12 * padded * capacity * group))
    at_once = b * heads
    keep_bytes = padded * blocks * (BLOCK // 8) * group  # of a head of keys
    if drops and at_once * keep_bytes > KEEP:
        at_once = max(1, KEEP // keep_bytes)
        together = min(together, at_once)
        at_once -= at_once % together
    stats = torch.empty((3, b * h, padded), dtype=torch.float32, device=q.device)
    sums = torch.empty(b * h * padded * capacity, dtype=torch.float32, device=q.device)
    turns = torch.empty(b * h * tiles + 1, dtype=torch.int32, device=q.device)
    keep = torch.empty(at_once * keep_bytes if drops else 0, dtype=torch.uint8, device=q.device)
    scratch = np.zeros((), SCRATCH)
    for name, tensor in zip(POINTERS, (*stats, sums, turns, turns[-1:], keep), strict=True):
        scratch[name] = tensor.data_ptr()

    lengths = attention.has_lengths(options)

    def of(written: torch.Tensor, options: Any = (*options[:7], *[None] * 3, *options[10:])) -> launch.ByValue:
        a = attention.arguments(q, k, written, *options)
        a["together"] = together
        return launch.by_value(a)

    args = [of(out), grad.data_ptr(), out.data_ptr(), *grad.stride()[:3], m.data_ptr(), inv.data_ptr()]
    kernel = _end_kernel(q.dtype, capacity, lengths, "dots")
    grid = (b * h, -(-padded * capacity // _DOT_CHANNELS))
    launch.launch(kernel, grid, (256,), [*args, launch.by_value(scratch.copy())], device=index)

    maps = [attention.tensor_map(x, rows) for x, rows in ((q, queries), (k, BLOCK), (v, BLOCK), (grad, queries))]
    kernel = _kernel(q.dtype, capacity, drops, attention.is_biased(options), lengths)
    draw = _end_kernel(q.dtype, capacity, lengths, "attention_keep")
    for first in range(0, b * heads, at_once):
        count = min(at_once, b * heads - first)
        scratch["first_head"], scratch["works"] = first * group, (first + count) * blocks
        space = launch.by_value(scratch.copy())
        if drops:
            args = [of(out), space, np.uint32(first * blocks)]
            launch.launch(draw, (blocks, padded // BLOCK, count * group), (256,), args, device=index)
        args = [*(one.argument for one in maps), of(dk, options), space, dk.data_ptr(), dv.data_ptr()]
        works = min(count * blocks, launch.processors(index))
        launch.launch(kernel, (works,), (_THREADS,), args, kernel.max_dynamic_smem, device=index, early=not drops)

    args = [of(dq), space, dq.data_ptr()]
    kernel = _end_kernel(q.dtype, capacity, lengths, "attention_dq")
    launch.launch(kernel, (tiles, b * h), (256,), args, device=index, early=True)


def row_statistics(inputs: Tensors, m: torch.Tensor, inv: torch.Tensor, options: Options) -> Tensors:
    """What kernels/attention_rows.cuh reads of a query: (384 - m, 1 / l) `[b h, padded, 2]` and D `[b h, padded]`."""
    grad, q, k, _, out = inputs
    b, h, sq, _ = q.shape
    padded = -(-sq // BLOCK) * BLOCK
    softmax = torch.empty((b * h, padded, 2), dtype=torch.float32, device=q.device)
    dots = torch.empty((b * h, padded), dtype=torch.float32, device=q.device)
    args: list[Any] = [launch.by_value(attention.arguments(q, k, out, *options[:7])), grad.data_ptr(), out.data_ptr()]
    args += [*grad.stride()[:3], m.data_ptr(), inv.data_ptr(), softmax.data_ptr(), dots.data_ptr()]
    kernel = _wide_kernel(q.dtype, False, False, False, True, "dots")
    launch.launch(kernel, (padded // _DOT_ROWS, b * h), (32 * _DOT_ROWS,), args, device=q.device.index)
    return softmax, dots


def _wide(inputs: Tensors, m: torch.Tensor, inv: torch.Tensor, results: Tensors, options: Options) -> None:
    grad, q, k, v, _ = inputs
    dq, dk, dv = results
    (b, h, sq, d), (_, heads, skv, _) = q.shape, k.shape
    index = q.device.index
    softmax, dots = row_statistics(inputs, m, inv, options)

    for is_dq, fixed, streamed, written, rows, count in (
        (False, (k, v), (q, grad), (dv, dk), skv, heads),
        (True, (q, grad), (k, v), (dq, dq), sq, h),
    ):
        more = (threshold(options[5]) > 0, attention.is_biased(options), attention.has_lengths(options))
        kernel = _wide_kernel(q.dtype, *more, is_dq)
        maps = [attention.tensor_map(x, BLOCK) for x in fixed]
        maps += [attention.tensor_map(x, _STREAM_ROWS) for x in streamed]
        arguments = attention.arguments(q, k, written[1], *options)
        args: list[Any] = [*(one.argument for one in maps), launch.by_value(arguments)]
        args += [tensor.data_ptr() for tensor in (softmax, dots, *written)]
        grid = (-(-rows // BLOCK), b * count, -(-d // 128))
        launch.launch(kernel, grid, (_THREADS,), args, kernel.max_dynamic_smem, device=index)
