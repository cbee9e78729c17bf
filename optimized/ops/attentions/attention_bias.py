"""`twin::attention_bias_backward` on the GPU: kernels/attentions/attention_bias.cu. Semantics:
`reference.ops.attentions.attention_bias`."""

import functools
import itertools
from typing import Any

import numpy as np
import torch

from optimized.cuda import launch
from optimized.ops.attentions import attention, attention_backward
from optimized.ops.attentions.attention import ENTRIES, Entries
from reference.ops.attentions.attention import BLOCK
from reference.ops.attentions.attention_backward import bias_outputs
from reference.ops.attentions.attention_options import Options
from reference.ops.attentions.attention_packed import by_heads, sizes
from reference.ops.library import on_cuda
from reference.ops.random.dropout import threshold

_KEYS = 64  # of a block: kStreamRows of kernels/attentions/attention_bias.cu
_THREADS = 256


@functools.cache
def _kernel(dtype: torch.dtype, d: int, dropout: bool, entries: Entries) -> launch.Kernel:
    chunks = d // 64
    macros: dict[str, int | str] = {"FORMAT": attention.FORMATS[dtype], "D_CHUNKS": chunks, "DROPOUT": int(dropout)}
    macros |= entries.macros
    tiles = 2 * chunks * (BLOCK + _KEYS) * 128
    return launch.function("attention_bias", "attention_bias", macros, tiles + attention.SLACK)


CONFIGURATIONS = [
    _kernel(*case, entries).configuration
    for several in (ENTRIES[:2], ENTRIES[2:])
    for *case, entries in itertools.product(attention.FORMATS, attention.CAPACITIES, attention.EITHER, several)
]
CONFIGURATIONS += [
    _kernel(*case, True, Entries(False, placed=place)).configuration
    for place in attention.PLACES
    for case in itertools.product(attention.FORMATS, attention.CAPACITIES)
]


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
    """-> dbias of bias's shape and dtype; arguments as in `reference.ops.attentions.attention_backward`."""
    dbias = bias_outputs(grad, q, k, v, out, m, inv, *given)
    grad, q, k, v, out = inputs = tuple(attention.loadable(by_heads(x)) for x in (grad, q, k, v, out))
    options = attention.readable(Options(*given))
    b, _, _, sq, skv = sizes(q, k, options)
    attention.check_grid("twin::attention_bias_backward", q, b)
    if not q.numel() or not k.numel() or not sq or not skv:
        return dbias.zero_()
    statistics = attention_backward.row_statistics(inputs, m, inv, options)
    kernel = _kernel(q.dtype, attention.widest(q, v), threshold(options.dropout) > 0, Entries.of(options))
    maps = [attention.tensor_map(x, rows) for x, rows in ((q, BLOCK), (grad, BLOCK), (k, _KEYS), (v, _KEYS))]
    args: list[Any] = [*(one.argument for one in maps), launch.by_value(attention.arguments(q, k, out, options))]
    args += [*(x.data_ptr() for x in statistics), dbias.data_ptr(), *map(np.int32, dbias.shape[:2])]
    grid = (-(-skv // _KEYS), -(-sq // BLOCK), dbias.shape[0] * dbias.shape[1])
    launch.launch(kernel, grid, (_THREADS,), args, kernel.max_dynamic_smem, device=q.device.index)
    return dbias
