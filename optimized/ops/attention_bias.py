"""`twin::attention_bias_backward` on the GPU: kernels/attention_bias.cu. Semantics: `reference.ops.attention_bias`."""

import functools
import itertools
from typing import Any

import numpy as np
import torch

from optimized import launch
from optimized.ops import attention, attention_backward
from reference.ops.attention import BLOCK
from reference.ops.attention_backward import bias_outputs
from reference.ops.attention_options import Options
from reference.ops.dropout import threshold
from reference.ops.library import on_cuda

_KEYS = 64  # of a block: kStreamRows of kernels/attention_bias.cu
_THREADS = 256


@functools.cache
def _kernel(dtype: torch.dtype, d: int, dropout: bool, lengths: bool) -> launch.Kernel:
    macros = attention.defines(dtype, d, dropout, **attention.option_macros(True, lengths))
    tiles = 2 * macros["D_CHUNKS"] * (BLOCK + _KEYS) * 128
    return launch.function("attention_bias", "attention_bias", macros, tiles + attention.SLACK)


_CASES = itertools.product(attention.FORMATS, attention.CAPACITIES, attention.EITHER, attention.EITHER)
CONFIGURATIONS = [_kernel(*case).configuration for case in _CASES if not (case[1] == attention.WIDE and case[3])]


@on_cuda
def attention_bias_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    *given: Any,
) -> torch.Tensor:
    """-> dbias of bias's shape and dtype; arguments as in `reference.ops.attention_backward`."""
    dbias = bias_outputs(grad, q, k, v, out, m, inv, *given)
    attention.check_grid("twin::attention_bias_backward", q)
    if not q.numel() or not k.numel():
        return dbias.zero_()
    grad, q, k, v, out = inputs = tuple(attention.loadable(x) for x in (grad, q, k, v, out))
    options = attention.readable(Options(*given), q, k, v)
    statistics = attention_backward.row_statistics(inputs, m, inv, options)
    kernel = _kernel(q.dtype, attention.widest(q, v), threshold(options.dropout) > 0, options.has_lengths)
    maps = [attention.tensor_map(x, rows) for x, rows in ((q, BLOCK), (grad, BLOCK), (k, _KEYS), (v, _KEYS))]
    args: list[Any] = [*(one.argument for one in maps), launch.by_value(attention.arguments(q, k, out, options))]
    args += [*(x.data_ptr() for x in statistics), dbias.data_ptr(), *map(np.int32, dbias.shape[:2])]
    grid = (-(-k.shape[2] // _KEYS), -(-q.shape[2] // BLOCK), dbias.shape[0] * dbias.shape[1])
    launch.launch(kernel, grid, (_THREADS,), args, kernel.max_dynamic_smem, device=q.device.index)
    return dbias
