"""`twin::attention_fp8` on the GPU: kernels/attentions/attention_fp8.cu. Semantics:
`reference.ops.attentions.attention_fp8`."""

import functools
import itertools
from typing import Any

import torch

from optimized.cuda import launch
from optimized.cuda.tensor_map import TensorMap, encode
from optimized.ops.attentions.attention import (
    CAPACITIES,
    EITHER,
    FORMATS,
    L2,
    SLACK,
    arguments,
    capacity,
    check_grid,
    is_loadable,
    placed,
    tensor_map,
)
from optimized.ops.random.dropout import advance
from reference.ops.attentions.attention import BLOCK, LOWEST
from reference.ops.attentions.attention_fp8 import outputs
from reference.ops.attentions.attention_options import Options
from reference.ops.casts.cast_transpose import ceil16
from reference.ops.library import on_cuda
from reference.ops.random.dropout import threshold

QUERIES = 192  # of a tile: 64 for each consumer warpgroup
_THREADS = 512


@functools.cache
def _kernels(dtype: torch.dtype, d: int, dropout: bool, place: int = 0) -> tuple[launch.Kernel, launch.Kernel]:
    """The kernel for heads of a capacity, with results of `dtype`, and the one that resets its ticket."""
    chunks, columns = -(-d // 128), min(d, 128)
    stages = 4 if chunks == 1 else 2
    sizes: dict[str, int | str] = {
        "D_CHUNKS": chunks,
        "D_STEPS": d // 32,
        "N_OUT": columns,
        "STAGES": stages,
        "Q_STAGES": 2,
    }
    macros: dict[str, int | str] = {"FORMAT": FORMATS[dtype], "DROPOUT": int(dropout), **sizes}
    macros |= {"PLACED": place} if place else {}
    rows = 2 * chunks * QUERIES + stages * (chunks * BLOCK + columns + 8)  # of 128 bytes, in shared memory
    kernel = launch.function("attention_fp8", "attention_fp8", macros, rows * 128 + SLACK)
    return kernel, launch.function("attention_fp8", "attention_fp8_ticket", macros)


CONFIGURATIONS = [_kernels(*case)[0].configuration for case in itertools.product(FORMATS, CAPACITIES, EITHER)]
CONFIGURATIONS += [_kernels(*case, True, 1)[0].configuration for case in itertools.product(FORMATS, CAPACITIES)]


def loadable(x: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """Codes `[b, h, s, columns]` that the copy engine can read, `rows` of them at a time: x, or a copy of x.

    A copy has room for a multiple of 16 columns, and a multiple of `rows` rows, the last of which mean nothing.
    """
    s, columns = x.shape[2:]
    if is_loadable(x) and s % rows == 0:
        return x
    copy = torch.empty((*x.shape[:2], -(-s // rows) * rows, ceil16(columns)), dtype=x.dtype, device=x.device)
    copy[:, :, :s, :columns].copy_(x)
    return copy[..., :columns]


def key_map(k: torch.Tensor) -> TensorMap:
    """The tensor map of k's `loadable(k, 4)` codes `[b, hkv, skv, d]`: rows 4 n + 2 h + e are at (e + 2 h, n).

    Two boxes, of h = 0 and of h = 1, have a block's keys in the order of kernels/attentions/attention_fp8_softmax.cuh.
    """
    b, h, s, d = k.shape
    row, head, batch = (k.stride(n) if k.shape[n] > 1 else 16 for n in (2, 1, 0))  # of one element it means nothing
    shape, steps = (d, 4, s // 4, h, b), (row, 4 * row, head, batch)
    return encode(k.data_ptr(), k.dtype, shape, steps, (128, 2, BLOCK // 4, 1, 1), 128, 256)


@on_cuda
def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v_t: torch.Tensor,
    q_scale_inv: torch.Tensor,
    k_scale_inv: torch.Tensor,
    v_scale_inv: torch.Tensor,
    *given: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ · scale) v -> (out like q, m fp32 `[b, h, sq]`, inv fp32 `[b, h, sq]`)."""
    out, m, inv = outputs(q, k, v_t, q_scale_inv, k_scale_inv, v_scale_inv, *given)
    *others, dtype = given
    options = Options(*others)
    check_grid("twin::attention_fp8", q)
    b, h, sq, d = q.shape
    if out.numel() and k.numel():
        q_codes, k_codes, v_codes = loadable(q), loadable(k, 4), loadable(v_t)  # copies must live until the launch
        a = arguments(q, k, out, options)
        a["together"] = max(1, L2 // (2 * k.shape[2] * capacity(d))) * a["group"]  # heads whose keys and values fit
        kernel, reset = _kernels(dtype, capacity(d), threshold(options.dropout) > 0, placed(options))
        maps = [tensor_map(q_codes, QUERIES), key_map(k_codes), tensor_map(v_codes, min(capacity(d), 128))]
        tiles, index = -(-sq // QUERIES) * b * h * -(-d // 128), q.device.index
        blocks = min(tiles, launch.processors(index))
        ticket = torch.empty(1, dtype=torch.int32, device=q.device) if tiles > blocks else None
        if ticket is not None:
            launch.launch(reset, (1,), (1,), [ticket.data_ptr()], device=index)
        args = [*(x.argument for x in maps), *(x.data_ptr() for x in (q_scale_inv, k_scale_inv, v_scale_inv))]
        args += [launch.by_value(a), 0 if ticket is None else ticket.data_ptr()]
        args += [out.data_ptr(), m.data_ptr(), inv.data_ptr()]
        early = ticket is not None
        launch.launch(kernel, (blocks,), (_THREADS,), args, kernel.max_dynamic_smem, device=index, early=early)
    elif out.numel():
        out.zero_(), m.fill_(float(LOWEST)), inv.zero_()
    if threshold(options.dropout):
        assert options.rng_state is not None
        advance(options.rng_state)
    return out, m, inv
