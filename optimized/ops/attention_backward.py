"""`twin::attention_backward` on the GPU: kernels/attention_backward.cu.

Semantics: `reference.ops.attention_backward`.
"""

import functools
import itertools

import torch

from optimized import launch
from optimized.ops import attention
from reference.ops.attention import BLOCK, Options
from reference.ops.attention_backward import outputs
from reference.ops.dropout import threshold
from reference.ops.library import on_cuda

_STREAM_ROWS = 64  # kStreamRows of the kernel
_DOT_ROWS = 8  # queries of a block of `dots`


@functools.cache
def _kernel(dtype: torch.dtype, d: int, dropout: bool, dq: bool) -> launch.Kernel:
    macros = attention.defines(dtype, d, dropout, DQ=int(dq))
    chunks, stages = macros["D_CHUNKS"], macros["STAGES"]
    shared = 2 * chunks * BLOCK * 128 + stages * 2 * chunks * _STREAM_ROWS * 128 + 8 + 16 * stages
    return launch.function("attention_backward", "attention_backward", macros, shared)


_CASES = itertools.product(attention.FORMATS, attention.CAPACITIES, (False, True), (False, True))
CONFIGURATIONS = [_kernel(*case).configuration for case in _CASES]


@functools.cache
def _dots(dtype: torch.dtype) -> launch.Kernel:
    return launch.function("attention_backward", "dots", _kernel(dtype, 64, False, True).defines)


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
    b, h, sq, d = q.shape
    heads, skv = k.shape[1:3]
    grad, q, k, v, out = (attention.loadable(x) for x in (grad, q, k, v, out))
    padded = -(-sq // BLOCK) * BLOCK
    softmax = torch.empty((b * h, padded, 2), dtype=torch.float32, device=q.device)
    dots = torch.empty((b * h, padded), dtype=torch.float32, device=q.device)
    device = q.device.index

    def of(written: torch.Tensor) -> object:
        return launch.by_value(attention.arguments(q, k, written, *options))

    args = [of(out), grad.data_ptr(), out.data_ptr(), *grad.stride()[:3]]
    args += [m.data_ptr(), inv.data_ptr(), softmax.data_ptr(), dots.data_ptr()]
    launch.launch(_dots(q.dtype), (padded // _DOT_ROWS, b * h), (32 * _DOT_ROWS,), args, device=device)

    capacity = attention.capacity(d)
    # One stride serves both results of a launch.
    dv_written = dv if dv.stride() == dk.stride() else torch.empty_like(dk)
    for is_dq, fixed, streamed, written, rows, count in (
        (False, (k, v), (q, grad), (dv_written, dk), skv, heads),
        (True, (q, grad), (k, v), (dq, dq), sq, h),
    ):
        kernel = _kernel(q.dtype, capacity, threshold(options[3]) > 0, is_dq)
        maps = [attention.tensor_map(x, BLOCK) for x in fixed] + [
            attention.tensor_map(x, _STREAM_ROWS) for x in streamed
        ]
        args = [*(one.argument for one in maps), of(written[1])]
        args += [tensor.data_ptr() for tensor in (softmax, dots, *written)]
        grid = (-(-rows // BLOCK), b * count, -(-d // min(capacity, 128)))
        launch.launch(kernel, grid, (attention.THREADS,), args, kernel.max_dynamic_smem, device=device)
    if dv_written is not dv:
        dv.copy_(dv_written)
    return dq, dk, dv
